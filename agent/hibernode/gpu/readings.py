"""Which calls of NVML give which of our fields: one table for GPUs, one for MIG devices.

A call that fails leaves its fields None, with the driver's word for it; only an error that holds for all that
could be asked ends the reading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

NOT_AVAILABLE: Final = frozenset({(1 << 32) - 1, (1 << 64) - 1})
"""nvml.h: NVML_VALUE_NOT_AVAILABLE as unsigned int and as unsigned long long."""

LEAST_ABSURD: Final = 1 << 63
"""No count and no size comes so far; a manifest could not hold it."""

INVALID_ARGUMENT: Final = 2
FUNCTION_NOT_FOUND: Final = 13
ARGUMENT_VERSION_MISMATCH: Final = 25
OLDER: Final = frozenset({FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH})
"""nvml.h: with these an older call, or an older struct, may work."""

Read = Callable[[Any, Any], Any]
"""From nvidia-ml-py's module and a handle to a value, or a tuple of as many as there are fields."""


class Take:
    """Collects fields. ``over`` are the errors of NVML that are raised rather than noted."""

    def __init__(self, pynvml: Any, over: Collection[int]) -> None:
        self._pynvml, self._over = pynvml, over
        self.values: dict[str, Any] = {}
        self.unavailable: dict[str, str] = {}

    def __call__(self, fields: tuple[str, ...], read: Callable[[], Any]) -> None:
        """Call ``read`` for ``fields``."""
        try:
            found = read()
        except self._pynvml.NVMLError as error:
            if error.value in self._over:
                raise
            self._missing(fields, str(error))
        except self._pynvml.NVMLLibraryMismatchError:
            self._missing(fields, "Function Not Found")
        except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
            self._missing(fields, f"{type(error).__name__}")
        else:
            for name, value in zip(fields, found if isinstance(found, tuple) else (found,), strict=True):
                if isinstance(value, int) and (value in NOT_AVAILABLE or value >= LEAST_ABSURD):
                    self._missing((name,), "Not Available")
                else:
                    self.values[name] = value

    def _missing(self, fields: tuple[str, ...], why: str) -> None:
        for name in fields:
            self.values[name], self.unavailable[name] = None, why


def _either(pynvml: Any, *reads: Callable[[], Any]) -> Any:
    """Take the first that this driver's library has."""
    *others, last = reads
    for read in others:
        try:
            return read()
        except pynvml.NVMLError as error:
            if error.value not in OLDER:
                raise
    return last()


def _memory(pynvml: Any, handle: Any) -> tuple[int | None, ...]:
    """Read v2, which tells apart what the driver keeps for itself, else v1."""

    def v2() -> tuple[int | None, ...]:
        found = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return found.total, found.used, found.free, found.reserved

    def v1() -> tuple[int | None, ...]:
        found = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return found.total, found.used, found.free, None

    found: tuple[int | None, ...] = _either(pynvml, v2, v1)
    return found


def _utilization(pynvml: Any, handle: Any) -> tuple[int, int]:
    found = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return found.gpu, found.memory


def _milli(function: str) -> Read:
    """Read a number in thousandths."""

    def read(pynvml: Any, handle: Any) -> float | int:
        value: int = getattr(pynvml, function)(handle)
        return value if value in NOT_AVAILABLE else value / 1000

    return read


def _throttle(pynvml: Any, handle: Any) -> list[str]:
    """Read why the clocks are lower than they could be; ``gpu_idle`` is one of the reasons."""
    mask = _either(
        pynvml,
        lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )
    return [THROTTLE.get(1 << bit, f"bit_{bit}") for bit in range(64) if mask >> bit & 1]


