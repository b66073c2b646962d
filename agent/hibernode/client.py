"""The commands' way to a running agent: JSON over its Unix socket."""

from __future__ import annotations

import http.client
import json
import socket
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from hibernode.errors import (
    AgentUnreachableError,
    HibernodeError,
    RefusedError,
    StorageError,
    UsageError,
)

if TYPE_CHECKING:
    from pathlib import Path

NO_AGENT: Final = "NoAgent"
"""The reason of an AgentUnreachableError when surely none runs, rather than one that does not answer."""

MAX_ANSWER_BYTES: Final = 16 << 20
_ERRORS: Final[dict[str, type[HibernodeError]]] = {"2": UsageError, "4": RefusedError, "5": StorageError}


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class AgentClient:
    """Asks the agent behind ``path``; an answer has ``max_bytes`` at most.

    ``timeout`` is in seconds, for each step of an exchange.

    Every method raises AgentUnreachableError when no agent answers (reason :data:`NO_AGENT` if none runs),
    and the agent's own error, with its exit code, when it answers with one.
    """

    def __init__(self, path: Path, *, timeout: float = 10.0, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._path, self._timeout, self._max = path, timeout, max_bytes

    def get(self, path: str, /, **query: str | int) -> dict[str, Any]:
        """Read something, such as ``/v1/status``."""
        return self._ask("GET", path, query)

    def post(self, path: str, /, **query: str | int) -> dict[str, Any]:
        """Have something done, such as ``/v1/gc`` with ``dry_run="true"``."""
        return self._ask("POST", path, query)

    def _ask(self, method: str, path: str, query: dict[str, str | int]) -> dict[str, Any]:
        connection = _Connection(str(self._path), self._timeout)
        try:
            connection.request(method, f"{path}?{urlencode(query)}" if query else path)
            response = connection.getresponse()
            body = response.read(self._max + 1)
        except TimeoutError:
            raise self._unreachable(
                f"gave no answer within {self._timeout:g} s", "it may be stopped or overloaded; see its log"
            ) from None
        except FileNotFoundError:
            raise self._unreachable(
                "is not there",
                "start the agent with 'hibernode run', or set server.socket to where it listens",
                NO_AGENT,
            ) from None
        except ConnectionRefusedError:
            raise self._unreachable(
                "is a dead agent's", "start the agent with 'hibernode run'", NO_AGENT
            ) from None
        except PermissionError:
            raise self._unreachable("may be used by root only", "run the command as root") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(
                f"failed: {error or type(error).__name__}", "see the agent's log"
            ) from error
        finally:
            connection.close()
        return self._answer(response.status, body)

    def _answer(self, status: int, body: bytes) -> dict[str, Any]:
        try:
            data = json.loads(body) if len(body) <= self._max else None
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise self._unreachable(
                f"answered {status} and no JSON object", "another program, or another version, listens there"
            )
        if status >= http.client.BAD_REQUEST:
            kind = _ERRORS.get(str(data.get("exitCode")), HibernodeError)
            raise kind(
                str(data.get("message", status)),
                remedy=str(data.get("remedy", "")),
                reason=str(data.get("reason", "")),
            )
        return data

    def _unreachable(self, why: str, remedy: str, reason: str = "") -> AgentUnreachableError:
        return AgentUnreachableError(f"no agent: {self._path} {why}", remedy=remedy, reason=reason)
