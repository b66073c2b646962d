"""The kit that runs real containers, tested by itself: no CRIU here."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.real import boxes_wire, images
from tests.real.boxes import KINDS, Box, Kit, Runtime
from tests.real.boxes_clear import PREFIX, leftovers, sweep
from tests.real.node import until

pytestmark = pytest.mark.containers

PROFILE = Path(__file__).parents[2] / "seccomp" / "block-iouring.json"
MIB = 1 << 20
WORKERS = {
    "debian": (images.debian, images.PYTHON_WORKER),
    "busybox": (images.busybox, images.STATIC_WORKER),
}


@pytest.fixture(params=KINDS)
def runtime(request: pytest.FixtureRequest, kit: Kit) -> Iterator[Runtime]:
    """Give each runtime in turn."""
    with kit.runtime(request.param) as runtime:
        yield runtime


def traces(box: Box) -> list[str]:
    """List what there is of a box beyond its end."""
    pod = getattr(box, "pod", None)
    return [*leftovers(box.id), *(leftovers(pod.uid) + leftovers(pod.id) if pod else [])]


def overlay_changes(upper: Path) -> dict[str, str]:
    """Say what the upper layer has below the directories that the workers change."""
    found = {}
    for top in ("etc/box", "opt", "srv"):
        for path in sorted((upper / top).rglob("*")):
            status = path.lstat()
            kind = "whiteout" if stat.S_ISCHR(status.st_mode) else "link" if path.is_symlink() else "file"
            if path.is_dir() and not path.is_symlink():
                opaque = "trusted.overlay.opaque" in os.listxattr(path)
                kind = "opaque" if opaque else "directory"
            found[str(path.relative_to(upper))] = kind
    return found


@pytest.mark.parametrize("image", WORKERS)
def test_a_worker_runs_is_seen_ends_with_its_code_and_leaves_nothing(
    runtime: Runtime, image: str, tmp_path: Path
) -> None:
    """Its state, files, log, limits and exit code are what the runtime was asked for."""
    root, worker = WORKERS[image]
    env = {"DYN_CHECKPOINT_READY_FILE": "/signals/ready"}
    box = runtime.run(
        [worker, "--io-uring"],
        image=root(),
        env=env,
        binds=[(tmp_path, "/signals", "rw"), (PROFILE, "/profile.json", "ro")],
        seccomp=PROFILE,
        memory=256 * MIB,
        hostname="sleeper",
    )
    first = box.counts_on()
    assert first["files"] == "ok"
    assert (first["pid"], first["proc_self"], first["uid"]) == (1, "1", 0)
    assert (first["seccomp"], first["io_uring"], first["no_new_privs"]) == (2, "EPERM", 1)
    assert first["hostname"] == "sleeper" or runtime.kind == "ctr"
    assert box.memory_limit() == 256 * MIB
    assert (tmp_path / "ready").exists()
    assert box.id in box.cgroup()

    assert (box.root / "etc/box/changed").read_text() == "changed by the worker\n"
    assert not (box.root / "etc/box/doomed").exists()
    assert (box.root / "profile.json").read_text() == PROFILE.read_text()
    assert (box.root / "dev/shm/box").stat().st_size == 1 << 16
    assert overlay_changes(box.upper()) == {
        "etc/box/changed": "file",
        "etc/box/doomed": "whiteout",
        "opt/box": "opaque",
        "opt/box/new": "file",
        "srv/box": "directory",
        "srv/box.log": "file",
        "srv/box/deep": "directory",
        "srv/box/deep/er": "directory",
        "srv/box/deep/er/file": "file",
        "srv/box/hard": "file",
        "srv/box/soft": "link",
        "srv/state.json": "file",
    }
    until("log", lambda: "tick 20\n" in box.log())
    assert "worker starts\n" in box.log()
    until("log", lambda: "worker's standard error\n" in box.log())
    last = box.counts_on()
    assert last["thread"] > first["thread"]
    assert last["shm"] == last["count"]

    assert box.alive()
    box.ask_exit(7)
    assert box.wait() == 7
    assert not box.alive()
    assert traces(box)
    box.remove()
    assert traces(box) == []


def test_a_killed_worker_ends_as_shells_say(runtime: Runtime) -> None:
    """A signal is 128 and its number, never a 0."""
    box = runtime.run([images.STATIC_WORKER], image=images.busybox())
    box.counts_on()
    box.kill()
    assert box.wait() == 128 + signal.SIGKILL


def test_processes_talk_to_each_other(runtime: Runtime) -> None:
    """A tree, a Unix socket pair, a TCP connection and a listener work: the loopback is up."""
    modes = ["--tree", "--socketpair", "--pair", "--listen", "8000"]
    box = runtime.run([images.PYTHON_WORKER, *modes], image=images.debian())
    before = box.counts_on()
    after = box.counts_on()
    assert all(new >= old for old, new in zip(before["children"], after["children"], strict=True))
    assert after["unix"] > before["unix"] > 0
    assert after["tcp"] > before["tcp"] > 0
    assert box.ask(8000) >= after["count"]
    processes = [pid for directory in box.cgroup_dirs() for pid in _pids(directory)]
    assert len(set(processes)) == 5
    # The other end of a connection gone is an end that is seen.
    victim = next(pid for pid in sorted(set(processes)) if _inner_pid(pid) == after["pids"][-1])
    os.kill(victim, signal.SIGKILL)
    assert box.wait() == 1, box.log()


def _pids(directory: Path) -> list[int]:
    return [int(line) for line in (directory / "cgroup.procs").read_text().split()]


def _inner_pid(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))


@pytest.mark.parametrize("image", WORKERS)
@pytest.mark.parametrize(
    ("answer", "code"),
    [({"success": True}, 0), ({"success": False, "error": "x"}, 3)],
    ids=["success", "failure"],
)
def test_the_workers_speak_the_contract(
    kit: Kit, image: str, answer: dict[str, object], code: int, tmp_path: Path
) -> None:
    """A restored worker says so and counts on; one that is answered ends."""
    root, worker = WORKERS[image]
    env = {"DYN_CHECKPOINT_SIGNAL_FILE": "/signals/done", "DYN_RESTORE_MARKER_FILE": "/srv/restored"}
    binds = [(tmp_path, "/signals", "rw")]
    with kit.runtime("runc") as runtime:
        boxes = [runtime.run([worker], image=root(), env=env, binds=binds) for _ in range(2)]
        (boxes[0].root / "srv/restored").touch()
        until("restored worker", lambda: (boxes[0].state() or {}).get("restored"))
        until("log", lambda: "restored at" in boxes[0].log())
        assert not boxes[1].counts_on()["restored"]
        (tmp_path / "done.new").write_text(json.dumps(answer))
        (tmp_path / "done.new").rename(tmp_path / "done")
        assert boxes[1].wait() == code
        boxes[0].counts_on()


@pytest.mark.parametrize("kind", ["runc", "crun", "cri"])
def test_user_and_read_only_root_are_obeyed(kit: Kit, kind: str, tmp_path: Path) -> None:
    """The worker cannot change the image; its state is in a directory of its own."""
    os.chown(tmp_path, 1234, 1234)
    args = ["--state", "/work/state", "--exit-file", "/work/exit"]
    with kit.runtime(kind) as runtime:
        box = runtime.run(
            [images.PYTHON_WORKER, *args],
            image=images.debian(),
            binds=[(tmp_path, "/work", "rw")],
            uid=1234,
            readonly_root=True,
        )
        state = box.counts_on("/work/state")
        assert state["files"] == "EROFS"
        assert state["uid"] == 1234
        assert state["seccomp"] == 0
        box.ask_exit(9, "/work/exit")
        assert box.wait() == 9


@pytest.mark.parametrize("kind", ["runc", "crun", "cri"])
def test_a_terminal_is_one(kit: Kit, kind: str) -> None:
    """What the container prints to its terminal is in the log."""
    with kit.runtime(kind) as runtime:
        box = runtime.run([images.PYTHON_WORKER], image=images.debian(), tty=True)
        box.counts_on()
        assert "/pts/" in os.readlink(f"/proc/{box.pid}/fd/1")
        until("log", lambda: "worker starts" in box.log())
        box.ask_exit(0)
        assert box.wait() == 0


@pytest.mark.parametrize("kind", ["runc", "cri"])
def test_standard_output_is_a_pipe(kit: Kit, kind: str) -> None:
    """A checkpoint cannot carry files of the host; stdin is /dev/null."""
    with kit.runtime(kind) as runtime:
        box = runtime.run([images.STATIC_WORKER], image=images.busybox())
        links = [os.readlink(f"/proc/{box.pid}/fd/{fd}") for fd in range(3)]
        assert links[0] == "/dev/null"
        assert all(link.startswith("pipe:") for link in links[1:])
        assert links[1] != links[2]


def test_an_image_of_one_program_runs(runtime: Runtime) -> None:
    """There is no shell and no directory in it."""
    worker = images.static_worker()
    box = runtime.run(
        [f"/{worker.name}", "--state", "/state.json", "--exit-file", "/exit-code"], image=images.empty(worker)
    )
    assert box.counts_on("/state.json")["files"] == "ENOENT"
    box.ask_exit(3, "/exit-code")
    assert box.wait() == 3


def test_containers_share_a_pod(kit: Kit) -> None:
    """The second container has its own id and pids, but the pod's uid and network."""
    with kit.runtime("cri") as runtime:
        image = images.debian()
        main = runtime.run([images.PYTHON_WORKER, "--listen", "8000"], image=image, name="main")
        other = runtime.run([images.PYTHON_WORKER], image=image, name="sidecar", new_pod=False)
        assert main.id != other.id
        assert main.pod.uid == other.pod.uid  # type: ignore[attr-defined]
        assert other.counts_on()["pid"] == 1
        assert main.counts_on()["count"] <= other.ask(8000)
        other.remove()
        main.counts_on()


