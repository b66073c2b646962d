"""What commands print: aligned, honest about types, and harmless to the terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from hibernode.cli.output import (
    Progress,
    age,
    coloured,
    emit,
    human_bytes,
    human_seconds,
    output_option,
    table,
)
from hibernode.text import printable
from hibernode.workload import CheckpointId, Verdict

HOSTILE = "a\x1b[2J\x07\x9b31m\x7f\u202eb\udc80\n\r"


def safe(text: str) -> bool:
    """Whether nothing in it steers a terminal."""
    return all(char.isprintable() or char == "\n" for char in text)


# text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("plain é 漢 █", "plain é 漢 █", id="what has a glyph stays"),
        pytest.param("\x1b]0;title\x07", r"\x1b]0;title\x07", id="escape sequences are seen"),
        pytest.param("\x9b31m", r"\x9b31m", id="eight-bit ones too"),
        pytest.param("a\u202eb", r"a\u202eb", id="text cannot be turned round"),
        pytest.param("\udc80", r"\udc80", id="bytes that are no UTF-8"),
        pytest.param("a\r\nb", r"a\r\nb", id="one line stays one line"),
        pytest.param("a\tb", "a\tb", id="tabs stay"),
    ],
)
def test_what_could_steer_a_terminal_is_shown_as_an_escape(text, shown):
    """Nothing is dropped, so that a person sees what is there."""
    assert printable(text) == shown


def test_a_table_is_aligned_and_has_no_empty_cell():
    """Columns start under their heads, nothing is a dash, no line ends in blanks."""
    assert table([("a", "", 12), ("long one", None, "x")], ("NAME", "PIN", "SIZE")).splitlines() == [
        "NAME       PIN    SIZE",
        "a          -      12",
        "long one   None   x",
    ]
    assert table([], ("NAME", "SIZE")) == "NAME   SIZE"


def test_a_cell_cannot_break_its_line():
    """A name with line ends and tabs stays in its cell."""
    lines = table([("x\ny\tz", "1")], ("A", "B")).splitlines()
    assert len(lines) == 2
    assert lines[1] == r"x\ny\tz   1"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (1536 << 20, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_sizes_are_written_in_binary_units(size, text):
    """One decimal, and never 1024.0 of a unit."""
    assert human_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (-1, "0 ms"),
        (0.35, "350 ms"),
        (0.9996, "1.0 s"),
        (12.34, "12.3 s"),
        (59.96, "1m00s"),
        (125, "2m05s"),
        (3599.9, "1h00m"),
        (11_400, "3h10m"),
        (86_400 * 5 + 7200, "5d2h"),
    ],
)
def test_durations_are_written_in_the_unit_that_fits(seconds, text):
    """No 60.0 s and no 1000 ms."""
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("ago", "text"),
    [(30, "30s"), (100, "100s"), (130, "2m"), (3 * 3600 + 5, "3h"), (47 * 3600, "47h"), (10 * 86_400, "10d")],
)
def test_ages_are_short(ago, text):
    """RFC 3339 in any zone, and seconds, give the same age; two units make the next larger one."""
    then = datetime.now(UTC) - timedelta(seconds=ago + 0.4)
    assert age(then.isoformat().replace("+00:00", "Z")) == text
    assert age(then.timestamp()) == text


@pytest.mark.parametrize("when", ["", "soon", "\x1b[2J", float("nan"), float("inf"), "2026-13-01T00:00:00Z"])
def test_what_is_no_time_has_no_age(when):
    """A damaged file shows a dash."""
    assert age(when) == "-"


def test_the_future_is_now():
    """A clock that was set back makes no negative age."""
    assert age(time.time() + 3600) == "0s"


# answers ----------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"


DATA = {
    "id": CheckpointId("96429b272576"),
    "seconds": 1.5,
    "bytes": 12,
    "ok": True,
    "none": None,
    "path": Path("/x"),
    "verdict": Verdict.WARN,
    "colour": Colour.RED,
    "time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "set": {3, 1},
    "tuple": (1, "b"),
    "text": HOSTILE,
    "kind": "mine",
}
PLAIN = {
    "apiVersion": "hibernode.io/v1",
    "kind": "Thing",
    "id": "96429b272576",
    "seconds": 1.5,
    "bytes": 12,
    "ok": True,
    "none": None,
    "path": "/x",
    "verdict": "warn",
    "colour": "red",
    "time": "2026-01-02T03:04:05+00:00",
    "set": [1, 3],
    "tuple": [1, "b"],
    "text": HOSTILE,
}


@pytest.mark.parametrize(("fmt", "parse"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_machines_get_typed_values_under_stable_keys(capsys, fmt, parse):
    """Version and kind come first, numbers stay numbers, times are RFC 3339, and no control byte is raw."""
    emit("Thing", dict(DATA), fmt, lambda: "unused")
    text = capsys.readouterr().out
    data = {**PLAIN, "text": "no surrogate"} if fmt == "yaml" else PLAIN
    if fmt == "yaml":
        assert safe(text)
        emit("Thing", {**DATA, "text": "no surrogate"}, fmt, lambda: "unused")
        text = capsys.readouterr().out
    assert parse(text) == data
    assert list(parse(text)) == list(data)
    assert safe(text)


def test_people_get_the_table_without_control_bytes(capsys):
    """What the renderer lays out is printed line by line, and hostile bytes in it are seen."""
    emit("Thing", {}, "table", lambda: f"ok   {HOSTILE}\nsecond")
    out = capsys.readouterr().out
    assert out.startswith("ok   a\\x1b[2J")
    assert out.endswith("second\n")
    assert safe(out)


def test_the_option_takes_three_formats_and_no_other():
    """-o and --output, a table by default, anything else is a usage error."""

    @click.command()
    @output_option
    def command(output: str) -> None:
        click.echo(output)

    runner = CliRunner()
    assert runner.invoke(command, []).output == "table\n"
    assert runner.invoke(command, ["-o", "json"]).output == "json\n"
    assert runner.invoke(command, ["--output", "yaml"]).output == "yaml\n"
    assert runner.invoke(command, ["-o", "xml"]).exit_code == 2


def test_output_that_the_terminal_cannot_encode_is_escaped():
    """A Latin-1 terminal shows an escape, not a traceback."""
    code = "from hibernode.cli.output import emit; emit('T', {}, 'table', lambda: '└─ é')"
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    out = subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True).stdout
    assert out == b"\\u2514\\u2500 \xe9\n"


def test_yaml_and_the_server_are_imported_only_when_used():
    """A command that prints a table starts without them."""
    code = "import sys, hibernode.cli.output; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"yaml", "aiohttp", "asyncio", "prometheus_client"} & set(loaded)


# terminals --------------------------------------------------------------------------------------------


def on_terminal(code: str, **environ: str) -> str:
    """Run ``code`` in a Python whose output and error are a terminal; returns what it wrote."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 200))
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        env={**clean, "TERM": "xterm", **environ},
    ) as process:
        os.close(slave)
        data = b""
        try:
            while select.select([master], [], [], 60)[0]:
                data += os.read(master, 65536)
        except OSError:
            pass  # a terminal whose other end is closed gives EIO
        finally:
            os.close(master)
    assert process.returncode == 0
    return data.decode()


