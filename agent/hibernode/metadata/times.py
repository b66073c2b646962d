"""Times as ModelExpress writes them: RFC 3339 with up to nine digits, read with Z or an offset."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

MS: Final = 1_000_000
"""Nanoseconds of a millisecond."""

MAX_NS: Final = (1 << 63) - 1
"""In the year 2262; what is later is taken for it, as the wire and the reaper have no larger numbers."""

_FORM: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9})\d*)?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_SECONDS: Final = 253402300799
"""The last second of the year 9999."""


def write_time(ns: int) -> str:
    """Write nanoseconds since 1970, with none, 3, 6 or 9 digits as needed, and the offset ``+00:00``."""
    seconds, rest = divmod(min(max(ns, 0), _MAX_SECONDS * 10**9), 10**9)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    if rest % MS == 0:
        digits = f".{rest // MS:03d}" if rest else ""
    else:
        digits = f".{rest // 1000:06d}" if rest % 1000 == 0 else f".{rest:09d}"
    return f"{text}{digits}+00:00"


def read_time(text: Any) -> int:
    """Read nanoseconds since 1970; 0 for what is no time, and for what was before."""
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return 0
    fraction, sign = (match.group(7) or "").ljust(9, "0"), -1 if match.group(8) == "-" else 1
    offset = sign * (int(match.group(9) or 0) * 3600 + int(match.group(10) or 0) * 60)
    try:
        # A leap second is the second after it.
        day = datetime(*(int(part) for part in match.group(1, 2, 3, 4, 5)), tzinfo=UTC)  # type: ignore[arg-type,misc]
    except ValueError:
        return 0
    since = day - _EPOCH
    seconds = since.days * 86400 + since.seconds + int(match.group(6)) - offset
    return min(max(seconds * 10**9 + int(fraction), 0), MAX_NS)
