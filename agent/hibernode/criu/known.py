"""A row of the table of known causes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Operation = Literal["dump", "restore"]


@dataclass(frozen=True, slots=True)
class Known:
    """One known cause.

    ``pattern`` is searched in one line of the log; its named groups fill ``message`` and ``remedy``. A
    ``weak`` row is what also follows from other causes: it counts only if nothing stronger is found.
    """

    reason: str
    pattern: re.Pattern[str]
    message: str
    remedy: str
    weak: bool


def row(reason: str, pattern: str, message: str, remedy: str, *, weak: bool = False) -> Known:
    """Make a row."""
    return Known(reason, re.compile(pattern, re.ASCII), message, remedy, weak)