EMIT = "from hibernode.cli.output import emit, table; emit('T', {}, 'table', lambda: table([('ok', 'a'), ('fail', 'x ok'), ('b', 'warn')], ('V', 'C')))"  # noqa: E501


def test_verdicts_are_coloured_on_a_terminal():
    """A word that fills its cell is coloured; the same word inside a cell is not."""
    lines = on_terminal(EMIT).split("\r\n")
    assert lines[1] == "\x1b[32mok\x1b[0m     a"
    assert lines[2] == "\x1b[31mfail\x1b[0m   x ok"
    assert lines[3] == "b      \x1b[33mwarn\x1b[0m"


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colour_can_be_turned_off(environ):
    """NO_COLOR and a dumb terminal are respected."""
    assert "\x1b" not in on_terminal(EMIT, **environ)


def test_nothing_is_coloured_when_piped():
    """A file or a pipe gets plain text."""
    assert not coloured(io.StringIO())


WORK = """
import sys, threading
from hibernode.cli.output import Progress

class Seen:
    def __getattr__(self, name):
        return getattr(sys.__stderr__, name)

    def write(self, text):
        sys.__stderr__.write(text)
        if "GiB" in text:
            drawn.set()

drawn = threading.Event()
sys.stderr = Seen()
Progress.FIRST_SECONDS = Progress.EVERY_SECONDS = {seconds}
with Progress("verify 96429b272576") as progress:
    progress.label("digest\\x1b[2J")
    progress.update(1 << 30, 4 << 30)
    if {seconds} < 1:
        drawn.wait(60)
print("done")
"""


def test_progress_draws_one_line_and_takes_it_away():
    """Title, label, bytes, rate and time left on one line, which is gone at the end."""
    out = on_terminal(WORK.format(seconds=0.01))
    drawn, _, rest = out.rpartition("\r\x1b[K")
    assert rest == "done\r\n"
    assert "\n" not in drawn
    line = drawn.split("\r")[-1].removesuffix("\x1b[K")
    assert re.match(
        r"verify 96429b272576  digest\\x1b\[2J  1\.0 GiB of 4\.0 GiB  \S+ \S+/s  \S+( \S+)? left  ", line
    )
    assert safe(line)


def test_short_work_draws_nothing():
    """What ends before the first second leaves the terminal alone."""
    assert on_terminal(WORK.format(seconds=60)) == "done\r\n"


def test_progress_is_silent_when_piped(capfd):
    """Standard error of a script stays empty."""
    with Progress("title") as progress:
        progress.update(1)
        assert progress.line().startswith("title  1 B  ")
    assert capfd.readouterr().err == ""


def test_a_new_label_starts_the_bytes_anew():
    """Rate and time left belong to what is being done now."""
    progress = Progress("title")
    progress.update(50, 100)
    progress.label("next")
    assert re.fullmatch(r"title  next  \d+ ms", progress.line())
