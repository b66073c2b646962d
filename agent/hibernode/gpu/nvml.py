"""NVML, the driver's library, behind one edge: the only module that knows nvidia-ml-py.

Every function here may block for as long as the driver likes, so none is called from the event loop, see
:mod:`hibernode.gpu.calls`. Every value is optional: what a GPU does not support is None with the driver's
word for it. What comes from the library is not trusted to be text.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from hibernode.errors import HibernodeError
from hibernode.gpu.readings import LEAST_ABSURD, MIG_FIELDS, READINGS, Take
from hibernode.gpu.state import Gpu, GpuProcess, GpuState, MigInstance, Readings, Versions
from hibernode.text import printable

LIBRARY: Final = "libnvidia-ml.so.1"
"""As nvidia-ml-py asks the loader for it: by its name, so wherever ld.so looks."""

UNINITIALIZED: Final = 1
NOT_FOUND: Final = 6
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
UNKNOWN: Final = 999
"""nvml.h: some of ``nvmlReturn_t``."""

OVER: Final = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})
"""With these nothing can be read from any GPU."""

GONE: Final = frozenset({GPU_IS_LOST, RESET_REQUIRED})
"""With these nothing can be read from this GPU."""

_UUID: Final = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,90}")
_MAX_TEXT: Final = 96
"""nvml.h: NVML_DEVICE_UUID_V2_BUFFER_SIZE, the longest of its texts that are shown."""

MAX_GPUS: Final = 256
MAX_INSTANCES: Final = 64
"""Many times what there is, 16 GPUs in a machine and 7 MIG devices on one. One that says more is broken."""

_MAX_ERROR: Final = 512
"""Of the loader's sentence, which has a path in it."""

_LISTS: Final = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses_v3"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses_v3"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses_v3"),
)

_REMEDIES: Final = {
    LIBRARY_NOT_FOUND: "install NVIDIA's driver; in a container, let NVIDIA's runtime mount it",
    DRIVER_NOT_LOADED: "load the kernel module: modprobe nvidia",
    LIB_RM_VERSION_MISMATCH: "the driver was replaced: restart the agent, and reboot if that does not help",
    UNKNOWN: "in a container, the devices may have been taken away (systemctl daemon-reload): restart it",
}


class NvmlError(HibernodeError):
    """NVML has answered with an error; ``code`` is one of ``nvmlReturn_t``."""

    default_reason = "NvmlFailed"

    def __init__(self, message: str, code: int) -> None:
        super().__init__(
            message, remedy=_REMEDIES.get(code, "see the kernel's log: journalctl -k --grep NVRM")
        )
        self.code = code


@contextmanager
def translated(what: str = "") -> Iterator[None]:
    """Turn nvidia-ml-py's exceptions into ours."""
    import pynvml  # noqa: PLC0415 - only where a GPU is asked for

    try:
        yield
    except pynvml.NVMLError as error:
        raise NvmlError(f"{what}{': ' if what else ''}{_words(str(error))}", int(error.value)) from error
    except pynvml.NVMLLibraryMismatchError as error:  # not an NVMLError
        raise NvmlError(f"{what}: {_words(str(error))}", FUNCTION_NOT_FOUND) from error
    except UnicodeDecodeError as error:
        raise NvmlError(f"{what}: no text", UNKNOWN) from error


def _shut_down() -> None:
    import pynvml  # noqa: PLC0415 - only where a GPU is asked for

    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


