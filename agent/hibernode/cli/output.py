"""What commands print: tables for people, JSON and YAML for machines, progress on a terminal.

Names in tables come from processes and files that others control, so nothing reaches the terminal that
could steer it: control characters are shown as escapes, here and at no other place.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from enum import Enum
from itertools import zip_longest
from typing import Any, Final, Self, TextIO, TypeVar

import click

from hibernode.text import printable

API_VERSION: Final = "hibernode.io/v1"
FORMATS: Final = ("table", "json", "yaml")
GAP: Final = "   "
MISSING: Final = "-"
"""What an empty cell shows, so that columns stay countable."""

DEFAULT_COLUMNS: Final = 80
"""Of a terminal that does not tell its width."""

LONG_WORD: Final = 32
"""One longer than this sticks out of its column rather than widen it on every line of a terminal."""

MINUTE: Final = 60
HOUR: Final = 3600
DAY: Final = 86400

_COLOURS: Final = {
    **dict.fromkeys(("ok", "complete", "healthy"), "32"),
    **dict.fromkeys(("warn", "degraded", "partial", "in-progress", "Warning"), "33"),
    **dict.fromkeys(("fail", "bad", "corrupt"), "31"),
    **dict.fromkeys(("skip", "previous"), "2"),
}
"""Words that are coloured where they fill a cell (SGR codes: green, yellow, red, faint)."""

_CELL: Final = re.compile(rf"(?m)(?:^|(?<=  ))({'|'.join(_COLOURS)})(?=  |$)")

F = TypeVar("F", bound=Callable[..., Any])


def output_option(command: F) -> F:
    """Add ``-o/--output`` to a command; it arrives as the argument ``output``."""
    decorate = click.option(
        "-o",
        "--output",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="A table for people, or JSON or YAML.",
    )
    return decorate(command)


# text -------------------------------------------------------------------------------------------------


def table(
    rows: Iterable[Sequence[object]],
    headers: Sequence[str],
    notes: Sequence[Sequence[tuple[str, str]]] = (),
) -> str:
    """Lay out columns as kubectl does: aligned left, no lines, a dash for nothing.

    ``notes``: for each row, (label, text) pairs that stand indented below it. On a terminal, wide columns
    are wrapped at blanks until the table fits; words, paths for one, are never cut.
    """
    lines = [list(headers)]
    lines += [[_cell(cell) or MISSING for cell in row] for row in rows]
    width = _terminal_columns(sys.stdout) if sys.stdout.isatty() else None
    widths = _fit(lines, width)
    out: list[str] = []
    for number, line in enumerate(lines):
        cells = [_wrap(cell, size) for cell, size in zip(line, widths, strict=True)]
        for part in zip_longest(*cells, fillvalue=""):
            padded = (text.ljust(size) for text, size in zip(part, widths, strict=True))
            out.append(GAP.join(padded).rstrip())
        for label, text in notes[number - 1] if number and notes else ():
            indent = " " * (widths[0] + len(GAP)) + label
            wrapped = _wrap(_cell(text), width - len(indent) if width else sys.maxsize)
            out += [indent + wrapped[0], *(" " * len(indent) + more for more in wrapped[1:])]
    return "\n".join(out)


def _cell(value: object) -> str:
    return printable(str(value), keep="")


def _fit(lines: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Choose the columns' widths: what the cells need, narrowed where they wrap, the widest first."""
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width is None:
        return widths
    words = [max(len(word) for cell in column for word in cell.split() or ("",)) for column in columns]
    least = [min(longest, LONG_WORD) for longest in words]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
    while excess > 0:
        wide = [index for index, size in enumerate(widths) if size > least[index]]
        if not wide:
            break
        widest = max(wide, key=widths.__getitem__)
        widths[widest] -= 1
        excess -= 1
    return widths


def _wrap(text: str, width: int) -> list[str]:
    if len(text) <= width:
        return [text]
    import textwrap

    return textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]


def _terminal_columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_COLUMNS
    except OSError:
        return DEFAULT_COLUMNS


def human_bytes(size: float) -> str:
    """Write bytes in binary units: ``0 B``, ``1.5 GiB``."""
    if abs(size) < 1024:  # noqa: PLR2004 - the unit's base
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if abs(size) < 1023.95 or unit == "TiB":  # noqa: PLR2004 - beyond it would be rounded to 1024.0
            break
    return f"{size:.1f} {unit}"