THROTTLE: Final = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""nvml.h: nvmlClocksEventReason*."""

COMPUTE_MODES: Final = ("default", "exclusive_thread", "prohibited", "exclusive_process")
"""nvml.h: nvmlComputeMode_t."""


def _ecc(counter: int) -> Read:
    def read(pynvml: Any, handle: Any) -> tuple[int, int]:
        corrected, uncorrected = (
            pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter) for kind in (0, 1)
        )
        return corrected, uncorrected

    return read


def _retired(cause: int) -> Read:
    return lambda pynvml, handle: len(pynvml.nvmlDeviceGetRetiredPages(handle, cause))


def _remapped(pynvml: Any, handle: Any) -> tuple[int, int, bool, bool]:
    corrected, uncorrected, pending, failure = pynvml.nvmlDeviceGetRemappedRows(handle)
    return corrected, uncorrected, bool(pending), bool(failure)


def _mig(pynvml: Any, handle: Any) -> tuple[bool, bool]:
    current, pending = pynvml.nvmlDeviceGetMigMode(handle)
    return bool(current), bool(pending)


def _nvlinks(pynvml: Any, handle: Any) -> tuple[int, int]:
    """Count the links that are up and that are down; the first number without a link ends them."""
    active: list[bool] = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active.append(bool(pynvml.nvmlDeviceGetNvLinkState(handle, link)))
        except pynvml.NVMLError as error:
            if not active or error.value != INVALID_ARGUMENT:
                raise
            break
    return sum(active), len(active) - sum(active)


def _compute_mode(pynvml: Any, handle: Any) -> str:
    mode = int(pynvml.nvmlDeviceGetComputeMode(handle))
    return COMPUTE_MODES[mode] if 0 <= mode < len(COMPUTE_MODES) else f"mode_{mode}"


def _clock(kind: int) -> Read:
    """nvml.h: nvmlClockType_t, 0 graphics, 1 SM, 2 memory."""
    return lambda pynvml, handle: int(pynvml.nvmlDeviceGetClockInfo(handle, kind))


READINGS: Final[tuple[tuple[tuple[str, ...], Read], ...]] = (
    (
        ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"),
        _memory,
    ),
    (("utilization_gpu_percent", "utilization_memory_percent"), _utilization),
    (("temperature_celsius",), lambda pynvml, handle: int(pynvml.nvmlDeviceGetTemperature(handle, 0))),
    (("power_watts",), _milli("nvmlDeviceGetPowerUsage")),
    (("power_limit_watts",), _milli("nvmlDeviceGetEnforcedPowerLimit")),
    (("energy_joules",), _milli("nvmlDeviceGetTotalEnergyConsumption")),
    (("clock_graphics_mhz",), _clock(0)),
    (("clock_sm_mhz",), _clock(1)),
    (("clock_memory_mhz",), _clock(2)),
    (("throttle_reasons",), lambda pynvml, handle: (tuple(_throttle(pynvml, handle)),)),
    (("ecc_mode",), lambda pynvml, handle: bool(pynvml.nvmlDeviceGetEccMode(handle)[0])),
    (("ecc_volatile_corrected", "ecc_volatile_uncorrected"), _ecc(0)),
    (("ecc_aggregate_corrected", "ecc_aggregate_uncorrected"), _ecc(1)),
    (("retired_pages_single_bit",), _retired(0)),
    (("retired_pages_double_bit",), _retired(1)),
    (
        ("retired_pages_pending",),
        lambda pynvml, handle: bool(pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)),
    ),
    (
        (
            "remapped_rows_corrected",
            "remapped_rows_uncorrected",
            "row_remap_pending",
            "row_remap_failed",
        ),
        _remapped,
    ),
    (("persistence_mode",), lambda pynvml, handle: bool(pynvml.nvmlDeviceGetPersistenceMode(handle))),
    (("compute_mode",), _compute_mode),
    (("mig_mode", "mig_mode_pending"), _mig),
    (("nvlinks_active", "nvlinks_inactive"), _nvlinks),
)
"""In NVML's units but for power (mW) and energy (mJ), which become W and J."""


def _mig_memory(pynvml: Any, handle: Any) -> tuple[int | None, ...]:
    return _memory(pynvml, handle)[:3]


def _profile(pynvml: Any, handle: Any) -> str | None:
    """Take the profile out of the name, as in ``NVIDIA H100 80GB HBM3 MIG 1g.10gb``."""
    _, mark, profile = pynvml.nvmlDeviceGetName(handle).rpartition(" MIG ")
    return profile if mark else None


MIG_FIELDS: Final[tuple[tuple[tuple[str, ...], Read], ...]] = (
    (("gpu_instance",), lambda pynvml, handle: int(pynvml.nvmlDeviceGetGpuInstanceId(handle))),
    (("compute_instance",), lambda pynvml, handle: int(pynvml.nvmlDeviceGetComputeInstanceId(handle))),
    (("profile",), _profile),
    (
        ("multiprocessors",),
        lambda pynvml, handle: int(pynvml.nvmlDeviceGetAttributes(handle).multiprocessorCount),
    ),
    (("memory_total_bytes", "memory_used_bytes", "memory_free_bytes"), _mig_memory),
)
