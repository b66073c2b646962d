"""What the node's container runtime says of itself: a few questions of Kubernetes' CRI v1, over its socket.

Nothing here is needed to find, dump or restore a container; ``hibernode doctor`` compares. The runtime's
answers are not trusted: each has a deadline and a largest size, and passes a gate.
"""

from __future__ import annotations

import json
import re
import socket as sockets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast
from urllib.parse import quote

from hibernode.errors import HibernodeError
from hibernode.host.protobuf import PAIR, Message, Table, decode, encode
from hibernode.text import printable

if TYPE_CHECKING:
    import grpc

CALL_SECONDS: Final = 5.0
TOTAL_SECONDS: Final = 20.0
"""All questions of one connection together: a node has some hundred containers, each takes about 1 ms."""

MAX_ANSWER_BYTES: Final = 16 << 20
"""What the kubelet takes of a runtime (maxMsgSize)."""

MAX_INFO_BYTES: Final = 4 << 20
"""Of one container; its runtime spec, the most of it, has some 50 KiB."""

MAX_PID: Final = 1 << 22
"""linux/threads.h: PID_MAX_LIMIT on 64-bit machines."""

SHOWN: Final = 200
"""Characters of the runtime's own words that an error repeats."""

SERVICE: Final = "runtime.v1.RuntimeService"
RUNNING: Final = "running"
STATES: Final = ("created", RUNNING, "exited", "unknown")
"""The names of ``ContainerState`` by its numbers."""

NO_ANSWER: Final = "CriNoAnswer"
NOT_SPOKEN: Final = "CriNotSpoken"
BAD_ANSWER: Final = "CriBadAnswer"

_ID: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,252}")
"""Runtimes give 64 hexadecimal digits; the CRI itself asks for no form."""

_VERSION: Final[Table] = {"runtime_name": (2, str), "runtime_version": (3, str)}
_SANDBOX: Final[Table] = {"id": (1, str), "metadata": (2, {"uid": (2, str)})}
_CONTAINER: Final[Table] = {
    "id": (1, str),
    "pod_sandbox_id": (2, str),
    "metadata": (3, {"name": (1, str)}),
    "state": (6, int),
}
_ASK_STATUS: Final[Table] = {"container_id": (1, str), "verbose": (2, int)}
_STATUS: Final[Table] = {"status": (1, {"id": (1, str), "state": (3, int)}), "info": (2, [PAIR])}


class CriCallError(HibernodeError):
    """A container runtime did not answer a question, or not as the CRI has it.

    Reasons: ``CriNoAnswer``; ``CriNotSpoken``, something answers that has no CRI v1; ``CriBadAnswer``, its
    bytes are no such answer; ``CriFailed``, it answered with an error.
    """

    default_reason = "CriFailed"


@dataclass(frozen=True, slots=True)
class CriContainer:
    """A container as the runtime lists it.

    ``name`` is the one in the pod; ``pod_uid`` the pod's, empty when its sandbox is not listed. ``state`` is
    one of ``STATES``. ``pid`` is its init's as the node sees it, 0 for one that does not run, and for a
    runtime that does not tell.
    """

    id: str
    name: str
    pod_uid: str
    state: str
    pid: int = 0


@dataclass(frozen=True, slots=True)
class CriNode:
    """All that the runtime lists: its containers, and the ids of the sandboxes."""

    containers: tuple[CriContainer, ...]
    sandboxes: frozenset[str]


