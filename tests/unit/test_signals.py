"""The signal directory's contract on real files: requests, rejections, answers, and a hostile directory."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hibernode.discovery.signals import (
    MAX_ERROR_CHARS,
    REMEMBERED,
    TRUNCATED,
    Scan,
    SignalDir,
    bounded,
    done_payload,
)
from hibernode.errors import RefusedError
from hibernode.settings import SignalSettings
from hibernode.workload import CheckpointId, Verdict
from tests.unit.hostile import attacker

ID = CheckpointId("96429b272576")
OTHER = CheckpointId("0c5c7799bf09378f")


@pytest.fixture
def signals(tmp_path: Path) -> SignalDir:
    """Give a signal directory that exists."""
    directory = SignalDir(SignalSettings(path=tmp_path / "signals"))
    directory.create()
    return directory


def looked(signals: SignalDir) -> Scan:
    """Look at each name as if the event of its closing had just come."""
    return signals.scan(os.listdir(signals.path))


def settled(signals: SignalDir) -> Scan:
    """Look at everything once the files are old enough to be taken as written."""
    deadline = time.monotonic() + 10
    while True:
        scan = signals.scan()
        if not scan.unsettled or time.monotonic() > deadline:
            return scan
        time.sleep(0.01)


def next_tick(signals: SignalDir) -> None:
    """Wait until the kernel gives new files a later time than all that are there."""
    clock = signals.path.parent / "clock"
    last = max(path.lstat().st_ctime_ns for path in signals.path.iterdir())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        clock.touch()
        if clock.stat().st_ctime_ns > last:
            return
    raise AssertionError("the clock stands still")


def put(signals: SignalDir, name: str, text: str = "") -> Path:
    """Write a file into the directory."""
    path = signals.path / name
    path.write_text(text)
    return path


def test_the_directory_is_made_sticky_and_open_to_all(signals: SignalDir) -> None:
    """Each worker can write its own file and nobody can remove another's."""
    assert signals.path.stat().st_mode & 0o7777 == 0o1777
    assert signals.check_directory()[0].verdict is Verdict.OK


def test_an_existing_directory_keeps_its_mode_and_is_warned_about(tmp_path: Path) -> None:
    """A directory that is open to all without the sticky bit is named, not changed."""
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    signals = SignalDir(SignalSettings(path=path))
    signals.create()
    assert path.stat().st_mode & 0o7777 == 0o777
    assert signals.check_directory()[0].verdict is Verdict.WARN


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.touch(), "no directory"),
        (lambda path: path.symlink_to("/tmp"), "no directory"),
        (lambda path: path.mkdir(0o755), ""),
        (lambda path: path.mkdir(0o750), ""),
        (lambda path: (path.mkdir(), path.chmod(0o775)), "0775"),
        (lambda path: (path.mkdir(), path.chmod(0o757)), "0757"),
        (lambda path: (path.mkdir(), path.chmod(0o1777)), ""),
    ],
    ids=[
        "absent",
        "a file",
        "a link to a directory",
        "closed to others",
        "closed to all",
        "open to the group",
        "open to others",
        "open but sticky",
    ],
)
def test_a_directory_where_workers_can_remove_each_others_files_is_warned_about(
    tmp_path: Path, make: Callable[[Path], object], found: str
) -> None:
    """The row names what was found and what to do; a sound directory is ok without a remedy."""
    path = tmp_path / "signals"
    make(path)
    (row,) = SignalDir(SignalSettings(path=path)).check_directory()
    assert row.verdict is (Verdict.WARN if found else Verdict.OK)
    assert found in row.found
    assert bool(row.remedy) is bool(row.reason) is bool(found)


@pytest.mark.parametrize(
    ("text", "pid"),
    [("", None), ("\n", None), ("{}", None), ('{"pid": 4242}', 4242)],
    ids=["empty", "a newline", "an empty object", "an object with a pid"],
)
def test_a_ready_file_is_a_request(signals: SignalDir, text: str, pid: int | None) -> None:
    """Empty or JSON with a pid, with the owner and the time that the kernel has noted."""
    path = put(signals, f"{ID}.ready", text)
    (request,) = looked(signals).ready
    stat = path.stat()
    assert (request.id, request.pid, request.uid, request.ctime) == (ID, pid, stat.st_uid, stat.st_ctime)