def human_seconds(seconds: float) -> str:
    """Write a duration: ``0 ms``, ``350 ms``, ``12.3 s``, ``2m05s``, ``3h10m``, ``5d2h``."""
    if seconds < 0.9995:  # noqa: PLR2004 - beyond it would be rounded to 1000 ms
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 59.95:  # noqa: PLR2004 - likewise
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < HOUR:
        return f"{whole // MINUTE}m{whole % MINUTE:02d}s"
    if whole < DAY:
        return f"{whole // HOUR}h{whole % HOUR // MINUTE:02d}m"
    return f"{whole // DAY}d{whole % DAY // HOUR}h"


def age(when: str | float) -> str:
    """Write how long ago ``when`` was: ``12s``, ``5m``, ``3h``, ``10d``.

    ``when`` is RFC 3339 or seconds since the epoch. Anything that is no time is a dash, so
    a damaged file cannot end a listing.
    """
    try:
        then = when if isinstance(when, (int, float)) else _timestamp(when)
        passed = max(0, int(time.time() - then))
    except (ValueError, OverflowError):
        return MISSING
    for unit, name in ((DAY, "d"), (HOUR, "h"), (MINUTE, "m")):
        if passed >= 2 * unit:
            return f"{passed // unit}{name}"
    return f"{passed}s"


def _timestamp(text: str) -> float:
    parsed = datetime.fromisoformat(text)
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


# answers ----------------------------------------------------------------------------------------------


def emit(kind: str, data: dict[str, Any], fmt: str, render: Callable[[], str]) -> None:
    """Print an answer: ``data`` as a JSON or YAML object of ``kind``, or what ``render`` lays out.

    Keys keep their order; seconds and bytes are numbers, times RFC 3339.
    """
    if fmt == "table":
        _print(_colour(printable(render(), keep="\t\n")))
        return
    # ASCII only: what is not, control characters included, is escaped in both forms.
    text = json.dumps({**data, "apiVersion": API_VERSION, "kind": kind}, default=_plain)
    whole = {"apiVersion": API_VERSION, "kind": kind, **json.loads(text)}
    if fmt == "json":
        _print(json.dumps(whole, indent=2))
        return
    import yaml

    _print(yaml.safe_dump(whole, sort_keys=False, width=110).rstrip("\n"))


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def _print(text: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding))


def coloured(stream: TextIO) -> bool:
    """Whether colour is wanted there: a terminal, no NO_COLOR (https://no-color.org), not a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _colour(text: str) -> str:
    if not coloured(sys.stdout):
        return text
    return _CELL.sub(lambda match: f"\x1b[{_COLOURS[match[1]]}m{match[1]}\x1b[0m", text)


# progress ---------------------------------------------------------------------------------------------


class Progress:
    """One line on the terminal of standard error, for work that takes more than a second.

    Nothing is written when standard error is no terminal. Every method may be called from any thread.
    """

    FIRST_SECONDS: Final = 1.0
    EVERY_SECONDS: Final = 0.2

    def __init__(self, title: str) -> None:
        self._title = title
        self._label = ""
        self._done = 0
        self._total: int | None = None
        self._since = self._started = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def label(self, text: str) -> None:
        """Say what is being done now; bytes and rate start anew."""
        self._label, self._done, self._total, self._since = text, 0, None, time.monotonic()

    def update(self, done: int, total: int | None = None) -> None:
        """Say how many bytes are done, and of how many if that is known."""
        self._done, self._total = done, total

    def line(self) -> str:
        """Build the line: title, label, bytes done and in all, rate, time left, time passed."""
        now = time.monotonic()
        parts = [self._title, self._label]
        rate = self._done / max(now - self._since, 1e-9)
        if self._done:
            of = f" of {human_bytes(self._total)}" if self._total else ""
            parts += [human_bytes(self._done) + of, f"{human_bytes(rate)}/s"]
            if self._total and self._total > self._done:
                parts.append(f"{human_seconds((self._total - self._done) / rate)} left")
        parts.append(human_seconds(now - self._started))
        return printable("  ".join(part for part in parts if part), keep="")

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._draw, name="hibernode-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _draw(self) -> None:
        drawn = False
        while not self._stop.wait(self.EVERY_SECONDS if drawn else self.FIRST_SECONDS):
            drawn = True
            self._write(f"\r{self.line()[: _terminal_columns(sys.stderr) - 1]}\x1b[K")
        if drawn:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            self._stop.set()  # the terminal has gone; the work goes on