class Nvml:
    """The library, loaded or not. Calls may come from any thread; :meth:`stop` waits for them.

    ``generation`` counts how often it was started: indices and handles hold within one.
    """

    def __init__(self) -> None:
        self._idle = threading.Condition()
        self._users = 0
        self._up = self._over = False
        self.generation = 0

    @property
    def up(self) -> bool:
        """Whether it was started and not stopped."""
        return self._up

    def start(self) -> None:
        """Load the library and have it speak to the driver; nothing if it does already.

        :raises NvmlError: code ``LIBRARY_NOT_FOUND``, there is none; or the driver is not as it should be.
        """
        if self._up:
            return
        _find_library()
        import pynvml  # noqa: PLC0415 - as above

        with translated("nvmlInit"):
            pynvml.nvmlInit()
        with self._idle:
            self.generation += 1
            self._up = True
        self._let_go()

    def stop(self, seconds: float) -> bool:
        """Let the library go, so that a start begins anew; False when a call of another thread hangs."""
        with self._idle:
            if not self._up:
                return True
            self._up = False
            if not self._idle.wait_for(lambda: not self._users, seconds):
                self._up = True
                return False
        _shut_down()
        return True

    def end(self) -> None:
        """Let the library go for good: now, or when the last call or start that hangs has come back."""
        self._over = True
        self._let_go()

    def _let_go(self) -> None:
        with self._idle:
            if not self._over or not self._up or self._users:
                return
            self._up = False
        _shut_down()

    @contextmanager
    def use(self) -> Iterator[Any]:
        """Hold the library while the block runs; gives nvidia-ml-py's module, whose errors become ours.

        :raises NvmlError: it is not up.
        """
        with self._idle:
            if not self._up:
                raise NvmlError("NVML is not up", UNINITIALIZED)
            self._users += 1
        try:
            import pynvml  # noqa: PLC0415 - as above

            with translated("NVML"):
                yield pynvml
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()
            self._let_go()

    # the node -----------------------------------------------------------------------------------------

    def versions(self) -> Versions:
        """Read the versions.

        :raises NvmlError: it is not up, or the driver is gone.
        """
        with self.use() as pynvml:
            take = Take(pynvml, OVER)
            take(("driver",), lambda: _words(pynvml.nvmlSystemGetDriverVersion()))
            take(("nvml",), lambda: _words(pynvml.nvmlSystemGetNVMLVersion()))
            take(("cuda",), lambda: _cuda(pynvml.nvmlSystemGetCudaDriverVersion()))
            return Versions(**take.values)

    def count(self) -> int:
        """Count the GPUs that the driver lists, whether they answer or not.

        :raises NvmlError: it is not up, or the driver does not answer, or with more than there can be.
        """
        with self.use() as pynvml, translated("nvmlDeviceGetCount"):
            count = int(pynvml.nvmlDeviceGetCount())
        if count > MAX_GPUS:
            raise NvmlError(f"nvmlDeviceGetCount: {count} GPUs, which cannot be", UNKNOWN)
        return count

    # one GPU ------------------------------------------------------------------------------------------

    def gpu(self, index: int) -> Gpu:
        """Read one GPU; one that answers with an error in the middle is ``lost`` or ``failed``.

        :raises NvmlError: it does not even say its UUID, or nothing can be read from any GPU.
        """
        with self.use() as pynvml:
            handle, uuid = named(pynvml, index)
            try:
                with translated("NVML"):
                    return _read(pynvml, handle, uuid, index)
            except NvmlError as error:
                if error.code in OVER:
                    raise
                return failed(index, error, uuid)


def named(pynvml: Any, index: int) -> tuple[Any, str]:
    """Find a GPU; its handle and its UUID.

    :raises NvmlError: it does not say who it is.
    """
    with translated(f"the GPU with index {index}"):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return handle, _uuid(pynvml.nvmlDeviceGetUUID(handle))


def failed(index: int, error: NvmlError, uuid: str = "") -> Gpu:
    """Describe a GPU that has not answered as it should."""
    return Gpu(uuid, index, GpuState.LOST if error.code in GONE else GpuState.FAILED, error.message)