class Cri:
    """A connection to a runtime's CRI socket. Every method may raise :class:`CriCallError`."""

    def __init__(
        self, socket: Path, *, call_seconds: float = CALL_SECONDS, total_seconds: float = TOTAL_SECONDS
    ) -> None:
        import grpc  # noqa: PLC0415 - 50 ms that only doctor should take

        self.socket, self._call_seconds = socket, call_seconds
        self._end = time.monotonic() + total_seconds
        self._channel: grpc.Channel = grpc.insecure_channel(
            f"unix:{quote(str(socket))}",
            options=[
                ("grpc.default_authority", "localhost"),
                ("grpc.enable_retries", 0),
                ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
            ],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def version(self) -> tuple[str, str]:
        """Ask for the runtime's name and version; first, whether anybody listens at all."""
        try:
            with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC) as probe:
                probe.settimeout(self._call_seconds)
                probe.connect(str(self.socket))
        except (OSError, ValueError) as error:
            words = getattr(error, "strerror", None) or str(error)
            raise CriCallError(
                f"{self.socket}: {words}",
                remedy="start the container runtime, or set runtime.socket to where it listens",
                reason=NO_ANSWER,
            ) from error
        answer = self._call("Version", _VERSION)
        return _shown(answer["runtime_name"]), _shown(answer["runtime_version"])

    def node(self) -> CriNode:
        """List containers and sandboxes; each running container is asked for its pid."""
        pods = {
            self._id(each["id"]): _shown(each["metadata"]["uid"] if each["metadata"] else "")
            for each in self._call("ListPodSandbox", {"items": (1, [_SANDBOX])})["items"]
        }
        containers = []
        for each in self._call("ListContainers", {"containers": (1, [_CONTAINER])})["containers"]:
            id_, state, pid = self._id(each["id"]), _state(each["state"]), 0
            if state == RUNNING:
                state, pid = self.status(id_)
            name = _shown(each["metadata"]["name"] if each["metadata"] else "")
            containers.append(CriContainer(id_, name, pods.get(each["pod_sandbox_id"], ""), state, pid))
        return CriNode(tuple(containers), frozenset(pods))

    def status(self, id_: str) -> tuple[str, int]:
        """Ask for a container's state and its init's pid; ``exited`` and 0 for one that is gone."""
        import grpc  # noqa: PLC0415 - as above

        try:
            answer = self._call("ContainerStatus", _STATUS, _ASK_STATUS, container_id=id_, verbose=True)
        except CriCallError as error:
            if error.fields.get("code") is grpc.StatusCode.NOT_FOUND:
                return "exited", 0
            raise
        if answer["status"] is None or answer["status"]["id"] != id_:
            raise self._bad(f"ContainerStatus of {id_} is another's")
        state = _state(answer["status"]["state"])
        texts = [pair["value"] for pair in answer["info"] if pair["key"] == "info"]
        return state, self._pid(id_, texts[0]) if texts and state == RUNNING else 0

    def _pid(self, id_: str, text: str) -> int:
        """Take the pid out of what containerd and CRI-O tell besides, as JSON."""
        if len(text) > MAX_INFO_BYTES:
            raise self._bad(f"the info of {id_} has {len(text)} characters")
        try:
            info: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._bad(f"the info of {id_} is no JSON: {error}") from error
        pid = info.get("pid", 0) if isinstance(info, dict) else None
        if type(pid) is not int:  # nor a boolean
            raise self._bad(f"the info of {id_} has a pid that is no number")
        if not 0 <= pid <= MAX_PID:
            raise self._bad(f"the info of {id_} has the pid {pid}")
        return pid

    def _call(self, method: str, answer: Table, question: Table | None = None, **message: Any) -> Message:
        import grpc  # noqa: PLC0415 - as above

        seconds = min(self._call_seconds, max(self._end - time.monotonic(), 0.0))
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            data = ask(encode(question or {}, message), timeout=seconds)
        except grpc.RpcError as error:
            raise self._failed(method, error) from error
        try:
            return decode(answer, data)
        except ValueError as error:
            raise self._bad(f"the answer to {method} is no such message: {error}") from error

    def _failed(self, method: str, error: grpc.RpcError) -> CriCallError:
        """Say what a call's failure means."""
        import grpc  # noqa: PLC0415 - as above

        call = cast("grpc.Call", error)  # of a call that blocks it is both
        code, words = call.code(), _shown(call.details() or "")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CriCallError(
                f"{self.socket} has not answered {method} in time",
                remedy="see what the container runtime is busy with; its log says more",
                reason=NO_ANSWER,
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return CriCallError(
                f"{self.socket} speaks no CRI v1: {words}",
                remedy="containerd does since 1.6, unless disabled_plugins of its settings lists cri",
                reason=NOT_SPOKEN,
            )
        return CriCallError(
            f"{self.socket} answers {method} with {code.name}: {words}",
            remedy="see the container runtime's log",
            code=code,
        )

    def _id(self, text: str) -> str:
        """Let an id through the gate."""
        if _ID.fullmatch(text) is None:
            raise self._bad(f"an id is {text[:80]!a}")
        return text

    def _bad(self, sentence: str) -> CriCallError:
        return CriCallError(
            f"{self.socket}: {_shown(sentence)}",
            remedy="is it the socket of a container runtime? runtime.socket says which is asked",
            reason=BAD_ANSWER,
        )


def _state(number: int) -> str:
    return STATES[min(number, len(STATES) - 1)]


def _shown(text: str) -> str:
    return printable(text if len(text) <= SHOWN else f"{text[:SHOWN]}...", keep="")
