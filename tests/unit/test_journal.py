"""The journal and the fault points: what is on disk before a step begins."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hibernode import faults
from hibernode.config import FAULT_ENV
from hibernode.errors import StorageError
from hibernode.host.procfs import boot_id
from hibernode.host.safefs import Dir
from hibernode.journal import JOURNAL, Journal, Step, read_journal

KILLED_CHILD = """
import asyncio, sys
from pathlib import Path
from hibernode.host.safefs import Dir
from hibernode.journal import Journal, Step

async def main():
    journal = Journal(Dir.open(Path(sys.argv[1])), "checkpoint", {"pid": 7})
    await journal.begin(Step.LOCATE)
    print("locate", flush=True)
    await journal.begin(Step.DUMP)
    print("dump", flush=True)

asyncio.run(main())
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Dir]:
    """Open a directory for the journal."""
    with Dir.open(tmp_path / "work", create=True) as opened:
        yield opened


async def test_a_step_is_on_disk_before_it_begins(directory: Dir) -> None:
    """When ``begin`` returns the journal names the step, the earlier ones and the facts."""
    journal = Journal(directory, "checkpoint", {"pid": 7})
    assert read_journal(directory) is None
    await journal.begin(Step.LOCATE)
    first = read_journal(directory) or {}
    assert (first["kind"], first["step"], first["pid"]) == ("checkpoint", "locate", 7)
    assert (first["agent_pid"], first["boot_id"]) == (os.getpid(), boot_id())
    journal.note(path="/x")
    assert "path" not in (read_journal(directory) or {})
    await journal.begin(Step.DUMP)
    second = read_journal(directory) or {}
    assert (second["step"], second["path"], list(second["steps"])) == ("dump", "/x", ["dump", "locate"])
    assert first["started_at"] <= second["steps"]["locate"] <= second["steps"]["dump"]
    assert journal.step is Step.DUMP
    assert journal.running(Step.DUMP) >= 0
    assert directory.names() == [JOURNAL]


async def test_phases_add_up(directory: Dir) -> None:
    """The time of a block is added to its phase, also when the block raises."""
    journal = Journal(directory, "restore", {})
    with journal.timed("read"):
        pass
    once = journal.phases["read"]
    with pytest.raises(ValueError, match="x"), journal.timed("read"):
        raise ValueError("x")
    assert journal.phases["read"] > once > 0
    with journal.timed("write"):
        pass
    assert set(journal.phases) == {"read", "write"}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="an empty journal"),
        pytest.param("{", id="a journal that was cut"),
        pytest.param("[]", id="a journal that is no object"),
    ],
)
def test_a_damaged_journal_is_as_none(directory: Dir, text: str) -> None:
    """A journal that cannot be read is treated as absent."""
    (directory.path / JOURNAL).write_text(text)
    assert read_journal(directory) is None


async def test_fail_raises_when_the_step_is_written(directory: Dir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The action ``fail`` raises what a broken disk would, with the step on disk."""
    monkeypatch.setenv(FAULT_ENV, "fail@checkpoint.seal")
    journal = Journal(directory, "checkpoint", {})
    await journal.begin(Step.DUMP)
    with pytest.raises(StorageError) as caught:
        await journal.begin(Step.SEAL)
    assert caught.value.reason == "FaultInjected"
    assert (read_journal(directory) or {})["step"] == "seal"


async def test_hang_waits_until_it_is_cancelled(directory: Dir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The action ``hang`` never returns by itself and lets itself be cancelled."""
    monkeypatch.setenv(FAULT_ENV, "hang@checkpoint.dump")
    journal = Journal(directory, "checkpoint", {})
    task = asyncio.create_task(journal.begin(Step.DUMP))
    while read_journal(directory) is None:
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_kill_ends_the_process_in_the_step(directory: Dir) -> None:
    """The action ``kill`` ends the process as SIGKILL does, with the step on disk and not begun."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_CHILD, directory.path],
        env={**os.environ, FAULT_ENV: "kill@checkpoint.dump"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    assert done.stdout == "locate\n"
    assert json.loads((directory.path / JOURNAL).read_text())["step"] == "dump"


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="no variable"),
        pytest.param("", id="an empty variable"),
        pytest.param("kill@restore.dump", id="another kind's point"),
        pytest.param("kill@checkpoint.seal", id="another step's point"),
        pytest.param("kill@", id="no point"),
        pytest.param("kill", id="no separator"),
        pytest.param("explode@checkpoint.dump", id="an unknown action"),
        pytest.param("@checkpoint.dump", id="no action"),
    ],
)
async def test_other_names_are_passed(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """A point that is not named, or an action that is not known, does nothing."""
    monkeypatch.delenv(FAULT_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(FAULT_ENV, value)
    await faults.point("checkpoint.dump")
