"""The gate for the two ids of a record: nothing else of a request may get into a name, a label or a URL."""

from __future__ import annotations

import re
from typing import Final, Self

from hibernode.errors import InvalidArgumentError

MAX_WORKER_ID: Final = 63
"""Characters: a worker id is a label's value, and the last part of an object's name."""

_SOURCE_ID: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)
_WORKER_ID: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_SHOWN: Final = 80


class SourceId(str):
    """A source id that has passed the gate: 16 lower-case hexadecimal digits."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Let ``text`` through the gate.

        :raises InvalidArgumentError: it is not 16 lower-case hexadecimal digits.
        """
        if not isinstance(text, str) or _SOURCE_ID.fullmatch(text) is None:
            raise InvalidArgumentError(
                f"{_shown(text)} is not a source id",
                remedy="a source id is 16 lower-case hexadecimal digits, such as 5a5f555570065064",
                reason="InvalidSourceId",
            )
        return super().__new__(cls, text)


class WorkerId(str):
    """A worker id that has passed the gate: what Kubernetes takes as the end of a name and as a label."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Let ``text`` through the gate.

        :raises InvalidArgumentError: it is no word of 1 to 63 lower-case letters, digits and inner dashes.
        """
        if not isinstance(text, str) or len(text) > MAX_WORKER_ID or _WORKER_ID.fullmatch(text) is None:
            raise InvalidArgumentError(
                f"{_shown(text)} is not a worker id",
                remedy="a worker id has 1 to 63 of a-z, 0-9 and -, and neither begins nor ends with -",
                reason="InvalidWorkerId",
            )
        return super().__new__(cls, text)


def _shown(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