@pytest.mark.parametrize(
    "text",
    [
        "pid=1",
        "[1]",
        "null",
        '"x"',
        '{"pid": "7"}',
        '{"pid": true}',
        '{"pid": 1}',
        '{"pid": 0}',
        '{"pid": -5}',
        '{"pid": 1.5}',
        '{"pid": 4194304}',
        '{"pid": 1e999}',
        '{"pid": 2, "path": "/etc"}',
        "[" * 20000,
        '{"pid": ' + "9" * 5000 + "}",
        "{",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_neither_empty_nor_a_pid_is_rejected_once(signals: SignalDir, text: str) -> None:
    """Bad JSON gets one sentence for each state of the file, and no request."""
    path = put(signals, f"{ID}.ready", text)
    scan = looked(signals)
    assert not scan.ready
    (rejected,) = scan.rejected
    assert rejected.name == path.name
    assert not looked(signals).rejected
    path.write_text(text + " ")
    assert len(looked(signals).rejected) == 1


@pytest.mark.parametrize("depth", range(100, 1100, 50))
def test_a_pid_that_is_nested_deeply_is_rejected_at_every_depth(signals: SignalDir, depth: int) -> None:
    """What the JSON reader just manages must not be too deep for the sentence about it."""
    put(signals, f"{ID}.ready", '{"pid": ' + "[" * depth + "]" * depth + "}")
    assert [rejected.reason for rejected in looked(signals).rejected] == ["BadRequest"]


def test_bytes_that_are_no_text_are_rejected(signals: SignalDir) -> None:
    """Binary junk is a rejection, not a crash."""
    (signals.path / f"{ID}.ready").write_bytes(b"\xff\xfe\x00{")
    assert len(looked(signals).rejected) == 1


def _symlink(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def _hard_link(path: Path, secret: Path) -> None:
    path.hardlink_to(secret)


def _fifo(path: Path, _secret: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path, _secret: Path) -> None:
    path.mkdir()


def _device(path: Path, _secret: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))


def _socket(path: Path, _secret: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))


def _huge(path: Path, _secret: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


HOSTILE = [_symlink, _hard_link, _fifo, _directory, _device, _socket, _huge]


@pytest.mark.parametrize("suffix", [".ready", ".restore"])
@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__.strip("_"))
def test_what_is_not_a_plain_file_is_rejected_and_never_followed(
    signals: SignalDir, tmp_path: Path, make: Callable[[Path, Path], None], suffix: str
) -> None:
    """FC-37: links, pipes, devices, directories and huge files are named; nothing blocks, nothing is read."""
    secret = tmp_path / "secret"
    secret.write_text('{"pid": 4242}')
    make(signals.path / f"{ID}{suffix}", secret)
    scan = looked(signals)
    assert not scan.ready
    assert not scan.restore
    assert len(scan.rejected) == 1
    assert secret.read_text() == '{"pid": 4242}'


def test_a_bad_file_that_becomes_a_good_one_is_a_request(signals: SignalDir) -> None:
    """A half written file is rejected, in case it stays so, and taken as soon as it is whole."""
    for _ in range(50):  # often within one tick of the clock, so that the two states have one ctime
        path = put(signals, f"{ID}.ready", '{"pid":')
        assert not looked(signals).ready
        path.write_text('{"pid": 4242}')
        assert [request.pid for request in looked(signals).ready] == [4242]


def test_a_file_that_cannot_be_read_for_now_is_told_once_and_tried_again(signals: SignalDir) -> None:
    """A lease goes away without a change of the file, so its reader has to come back by itself."""
    path = put(signals, f"{ID}.ready")
    code = (
        "import fcntl, os, signal, sys\n"
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    assert settled(signals).ready
    with attacker(code, path):
        assert [rejected.reason for rejected in settled(signals).rejected] == ["FileBusy"]
        assert settled(signals) == Scan()
    assert [request.id for request in settled(signals).ready] == [ID]


def test_rejections_are_bounded_and_told_again_only_after_a_change(signals: SignalDir) -> None:
    """However many bad files there are, so many are told and the rest counted, at the first look only."""
    for number in range(REMEMBERED + 500):
        (signals.path / f"{number:012x}.ready").symlink_to("/dev/zero")
    first = signals.scan()
    assert (len(first.rejected), first.unsaid) == (REMEMBERED, 500)
    for _ in range(3):
        again = signals.scan()
        assert (len(again.rejected), again.unsaid) == (0, 500)
    for number in range(1000):
        (signals.path / f"{number:012x}.ready").unlink()
    signals.scan()  # what has gone makes room
    assert signals.scan().unsaid == 0
    assert len(signals._said) <= REMEMBERED


def test_a_link_in_place_of_the_directory_is_told_once_and_not_followed(tmp_path: Path) -> None:
    """The path must lead to the directory itself; when it does, all goes on."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{ID}.ready").touch()
    path = tmp_path / "signals"
    path.symlink_to("elsewhere")
    signals = SignalDir(SignalSettings(path=path))
    assert [rejected.reason for rejected in signals.scan().rejected] == ["NotADirectory"]
    assert signals.scan() == Scan()
    with pytest.raises(RefusedError, match="not a directory"):
        signals.answer_done(ID, checkpoint_path="/c", success=True)
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    assert [request.id for request in settled(signals).ready] == [ID]


BAD_NAMES = [
    "..ready",
    ".ready",
    "x.ready",
    "96429B272576.ready",
    "96429b27257.ready",
    "96429b272576.ready.tmp",
    "９6429b272576.ready",
    "96429b272576 .ready",
    "96429b272576\n.ready",
    "a" * 240 + ".ready",
    "96429b272576.done",
    "96429b272576.restored",
    "96429b272576",
    "96429b272576.ready.ready",
    "96429b272576..ready",
    ".96429b272576.ready",
    "-6429b272576.ready",
    "96429b272576\u200b.ready",
    "96429b272576\udcff.ready",
    "96429b272576.READY",
    ".96429b272576.ready.0011223344556677.tmp",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name[:24]))
def test_names_that_are_not_an_ids_are_not_looked_at(signals: SignalDir, name: str) -> None:
    """FC-37: only ``<id>.ready`` and ``<id>.restore`` are requests, with 12 or 16 lower-case hex digits."""
    put(signals, name)
    scan = looked(signals)
    assert (scan.ready, scan.restore, scan.rejected, scan.ignored) == ([], [], [], 1)


def test_ten_thousand_junk_files_hide_no_request(signals: SignalDir) -> None:
    """Junk is passed over and the one request among it is found."""
    for number in range(10_000):
        (signals.path / f"junk-{number}").touch()
    put(signals, f"{ID}.ready")
    scan = looked(signals)
    assert [request.id for request in scan.ready] == [ID]
    assert scan.ignored == 10_000


def test_a_request_is_answered_once_and_counts_anew_when_written_again(signals: SignalDir) -> None:
    """A signal file that is younger than the request ends it; a later write opens it again."""
    ready = put(signals, f"{ID}.ready")
    (request,) = looked(signals).ready
    assert not signals.answered(request)
    signals.answer_done(ID, checkpoint_path="/c", success=True)
    assert signals.answered(request)
    assert not looked(signals).ready
    ready.write_text("{}")
    assert len(looked(signals).ready) == 1


def test_requests_come_in_the_order_of_their_age(signals: SignalDir) -> None:
    """Whoever waits longest is first, whatever the name."""
    names = ["5", "1", "9", "0", "f", "3"]
    for name in names:
        put(signals, f"{name * 12}.ready")
        next_tick(signals)
    assert [request.id[0] for request in looked(signals).ready] == names


def _of_another_user(done: Path, _spare: Path) -> None:
    done.touch()
    os.chown(done, 1000, 1000)


@pytest.mark.parametrize(
    ("make", "answers"),
    [
        (lambda done, spare: done.write_text("{}"), True),
        (_of_another_user, False),
        (lambda done, spare: (spare.write_text("{}"), done.hardlink_to(spare)), False),
        (lambda done, spare: done.symlink_to(spare), False),
        (lambda done, spare: os.mkfifo(done), False),
        (lambda done, spare: done.mkdir(), False),
    ],
    ids=["ours", "another user's", "a hard link", "a link", "a FIFO", "a directory"],
)
def test_only_our_own_plain_file_answers_a_request(
    signals: SignalDir, tmp_path: Path, make: Callable[[Path, Path], object], answers: bool
) -> None:
    """No worker can have another's request passed over by what it plants in the answer's place."""
    put(signals, f"{ID}.ready")
    put(signals, f"{ID}.restore")
    (request,) = looked(signals).ready
    next_tick(signals)
    make(signals.path / f"{ID}.done", tmp_path / "spare")
    make(signals.path / f"{ID}.restored", tmp_path / "spare2")
    for scan in (looked(signals), settled(signals)):
        assert bool(scan.ready) is bool(scan.restore) is not answers
    assert signals.answered(request) is answers


def test_an_answer_in_the_same_tick_of_the_clock_ends_this_request_and_not_the_next(
    signals: SignalDir,
) -> None:
    """Whoever polls fast can ask again before the clock has moved on; that request must not be lost."""
    for _ in range(100):
        put(signals, f"{ID}.restore")
        spare = put(signals, "spare")  # before the answer, so that it cannot get the first one's inode
        assert len(looked(signals).restore) == 1
        signals.answer_restored(ID, {"success": False})
        assert not looked(signals).restore
        spare.rename(signals.path / f"{ID}.restore")
        assert len(looked(signals).restore) == 1


def test_a_file_found_while_it_is_written_is_left_for_later(signals: SignalDir) -> None:
    """A look does not take a file that was changed this moment; the event of its closing does."""
    put(signals, f"{ID}.ready")
    scan = signals.scan()
    assert scan.unsettled
    assert not scan.ready
    assert [request.id for request in signals.scan({f"{ID}.ready"}).ready] == [ID]


def test_a_restore_request_takes_no_options(signals: SignalDir) -> None:
    """Empty or an empty object asks; an unknown key is rejected."""
    put(signals, f"{ID}.restore")
    put(signals, f"{OTHER}.restore", '{"force": true}')
    scan = looked(signals)
    assert [request.id for request in scan.restore] == [ID]
    assert "force" in scan.rejected[0].message


def test_only_the_very_request_that_was_answered_is_removed(signals: SignalDir) -> None:
    """A second request under the same name stays."""
    path = put(signals, f"{ID}.restore")
    (request,) = looked(signals).restore
    path.unlink()
    put(signals, f"{ID}.restore", "{}")
    signals.clear(ID, ".restore", request.identity)
    assert path.exists()
    signals.clear(ID, ".restore")
    assert not path.exists()


def test_a_restore_request_is_answered_once_and_counts_anew_when_written_again(signals: SignalDir) -> None:
    """As a ready file and its signal file are."""
    restore = put(signals, f"{ID}.restore")
    assert len(looked(signals).restore) == 1
    signals.answer_restored(ID, {"success": False, "reason": "NotFound", "error": "x\n" + "y" * 5000})
    assert not looked(signals).restore
    answer = json.loads((signals.path / f"{ID}.restored").read_text())
    assert list(answer) == ["checkpoint_id", "timestamp", "success", "reason", "error"]
    assert len(answer["error"]) == MAX_ERROR_CHARS
    restore.touch()
    assert len(looked(signals).restore) == 1


# answers ----------------------------------------------------------------------------------------------


def test_the_answer_is_the_eras_json(signals: SignalDir) -> None:
    """Era A1's keys, indented by two, 0644; an error only on failure, and then no path."""
    signals.answer_done(ID, checkpoint_path="/checkpoints/x", success=True)
    path = signals.path / f"{ID}.done"
    text = path.read_text()
    answer = json.loads(text)
    assert list(answer) == ["checkpoint_id", "checkpoint_path", "timestamp", "success"]
    assert text == json.dumps(answer, indent=2) + "\n"
    assert path.stat().st_mode & 0o7777 == 0o644
    assert answer["timestamp"].endswith("Z")
    failed = json.loads(done_payload(ID, checkpoint_path="", success=False, error="NoSpace: full"))
    assert failed["success"] is False
    assert failed["error"] == "NoSpace: full"


def test_long_and_odd_error_texts_are_cut_and_cleaned() -> None:
    """An error holds at most 1,024 characters and no control character."""
    assert bounded("a\x1b[31mb\nc") == "a [31mb c"
    cut = bounded("x" * 5000)
    assert len(cut) == MAX_ERROR_CHARS
    assert cut.endswith(TRUNCATED)


@pytest.mark.parametrize(
    "make", [_symlink, _hard_link, _fifo, _socket, _device], ids=lambda make: make.__name__
)
def test_an_answer_replaces_what_is_planted_in_its_place(
    signals: SignalDir, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    """A planted link or pipe is replaced by the answer; the file it leads to stays as it was."""
    secret = tmp_path / "secret"
    secret.write_text("untouched")
    make(signals.path / f"{ID}.done", secret)
    signals.answer_done(ID, checkpoint_path="/c", success=True)
    assert json.loads((signals.path / f"{ID}.done").read_text())["success"] is True
    assert secret.read_text() == "untouched"


def test_a_directory_in_place_of_the_answer_is_a_clear_error(signals: SignalDir) -> None:
    """It is refused by name, and a look goes on as before."""
    (signals.path / f"{ID}.done").mkdir()
    put(signals, f"{ID}.ready")
    with pytest.raises((RefusedError, OSError), match=f"{ID}.done"):
        signals.answer_done(ID, checkpoint_path="/c", success=True)
    assert [request.id for request in looked(signals).ready] == [ID]


def test_a_directory_in_place_of_a_request_stays_when_requests_are_cleared(signals: SignalDir) -> None:
    """Nothing but a plain name is removed, and nothing is an error that cannot be removed so."""
    (signals.path / f"{ID}.ready").mkdir()
    signals.clear(ID, ".ready")
    signals.clear(OTHER, ".ready")
    assert (signals.path / f"{ID}.ready").is_dir()


def test_a_fast_reader_never_sees_half_an_answer(signals: SignalDir) -> None:
    """Trap 1 of the contract: whoever polls without a pause finds nothing or all of it."""
    path = signals.path / f"{ID}.done"
    stop = threading.Event()
    bad: list[str] = []

    def poll() -> None:
        while not stop.is_set():
            try:
                text = path.read_text()
            except FileNotFoundError:
                continue
            try:
                assert isinstance(json.loads(text)["success"], bool)
            except (ValueError, KeyError, AssertionError):
                bad.append(text)

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        for number in range(200):
            signals.answer_done(ID, checkpoint_path="/c", success=bool(number % 2), error="e" * number)
            if number % 10 == 0:
                path.unlink()
    finally:
        stop.set()
        reader.join()
    assert not bad


def test_a_file_that_is_swapped_for_a_link_while_we_look_is_never_followed(
    signals: SignalDir, tmp_path: Path
) -> None:
    """The secret's pid is never taken, however the swap falls."""
    secret = tmp_path / "secret"
    secret.write_text('{"pid": 31337}')
    path = signals.path / f"{ID}.ready"
    spare, link = tmp_path / "spare", tmp_path / "link"
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            spare.write_text('{"pid": 4242}')
            spare.rename(path)
            link.symlink_to(secret)
            link.rename(path)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        seen = {r.pid for _ in range(2000) for r in signals.scan({path.name}).ready}
    finally:
        stop.set()
        swapper.join()
    assert seen <= {4242, None}


def test_a_directory_that_is_replaced_while_we_look_does_no_harm(tmp_path: Path) -> None:
    """Each look and each answer holds one directory; that it goes away is no surprise."""
    path = tmp_path / "signals"
    code = (
        "import os, sys\n"
        "print('ready', flush=True)\n"
        "path = sys.argv[1]\n"
        "while True:\n"
        "    os.mkdir(path)\n"
        "    open(path + '/96429b272576.ready', 'w').close()\n"
        "    os.rename(path, path + '-old')\n"
        "    for name in os.listdir(path + '-old'):\n"
        "        os.unlink(path + '-old/' + name)\n"
        "    os.rmdir(path + '-old')\n"
        "    os.symlink('/etc', path)\n"
        "    os.unlink(path)\n"
    )
    signals = SignalDir(SignalSettings(path=path))
    with attacker(code, path):
        for _ in range(3000):
            scan = signals.scan({f"{ID}.ready"})
            assert {rejected.reason for rejected in scan.rejected} <= {"NotADirectory"}
            signals.scan()
            signals.clear(OTHER, ".ready")


def test_a_directory_that_is_not_there_gives_nothing_and_no_error(tmp_path: Path) -> None:
    """A look at an absent directory is empty; an answer into it is an error of the system."""
    signals = SignalDir(SignalSettings(path=tmp_path / "absent"))
    assert signals.scan() == Scan()
    with pytest.raises(OSError, match="absent"):
        signals.answer_done(ID, checkpoint_path="/c", success=True)
