"""The agent's own directory: attempts inside their window, damaged notes, kept logs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hibernode.errors import BusyError
from hibernode.state import MAX_LOG_BYTES, MAX_NOTE_BYTES, StateDir, read_json, write_json
from tests.unit.artifact_kit import ID, OTHER

HOUR = 3600.0


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    """Open a fresh state directory."""
    opened = StateDir.open(tmp_path / "state")
    yield opened
    opened.close()


def put(state: StateDir, name: str, data: object) -> None:
    """Write a note as it is."""
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    (state.attempts_dir.path / f"{name}.json").write_bytes(text)


def test_the_directory_is_private(state: StateDir) -> None:
    """The state directory and its parts are made with mode 0700."""
    for directory in (state.root, state.attempts_dir, state.logs_dir, state.restores_dir):
        assert directory.path.stat().st_mode & 0o777 == 0o700


def test_the_directory_can_be_opened_again(tmp_path: Path) -> None:
    """What one agent noted the next one reads."""
    for count in (1, 2):
        state = StateDir.open(tmp_path / "state")
        state.attempt_begins(ID)
        assert state.attempts(ID, HOUR).count == count
        state.close()


def test_an_attempt_counts_from_its_beginning(state: StateDir) -> None:
    """An attempt that never ended counts, with a reason that says so."""
    assert state.attempts(ID, HOUR).count == 0
    state.attempt_begins(ID)
    found = state.attempts(ID, HOUR)
    assert (found.count, found.last_reason) == (1, "the agent ended in the middle of it")
    assert 0 <= time.time() - found.last_time < HOUR
    assert state.attempts(OTHER, HOUR).count == 0


def test_a_failed_attempt_gets_its_reason(state: StateDir) -> None:
    """The last attempt's reason is shown; earlier ones keep theirs."""
    for reason in ("First", "Second"):
        state.attempt_begins(ID)
        state.attempt_failed(ID, reason)
    found = state.attempts(ID, HOUR)
    assert (found.count, found.last_reason) == (2, "Second")
    state.attempt_withdrawn(ID)
    assert state.attempts(ID, HOUR).last_reason == "First"


def test_a_withdrawn_attempt_is_forgotten(state: StateDir) -> None:
    """An attempt that was refused does not count, and the last one takes the note with it."""
    state.attempt_begins(ID)
    state.attempt_withdrawn(ID)
    assert state.attempts(ID, HOUR).count == 0
    assert state.attempts_dir.names() == []
    state.attempt_withdrawn(ID)
    state.attempt_failed(ID, "Nothing")
    assert state.attempts(ID, HOUR).count == 0


def test_clearing_tells_whether_there_was_something(state: StateDir) -> None:
    """The first clearing finds the attempts, the second none."""
    state.attempt_begins(ID)
    assert state.attempts_clear(ID)
    assert not state.attempts_clear(ID)
    assert state.attempts(ID, HOUR).count == 0


def test_only_attempts_inside_the_window_count(state: StateDir) -> None:
    """Attempts older than the window are not counted, whatever their order."""
    now = time.time()
    put(
        state,
        ID,
        {
            "attempts": [
                {"time": now - age, "reason": f"age {age}"} for age in (10_000, 5_000, 100, 20_000, 10)
            ]
        },
    )
    found = state.attempts(ID, HOUR)
    assert (found.count, found.last_reason) == (2, "age 10")
    assert state.attempts(ID, 1.0).count == 0


def test_the_note_of_attempts_does_not_grow_for_ever(state: StateDir) -> None:
    """A worker that fails for weeks has a note of about a hundred entries."""
    put(state, ID, {"attempts": [{"time": 1, "reason": "x"}] * 1000})
    state.attempt_begins(ID)
    assert len((read_json(state.attempts_dir, f"{ID}.json") or {})["attempts"]) == 101
    assert state.attempts(ID, HOUR).count == 1


