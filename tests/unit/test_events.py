"""Events: kept in memory and on disk, bounded, clean, and never in the way of the work."""

from __future__ import annotations

import json
import os
import re
import resource
import threading
from contextlib import contextmanager
from typing import Any

import pytest

from hibernode.errors import RefusedError
from hibernode.events import FILE, MAX_MESSAGE, OLD_FILE, EventLog, clean, read_events

ID = "96429b272576"


def messages(events: list[dict[str, Any]]) -> list[str]:
    return [event["message"] for event in events]


def test_an_event_is_read_back_from_disk_as_it_was_told(tmp_path):
    """What a new process reads is what the ring of the old one held."""
    log = EventLog(tmp_path)
    log.add("Normal", "CheckpointSucceeded", ID, "12 bytes, é")
    (event,) = log.recent()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event.pop("time"))
    assert event == {
        "type": "Normal",
        "reason": "CheckpointSucceeded",
        "object": ID,
        "message": "12 bytes, é",
    }
    assert read_events(tmp_path) == log.recent()
    assert EventLog(tmp_path).recent() == log.recent()


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        pytest.param(("Loud", "Reason", ID, "m"), ("Warning", "Reason", ID, "m"), id="an unknown type warns"),
        pytest.param(
            ("Normal", "no reason", ID, "m"), ("Normal", "Other", ID, "m"), id="a reason is one word"
        ),
        pytest.param(("Normal", "X" * 65, ID, "m"), ("Normal", "Other", ID, "m"), id="a reason is short"),
        pytest.param(("Normal", "R", "../x", "m"), ("Normal", "R", "", "m"), id="an object is an id, FC-37"),
        pytest.param(
            ("Normal", "R", "", "a\x1b[2J\x00b"), ("Normal", "R", "", "a\ufffd[2J\ufffdb"), id="no ESC"
        ),
        pytest.param(("Normal", "R", "", "a\nb\tc"), ("Normal", "R", "", "a b c"), id="one line"),
        pytest.param(
            ("Normal", "R", "", "\udc80\u202e"),
            ("Normal", "R", "", "\ufffd\ufffd"),
            id="no surrogate, no bidi",
        ),
    ],
)
def test_texts_that_others_choose_are_made_safe(tmp_path, told, kept):
    """An event holds a known type, a word, an id or nothing, and one printable line."""
    log = EventLog(tmp_path)
    log.add(*told)
    for events in (log.recent(), read_events(tmp_path)):
        assert [
            tuple(event[name] for name in ("type", "reason", "object", "message")) for event in events
        ] == [kept]


def test_a_long_message_is_cut_and_says_so():
    """A message is at most 1024 characters, the mark included."""
    assert len(clean("x" * 5000)) == MAX_MESSAGE
    assert clean("x" * 5000).endswith(" [truncated]")
    assert clean("x" * MAX_MESSAGE) == "x" * MAX_MESSAGE


def test_memory_holds_the_newest_only(tmp_path):
    """The ring is bounded, and a limit gives the newest, the newest last."""
    log = EventLog(tmp_path, kept=5)
    for number in range(20):
        log.add("Normal", "R", "", str(number))
    assert messages(log.recent()) == ["15", "16", "17", "18", "19"]
    assert messages(log.recent(2)) == ["18", "19"]
    assert log.recent(0) == []
    assert messages(read_events(tmp_path, 3)) == ["17", "18", "19"]