def _read(pynvml: Any, handle: Any, uuid: str, index: int) -> Gpu:
    """Read all of a GPU; what holds for all of it is raised as nvidia-ml-py does."""
    take = Take(pynvml, OVER | GONE)
    take(("name",), lambda: _words(pynvml.nvmlDeviceGetName(handle)))
    take(("pci_bus_id",), lambda: _words(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    take(("minor",), lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle)))
    known = take.values
    take = Take(pynvml, OVER | GONE)
    for fields, read in READINGS:
        take(fields, _bound(read, pynvml, handle))
    instances = tuple(_instances(pynvml, handle)) if take.values["mig_mode"] else ()
    processes, reason = _processes(pynvml, handle, instances)
    if processes is None:
        take.unavailable["processes"] = reason
    return Gpu(
        uuid,
        index,
        name=known["name"] or "",
        pci_bus_id=known["pci_bus_id"] or "",
        minor=known["minor"],
        readings=Readings(**take.values, unavailable=take.unavailable),
        instances=instances,
        processes=processes,
    )


def _bound(read: Callable[[Any, Any], Any], pynvml: Any, handle: Any) -> Callable[[], Any]:
    return lambda: read(pynvml, handle)


def _instances(pynvml: Any, handle: Any) -> Iterator[MigInstance]:
    """Yield the MIG devices. Their numbers may have gaps, and one may go while we look."""
    for number in range(min(MAX_INSTANCES, int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)))):
        try:
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            uuid = _uuid(pynvml.nvmlDeviceGetUUID(device))
        except pynvml.NVMLError as error:
            if error.value in OVER | GONE:
                raise
            continue
        take = Take(pynvml, OVER | GONE)
        for fields, read in MIG_FIELDS:
            take(fields, _bound(read, pynvml, device))
        if take.values.get("profile"):
            take.values["profile"] = _words(take.values["profile"])
        yield MigInstance(uuid, **take.values, unavailable=take.unavailable)


def _processes(
    pynvml: Any, handle: Any, instances: tuple[MigInstance, ...]
) -> tuple[tuple[GpuProcess, ...] | None, str]:
    """List the processes of a GPU, each once for each instance; None and why without those that compute.

    A process may be in several lists, with the same memory in each.
    """
    uuids = {(each.gpu_instance, each.compute_instance): each.uuid for each in instances}
    take = Take(pynvml, OVER | GONE)
    found: dict[tuple[int, str], tuple[list[str], int | None]] = {}
    for kind, function in _LISTS:
        take((kind,), lambda name=function: getattr(pynvml, name)(handle))  # type: ignore[misc]
        for each in take.values[kind] or ():
            instance = uuids.get((each.gpuInstanceId, each.computeInstanceId), "")
            kinds, memory = found.setdefault((int(each.pid), instance), ([], None))
            if kind not in kinds:
                kinds.append(kind)
            found[int(each.pid), instance] = (kinds, _larger(memory, each.usedGpuMemory))
    if take.values["compute"] is None:  # of the others not every driver and GPU knows
        return None, take.unavailable["compute"]
    return tuple(
        GpuProcess(pid, tuple(kinds), memory, instance)
        for (pid, instance), (kinds, memory) in sorted(found.items())
    ), ""


def _larger(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None and value < LEAST_ABSURD]
    return max(known, default=None)


def _find_library() -> None:
    """Load the library as nvidia-ml-py will, which would call every failure an absence.

    On a node without a driver this is all that is done, so nvidia-ml-py takes no memory there.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        absent = "No such file" in str(error)
        raise NvmlError(_words(error, _MAX_ERROR), LIBRARY_NOT_FOUND if absent else UNKNOWN) from error


# texts ------------------------------------------------------------------------------------------------


def _words(text: object, limit: int = _MAX_TEXT) -> str:
    """Let a text of the driver's through the gate."""
    return printable(str(text)[:limit].strip(), keep="")


def _uuid(text: object) -> str:
    if not isinstance(text, str) or _UUID.fullmatch(text) is None:
        raise NvmlError(f"{_words(ascii(text))} is no UUID of a GPU", UNKNOWN)
    return text


def _cuda(number: int) -> str:
    """Write a version as people do; NVML's number is major * 1000 + minor * 10."""
    return f"{number // 1000}.{number % 1000 // 10}"
