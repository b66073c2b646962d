"""A container runtime that is none: it speaks CRI v1 on a real socket, and says what it is told to say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import grpc

from hibernode.host.cri import RUNNING, SERVICE, STATES, CriContainer
from hibernode.host.protobuf import PAIR, Message, Table, decode, encode

METADATA: Table = {"name": (1, str), "uid": (2, str)}
ANSWERS: dict[str, Table] = {
    "Version": {"runtime_name": (2, str), "runtime_version": (3, str)},
    "ListPodSandbox": {"items": (1, [{"id": (1, str), "metadata": (2, METADATA)}])},
    "ListContainers": {
        "containers": (
            1,
            [{"id": (1, str), "pod_sandbox_id": (2, str), "metadata": (3, METADATA), "state": (6, int)}],
        )
    },
    "ContainerStatus": {"status": (1, {"id": (1, str), "state": (3, int)}), "info": (2, [PAIR])},
}
ASKED: Table = {"container_id": (1, str), "verbose": (2, int)}


class FakeCri:
    """A server on ``socket`` that lists ``containers``; a pod's sandbox is called as its uid.

    ``instead`` has, by method, the bytes that are answered in place of a true answer, a code that is
    answered, or None for no answer at all.
    """

    def __init__(self, socket: Path, *containers: CriContainer, **instead: bytes | grpc.StatusCode | None):
        self.socket, self.containers, self.instead = socket, containers, instead
        self.info: Callable[[CriContainer], str] = lambda told: json.dumps({"pid": told.pid})
        self.asked: list[str] = []
        self._over = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            method: grpc.unary_unary_rpc_method_handler(self._handler(method))
            for method in ANSWERS
            if instead.get(method) is not grpc.StatusCode.UNIMPLEMENTED
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._server.add_insecure_port(f"unix:{quote(str(socket))}")
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.stop(None).wait()

    def _handler(self, method: str) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
            self.asked.append(method)
            instead = self.instead.get(method, b"")
            if isinstance(instead, grpc.StatusCode):
                context.abort(instead, "as it was \x1b[2J told")
            if method in self.instead and instead is None:
                self._over.wait()
            if instead:
                return instead
            return encode(ANSWERS[method], self._true(method, data))

        return answer

    def _true(self, method: str, data: bytes) -> Message:
        if method == "Version":
            return {"runtime_name": "fake", "runtime_version": "v1.2"}
        if method == "ListPodSandbox":
            pods = {each.pod_uid for each in self.containers} - {""}
            return {"items": [{"id": pod, "metadata": {"uid": pod}} for pod in sorted(pods)]}
        if method == "ListContainers":
            return {"containers": [self._listed(each) for each in self.containers]}
        id_ = decode(ASKED, data)["container_id"]
        (told,) = [each for each in self.containers if each.id == id_]
        info = [{"key": "sandboxID", "value": "x"}, {"key": "info", "value": self.info(told)}]
        return {"status": {"id": id_, "state": STATES.index(told.state)}, "info": info}

    def _listed(self, told: CriContainer) -> dict[str, Any]:
        return {
            "id": told.id,
            "pod_sandbox_id": told.pod_uid,
            "metadata": {"name": told.name},
            "state": STATES.index(told.state),
        }


def told(id_: str, pid: int, name: str = "main", pod_uid: str = "", state: str = RUNNING) -> CriContainer:
    """Describe a container as the runtime tells it."""
    return CriContainer(id_, name, pod_uid, state, pid)