def test_what_cannot_start_is_refused_in_the_runtimes_words(runtime: Runtime) -> None:
    """The next box runs as if nothing had been."""
    with pytest.raises((AssertionError, boxes_wire.RpcError), match="no-such-program"):
        runtime.run(["/bin/no-such-program"], image=images.busybox())
    runtime.run([images.STATIC_WORKER], image=images.busybox()).counts_on()


def test_what_a_killed_test_run_leaves_is_swept_away() -> None:
    """Processes, mounts, cgroups, the bridge and the directory go; a kit that is alive is left alone."""
    script = (
        "import time; from tests.real import images; from tests.real.boxes import Kit; kit = Kit()\n"
        "kit.runtime('runc').run([images.STATIC_WORKER], image=images.busybox())\n"
        "kit.runtime('cri').run([images.STATIC_WORKER], image=images.busybox())\n"
        "print(kit.base, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as run:
        assert run.stdout
        base = Path(run.stdout.readline().strip())
        token = base.name.removeprefix(PREFIX)
        sweep()
        kinds = {line.split()[0] for line in leftovers(token)}
        run.kill()
    assert kinds == {"process", "mount", "cgroup", "interface"}
    sweep()
    assert leftovers(token) == []
    assert not base.exists()


def test_an_image_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several who want it at the same time get the same one."""
    monkeypatch.setattr(images, "CACHE", tmp_path / "images")
    source = "int main(void) { return 5; }\n"
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: images.compiled("five", source), range(4)))
    (program,) = found
    assert subprocess.run([program], check=False).returncode == 5
    assert [path.name for path in (tmp_path / "images").iterdir()] == [program.parent.name]


TABLE: boxes_wire.Table = {
    "number": (1, int),
    "text": (2, str),
    "texts": (3, [str]),
    "inner": (4, {"text": (1, str), "number": (20, int)}),
    "pairs": (15, [boxes_wire.PAIR]),
}


@given(
    number=st.integers(0, 2**64 - 1),
    text=st.text(),
    texts=st.lists(st.text()),
    mapping=st.dictionaries(st.text(), st.text()),
)
def test_messages_come_back_as_they_went(
    number: int, text: str, texts: list[str], mapping: dict[str, str]
) -> None:
    """Encoding and decoding agree, and what a reader does not know is passed over."""
    message = {
        "number": number,
        "text": text,
        "texts": texts,
        "inner": {"text": text, "number": number},
        "pairs": boxes_wire.pairs(mapping),
    }
    data = boxes_wire.encode(TABLE, message)
    assert boxes_wire.decode(TABLE, data) == message
    assert boxes_wire.decode({"texts": (3, [str])}, data) == {"texts": texts}


def test_the_encoding_is_protobufs() -> None:
    """The bytes are those of the protocol's own documentation: 150, "testing", and an inner 150."""
    table: boxes_wire.Table = {"a": (1, int), "b": (2, str), "c": (3, {"a": (1, int)})}
    data = boxes_wire.encode(table, {"a": 150, "b": "testing", "c": {"a": 150}})
    assert data == bytes.fromhex("089601 120774657374696e67 1a03089601")