def test_the_files_are_bounded_by_one_rotation(tmp_path):
    """Two files, each no larger than the bound and one line; the newest events survive the rotation."""
    log = EventLog(tmp_path, max_bytes=2000)
    for number in range(200):
        log.add("Normal", "R", ID, f"event {number}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, OLD_FILE]
    for name in (FILE, OLD_FILE):
        assert (tmp_path / name).stat().st_size < 2000 + 200
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    kept = messages(read_events(tmp_path))
    assert kept == [f"event {number}" for number in range(200 - len(kept), 200)]
    assert len(kept) >= 10


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b'{"time": "2026-01-01T00:00:0', id="a line cut short by a kill"),
        pytest.param(b"\x00\xff\xfe\n", id="no text"),
        pytest.param(b"[1, 2]\n", id="no object"),
        pytest.param(
            b'{"time": 1, "type": "", "reason": "", "object": "", "message": ""}\n', id="no strings"
        ),
        pytest.param(b"[" * 100000 + b"\n", id="nested without end"),
    ],
)
def test_damaged_lines_are_passed_over(tmp_path, damage):
    """What cannot be parsed is left out, and takes neither the line before nor the one after with it."""
    log = EventLog(tmp_path)
    log.add("Normal", "R", "", "before")
    log.close()
    with (tmp_path / FILE).open("ab") as file:
        file.write(damage)
    EventLog(tmp_path).add("Normal", "R", "", "after")
    assert messages(read_events(tmp_path)) == ["before", "after"]


def test_events_on_disk_are_cleaned_again_when_they_are_read(tmp_path):
    """A file that somebody else wrote cannot carry an escape to the terminal."""
    line = {"time": "2026-01-01T00:00:00Z", "type": "x", "reason": "R", "object": "", "message": "\x1b[2J"}
    (tmp_path / FILE).write_text(json.dumps(line) + "\n")
    assert messages(read_events(tmp_path)) == ["\ufffd[2J"]


def spoil_with_directory(path):
    path.mkdir()


def spoil_with_link(path):
    (path.parent / "elsewhere").write_text("")
    path.symlink_to("elsewhere")


def spoil_with_fifo(path):
    os.mkfifo(path)


@contextmanager
def files_end_at(size):
    """As a full disk: the write that would pass ``size`` is cut short, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_events_of_that_time_only(tmp_path):
    """Appends go on without an error, and the line that was cut short does not take the next one with it."""
    log = EventLog(tmp_path)
    log.add("Normal", "R", "", "before")
    with files_end_at((tmp_path / FILE).stat().st_size + 20):
        log.add("Normal", "R", "", "cut short")
        log.add("Normal", "R", "", "refused")
    log.add("Normal", "R", "", "after")
    assert messages(log.recent()) == ["before", "cut short", "refused", "after"]
    assert messages(read_events(tmp_path)) == ["before", "after"]


@pytest.mark.parametrize("spoil", [spoil_with_directory, spoil_with_link, spoil_with_fifo])
def test_an_append_never_raises_and_memory_goes_on(tmp_path, spoil):
    """Whatever stands in the file's place, nothing is followed, blocked on or raised."""
    spoil(tmp_path / FILE)
    log = EventLog(tmp_path)
    log.add("Normal", "R", "", "first")
    log.add("Normal", "R", "", "second")
    assert messages(log.recent()) == ["first", "second"]
    assert not (tmp_path / "elsewhere").exists() or not (tmp_path / "elsewhere").read_text()


def test_reading_refuses_a_file_that_is_no_file(tmp_path):
    """The reader neither follows a link nor blocks on a FIFO."""
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(RefusedError):
        read_events(tmp_path)


def test_a_removed_directory_is_made_again(tmp_path):
    """After somebody has cleaned up, the next event is on disk."""
    log = EventLog(tmp_path / "state")
    log.add("Normal", "R", "", "lost")
    (tmp_path / "state" / FILE).unlink()
    (tmp_path / "state").rmdir()
    log.add("Normal", "R", "", "kept")
    assert messages(read_events(tmp_path / "state")) == ["kept"]


def test_without_a_state_directory_there_are_no_events(tmp_path):
    """Reading makes nothing."""
    assert read_events(tmp_path / "absent") == []
    assert not (tmp_path / "absent").exists()


def test_events_of_many_threads_are_whole_lines(tmp_path):
    """Two threads never share a line, rotation included."""
    log = EventLog(tmp_path, max_bytes=20000)

    def tell(name: str) -> None:
        for number in range(100):
            log.add("Normal", "R", "", f"{name} {number}")

    threads = [threading.Thread(target=tell, args=name) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.recent()) == 400
    lines = [line for name in (OLD_FILE, FILE) for line in (tmp_path / name).read_bytes().splitlines()]
    assert all(json.loads(line) for line in lines)