DAMAGED = [
    pytest.param(b"", id="an empty file"),
    pytest.param(b'{"attempts": [', id="a file that was cut"),
    pytest.param(b"\xff\xfe\x00", id="bytes that are no text"),
    pytest.param(b"[" * 100_000, id="a nest that is too deep"),
    pytest.param(b"[1, 2]", id="a list"),
    pytest.param(b"null", id="a null"),
    pytest.param(b" " * (MAX_NOTE_BYTES + 1), id="a file that is too large"),
]


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_note_is_ignored_and_said(
    state: StateDir, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    """A note that cannot be parsed counts as absent, the log names it, and the next attempt replaces it."""
    put(state, ID, data)
    with caplog.at_level(logging.WARNING, "hibernode.state"):
        assert state.attempts(ID, HOUR).count == 0
    assert f"{ID}.json is damaged and is ignored" in caplog.text
    assert len(caplog.text) < 1000
    state.attempt_begins(ID)
    assert state.attempts(ID, HOUR).count == 1


def test_a_link_in_a_note_s_place_is_ignored_and_said(
    state: StateDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link is not followed, even to a good note."""
    (tmp_path / "note").write_text('{"a": 1}')
    (state.root.path / "x.json").symlink_to(tmp_path / "note")
    assert read_json(state.root, "x.json") is None
    assert "damaged" in caplog.text


@pytest.mark.parametrize(
    "attempts",
    [
        pytest.param(None, id="null"),
        pytest.param(5, id="a number"),
        pytest.param("text", id="a text"),
        pytest.param({"a": 1}, id="an object"),
        pytest.param([1, None, "x", []], id="a list of other things"),
        pytest.param([{}, {"time": "soon"}, {"time": None}], id="entries without a time"),
    ],
)
def test_a_note_of_another_shape_counts_nothing(state: StateDir, attempts: object) -> None:
    """A note whose attempts are not what we write counts none and does not stop any operation."""
    put(state, ID, {"attempts": attempts})
    assert state.attempts(ID, HOUR).count == 0
    state.attempt_failed(ID, "X")
    state.attempt_withdrawn(ID)
    put(state, ID, {"attempts": attempts})
    state.attempt_begins(ID)
    assert state.attempts(ID, HOUR).count == 1


def test_an_absent_note_is_not_worth_a_word(state: StateDir, caplog: pytest.LogCaptureFixture) -> None:
    """A note that is not there is None, without a line in the log."""
    assert read_json(state.root, "none.json") is None
    assert caplog.text == ""


def test_a_note_is_written_whole_and_private(state: StateDir) -> None:
    """A note comes back as it was written, is 0600, and leaves no other file behind."""
    for data in ({"a": [1, "ü"]}, {"b": None}):
        write_json(state.root, "n.json", data)
        assert read_json(state.root, "n.json") == data
    assert (state.root.path / "n.json").stat().st_mode & 0o777 == 0o600
    assert sorted(state.root.names()) == ["attempts", "logs", "n.json", "restores"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        pytest.param(b"", b"", id="an empty log"),
        pytest.param(b"short", b"short", id="a short log"),
        pytest.param(
            b"a" * MAX_LOG_BYTES + b"the end", b"a" * (MAX_LOG_BYTES - 7) + b"the end", id="a long log"
        ),
    ],
)
def test_a_kept_log_is_bounded(state: StateDir, text: bytes, kept: bytes) -> None:
    """Of a long log its end is kept, for there the causes are."""
    assert state.log_path(ID, "dump") is None
    path = state.keep_log(ID, "dump", text)
    assert path.read_bytes() == kept
    assert path.stat().st_mode & 0o777 == 0o600
    assert state.log_path(ID, "dump") == path
    assert state.log_path(ID, "restore") is None
    assert state.log_path(OTHER, "dump") is None


def test_a_newer_log_replaces_the_older(state: StateDir) -> None:
    """One log is kept for each id and operation."""
    state.keep_log(ID, "dump", b"old")
    state.keep_log(ID, "restore", b"other")
    assert state.keep_log(ID, "dump", b"new").read_bytes() == b"new"
    assert len(state.logs_dir.names()) == 2


def test_a_container_is_claimed_once(tmp_path):
    """By its init's pid, whichever id is restored; another container is free, and so is it afterwards."""
    one, two = StateDir.open(tmp_path), StateDir.open(tmp_path)
    with one.claim(4242):
        with pytest.raises(BusyError, match="4242"), two.claim(4242):
            pass
        with pytest.raises(BusyError), one.claim(4242):
            pass
        with two.claim(4243), one.claim(1):
            pass
    with two.claim(4242):
        pass
    one.close()
    two.close()


def test_a_container_or_its_pod_is_tried_once(tmp_path):
    """A new container of the same pod is no new try; old notes go when there are too many."""
    state = StateDir.open(tmp_path)
    assert state.first_try("container a", "pod x") is True
    assert state.first_try("container b", "pod x") is False
    assert state.first_try("container c") is True
    for number in range(1100):
        state.first_try(f"container {number}")
    assert len(json.loads((tmp_path / "tries.json").read_text())) <= 1002
    state.close()
