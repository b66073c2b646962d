"""The main job on real processes: ready file, dump, answer, restore, exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.real.node import HIBERNODE, Node, Worker, read_json, until

pytestmark = pytest.mark.criu


def _runs(pid: int, comm: str) -> bool:
    """Whether the process is past its exec."""
    return Path(f"/proc/{pid}/comm").read_text().strip() == comm


def freeze(node: Node, worker: Worker) -> dict[str, object]:
    """Wait until a worker has been dumped and has ended with exit code 0."""
    answer = node.done(worker.id)
    assert answer["success"] is True, answer
    assert worker.process.wait(timeout=30) == 0
    return answer


def test_a_worker_is_dumped_answered_and_brought_back_with_its_state(node: Node) -> None:
    """An empty ready file leads to a dump; the restored copy goes on counting under its old pid."""
    node.start_agent()
    worker = node.start_worker("--exit-code", 7)
    answer = freeze(node, worker)
    assert answer["checkpoint_path"] == str(node.store / worker.id)
    assert sorted(answer) == ["checkpoint_id", "checkpoint_path", "success", "timestamp"]
    assert node.final_name(worker.id) == "whole"
    assert json.loads((node.store / worker.id / "checkpoint.done").read_text())["success"] is True
    ended_at = worker.count()

    restored = node.ask_restore(worker.id)
    assert restored["success"] is True, restored
    assert restored["pid"] == worker.pid
    state = until("restored copy", lambda: (s := read_json(worker.state)) and s["restored"] and s)
    assert state["held"] == 8
    assert worker.count() <= ended_at + 1000
    assert worker.counts_on()
    assert not (node.signals / f"{worker.id}.ready").exists()
    assert not (node.signals / f"{worker.id}.done").exists()
    assert not (node.signals / f"{worker.id}.restore").exists()

    worker.state.with_suffix(".quit").touch()
    ended = until(
        "exit code", lambda: (r := read_json(node.signals / f"{worker.id}.restored")) and r.get("ended") and r
    )
    assert ended["exit_code"] == 7


def test_a_ready_file_that_names_the_pid_is_taken(node: Node) -> None:
    """JSON with a pid leads to that process."""
    node.start_agent()
    freeze(node, node.start_worker("--pid-in-ready"))


def test_the_workers_own_ready_file_is_enough(node: Node) -> None:
    """A worker that writes only the file in DYN_CHECKPOINT_READY_FILE is found and dumped."""
    node.start_agent()
    freeze(node, node.start_worker("--own-ready"))


def test_a_ready_file_that_was_there_before_the_agent_is_handled(node: Node) -> None:
    """FC-26: what exists when the agent starts counts as much as what appears later."""
    node.signals.mkdir(mode=0o1777)
    worker = node.start_worker()
    until("ready file", (node.signals / f"{worker.id}.ready").exists)
    node.start_agent()
    freeze(node, worker)


def test_a_tree_of_processes_comes_back_whole(node: Node) -> None:
    """Children are dumped with their parent and are back under their pids."""
    node.start_agent()
    worker = node.start_worker("--children", 3)
    freeze(node, worker)
    tree = (read_json(node.store / worker.id / "manifest.json") or {})["tree"]
    children = [str(task["pid"]) for task in tree if task["ppid"] == worker.pid]
    assert len(children) == 3
    node.pids_free(worker.id)
    assert node.ask_restore(worker.id)["success"] is True
    now = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    assert sorted(now) == sorted(children)


def test_an_id_that_is_in_the_store_is_answered_without_a_dump(node: Node) -> None:
    """A second worker of the same id gets success at once; nothing is dumped again."""
    node.start_agent()
    worker = node.start_worker()
    freeze(node, worker)
    made = (node.store / worker.id / "manifest.json").stat().st_mtime_ns
    node.forget(worker.id)
    freeze(node, node.start_worker(id_=worker.id))
    assert (node.store / worker.id / "manifest.json").stat().st_mtime_ns == made


def test_everything_in_the_store_is_private(node: Node) -> None:
    """Directories are 0700 and files 0600, whatever CRIU and the umask say."""
    node.start_agent()
    freeze(node, node.start_worker())
    for path in [node.store, *node.store.rglob("*")]:
        mode = path.lstat().st_mode & 0o7777
        assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))


def test_an_io_uring_user_is_refused_and_under_the_profile_it_is_dumped_and_restored(node: Node) -> None:
    """FC-01: without the profile pid and descriptor are named; under it the ring is EPERM, all goes well."""
    node.start_agent()
    bare = node.start_worker("--io-uring")
    answer = node.done(bare.id)
    assert answer["success"] is False
    assert str(answer["error"]).startswith("IoUringInUse")
    assert str(bare.pid) in answer["error"]
    ring = until("state", lambda: read_json(bare.state))["ring"]
    assert ring.startswith("fd ")
    assert f"fd {ring.removeprefix('fd ')}" in answer["error"]
    assert bare.process.wait(timeout=30) == 3

    worker = node.start_worker("--io-uring", under=(str(HIBERNODE), "seccomp", "exec", "--"))
    freeze(node, worker)
    assert (read_json(worker.state) or {})["ring"] == os.strerror(1)
    assert node.ask_restore(worker.id)["success"] is True
    assert worker.counts_on()
    status = Path(f"/proc/{worker.pid}/status").read_text()
    assert "Seccomp:\t2" in status


def test_a_worker_whose_output_is_a_growing_file_goes_on_by_appending(node: Node, tmp_path: Path) -> None:
    """A log that grew after the dump neither stops the restore nor is written over."""
    log = tmp_path / "out.log"
    program = "import itertools, time\nfor n in itertools.count(): print(n, flush=True), time.sleep(0.02)"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["/usr/bin/env", "python3", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        until("output", lambda: log.stat().st_size > 100)
        id_ = node.new_id()
        node.run("checkpoint", "--pid", process.pid, "--id", id_)
        size = log.stat().st_size
        until("more output", lambda: log.stat().st_size > size + 100)
    finally:
        process.kill()
        process.wait()
    before = log.read_text()
    restored = json.loads(node.run("restore", id_, "-o", "json").stdout)
    until("output of the restored copy", lambda: log.stat().st_size > len(before) + 100)
    os.kill(restored["pid"], signal.SIGKILL)
    assert log.read_text().startswith(before)


def test_the_exit_code_of_a_restored_worker_is_its_own(node: Node) -> None:
    """``restore --wait`` ends with the worker's code, a signal as 128 plus its number, never a guess."""
    for end, expected in (("exit 42", 42), ("kill -9 $$", 137)):
        program = f"while [ ! -e {node.base}/go ]; do :; done; {end}"
        process = subprocess.Popen(
            ["/bin/sh", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until("shell", partial(_runs, process.pid, "sh"))
        id_ = node.new_id()
        node.run("checkpoint", "--pid", process.pid, "--id", id_, "--leave", "killed")
        process.wait()
        waiting = subprocess.Popen(
            [HIBERNODE, "restore", id_, "--wait"], env=node.env(), stdout=subprocess.DEVNULL
        )
        until("restored copy", partial(node.restored_phase, id_))
        (node.base / "go").touch()
        assert waiting.wait(timeout=30) == expected
        (node.base / "go").unlink()


def test_output_through_a_pipe_goes_on_in_a_file(node: Node) -> None:
    """The reader of a pipe is gone at restore; what the worker writes is kept in the restore's directory."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", "while :; do echo out; echo err >&2; sleep 0.05; done"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    id_ = node.new_id()
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        process.stdout.readline()
        node.run("checkpoint", "--pid", process.pid, "--id", id_)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    restored = json.loads(node.run("restore", id_, "-o", "json").stdout)
    directory = Path(restored["directory"])
    until("output", lambda: [p for p in directory.glob("stdout.*.log") if "out" in p.read_text()])
    until("errors", lambda: [p for p in directory.glob("stderr.*.log") if "err" in p.read_text()])
    os.kill(restored["pid"], signal.SIGKILL)


def test_a_log_that_is_written_at_its_end_does_not_stop_a_restore(node: Node, tmp_path: Path) -> None:
    """A file that is open for writing only and stands at its end goes on by appending, like stdout."""
    log = tmp_path / "app.log"
    program = (
        "import itertools, os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)\n"
        "for n in itertools.count():\n"
        "    os.write(fd, b'line %d\\n' % n)\n"
        "    time.sleep(0.02)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, log],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    id_ = node.new_id()
    try:
        until("log", lambda: log.exists() and log.stat().st_size > 50)
        node.run("checkpoint", "--pid", process.pid, "--id", id_)
        size = log.stat().st_size
        until("more log", lambda: log.stat().st_size > size + 50)
    finally:
        process.kill()
        process.wait()
    before = log.read_text()
    restored = json.loads(node.run("restore", id_, "-o", "json").stdout)
    until("log of the restored copy", lambda: log.stat().st_size > len(before) + 50)
    os.kill(restored["pid"], signal.SIGKILL)
    assert log.read_text().startswith(before)


def test_a_bad_request_is_answered_so_that_nobody_waits_for_ever(node: Node) -> None:
    """JSON that is no request gets success false with the reason, for a dump and for a restore alike."""
    node.start_agent()
    id_ = node.new_id()
    (node.signals / f"{id_}.ready").write_text('{"pid": "abc"}')
    assert node.done(id_)["error"].startswith("BadRequest")
    (node.signals / f"{id_}.restore").write_text('{"force": true}')
    assert node.restored(id_)["error"].startswith("BadRequest")


def test_a_marker_that_another_worker_looks_at_is_refused(node: Node) -> None:
    """The other worker would take itself for a restored copy."""
    node.start_agent()
    shared = str(node.base / "shared-marker")
    worker = node.start_worker(DYN_RESTORE_MARKER_FILE=shared)
    freeze(node, worker)
    node.start_worker("--no-ready", DYN_RESTORE_MARKER_FILE=shared)
    answer = node.ask_restore(worker.id)
    assert answer["error"].startswith("MarkerShared"), answer
    assert not Path(shared).exists()


def test_a_link_in_place_of_the_marker_is_replaced_and_not_followed(node: Node) -> None:
    """The worker finds a marker of its own, and what the link led to is as it was."""
    node.start_agent()
    worker = node.start_worker()
    freeze(node, worker)
    victim = node.base / "victim"
    victim.write_text("untouched")
    marker = node.base / f"{worker.id}.restored-marker"
    marker.symlink_to(victim)
    assert node.ask_restore(worker.id)["success"] is True
    assert marker.read_text() == "restored\n"
    assert not marker.is_symlink()
    assert victim.read_text() == "untouched"
    assert until("restored copy", lambda: (s := read_json(worker.state)) and s["restored"])
