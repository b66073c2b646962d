"""How a check says its verdict: one row, with all that it found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hibernode.workload import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

SHOWN: Final = 8
"""How many things of one kind a row names."""


def listed(items: Iterable[str]) -> str:
    """Join the first few items and count the rest. Line ends in names of files do not break the row."""
    unique = list(dict.fromkeys(items))
    text = ", ".join(item.encode("utf-8", "backslashreplace").decode() for item in unique[:SHOWN])
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(unique) <= SHOWN else f"{text} and {len(unique) - SHOWN} more"


def row(
    check: str,
    expected: str,
    offenders: Iterable[str],
    *,
    remedy: str,
    reason: str,
    verdict: Verdict = Verdict.FAIL,
    fine: str = "none",
) -> Finding:
    """Make the row of a check: ``verdict`` if there are offenders, else ok with ``fine`` as found."""
    found = listed(offenders)
    if found:
        return Finding(check, verdict, expected, found, remedy, reason)
    return Finding(check, Verdict.OK, expected, fine)


def size(count: int) -> str:
    """Say a number of bytes for people."""
    amount = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:  # noqa: PLR2004 - the base of the units
            return f"{count} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
