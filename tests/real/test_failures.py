"""Dumps that go wrong: each is answered, leaves the worker as it was and nothing under the final name."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hibernode.criu import options
from hibernode.criu.moment import is_safe
from hibernode.criu.runner import find_criu, run_criu
from tests.real.fakes import HALF_DUMP, HANG, HANG_FROZEN, FakeCriu, small_tmpfs
from tests.real.node import Node, Worker, until

pytestmark = pytest.mark.criu

MOMENTS = 40
PLAIN = options.DumpOptions(
    leave="running",
    shell_job=False,
    tcp="close",
    file_locks=True,
    link_remap=True,
    ghost_limit_bytes=1 << 20,
    freeze_timeout_seconds=10.0,
    log_level=4,
)


def bystander(node: Node, id_: str | None = None) -> Worker:
    """Start a worker that outlives its answer: it does not look where the answer comes."""
    return node.start_worker(
        "--no-ready",
        id_=id_,
        under=("/usr/bin/env", f"DYN_CHECKPOINT_SIGNAL_FILE={node.base}/elsewhere.done"),
    )


def ready(node: Node, worker: Worker) -> None:
    """Ask for a dump of a worker by its pid."""
    until("worker at work", lambda: worker.count() >= 1)
    temporary = node.signals / f".{worker.id}.new"
    temporary.write_text(json.dumps({"pid": worker.pid}))
    temporary.rename(node.signals / f"{worker.id}.ready")


def ask(node: Node, worker: Worker) -> dict[str, Any]:
    """Ask for a dump and wait for its answer."""
    node.forget(worker.id)
    ready(node, worker)
    return node.done(worker.id)


def untouched(worker: Worker) -> None:
    """See that a worker runs: not stopped, not traced, counting."""
    assert worker.process.poll() is None
    assert "TracerPid:\t0" in _status(worker)
    assert worker.counts_on()


def _status(worker: Worker) -> str:
    return Path(f"/proc/{worker.pid}/status").read_text()


def nothing_left(node: Node, id_: str) -> None:
    """See that nothing is under the final name and nothing is staged."""
    assert node.final_name(id_) == "absent"
    until("empty staging", lambda: not any((node.store / ".staging").iterdir()))
    assert json.loads(node.run("list", "-o", "json").stdout)["items"] == []


def failed_as(answer: dict[str, Any], reason: str) -> None:
    """See that an answer says no, and why."""
    assert answer["success"] is False, answer
    assert answer["error"].startswith(f"{reason}: "), answer
    assert answer["checkpoint_path"] == ""


@pytest.mark.parametrize("body", [HANG, HANG_FROZEN], ids=["before it froze", "with the worker frozen"])
def test_a_criu_that_hangs_is_ended_at_the_deadline(node: Node, body: str) -> None:
    """FC-06: CRIU ignores SIGTERM; the worker runs on and is told, and the next job runs."""
    fake = FakeCriu(node, body)
    node.start_agent(CHECKPOINT_DEADLINE_SECONDS="1")
    worker = bystander(node)
    failed_as(ask(node, worker), "DeadlineExceeded")
    untouched(worker)
    nothing_left(node, worker.id)
    fake.be_real()
    node.agents[-1].terminate()
    node.agents[-1].wait(timeout=20)
    node.start_agent()
    assert ask(node, worker)["success"] is True


def test_the_queue_goes_on_behind_a_criu_that_hangs(node: Node) -> None:
    """FC-06: a job that waits behind one that hangs gets its turn at the deadline."""
    fake = FakeCriu(node, HANG)
    node.start_agent(CHECKPOINT_DEADLINE_SECONDS="2")
    first, second = bystander(node), bystander(node)
    until("second worker", lambda: second.count() >= 1)
    ready(node, first)
    until("dump", fake.began)
    ready(node, second)
    fake.be_real()
    failed_as(node.done(first.id), "DeadlineExceeded")
    assert node.done(second.id)["success"] is True


def test_a_criu_that_fails_in_the_middle_leaves_nothing_but_its_log(node: Node) -> None:
    """FC-04, FC-05: two images are written, then exit code 1; nothing is published, the log is kept."""
    FakeCriu(node, HALF_DUMP)
    node.start_agent()
    worker = bystander(node)
    failed_as(ask(node, worker), "CriuFailed")
    untouched(worker)
    nothing_left(node, worker.id)
    assert "not in the store" in node.run("restore", worker.id, check=1).stderr
    assert "made up by a test" in node.run("logs", worker.id).stdout


def test_the_log_of_a_criu_that_hung_is_kept(node: Node) -> None:
    """FC-06: what CRIU said before it hung can be read afterwards."""
    FakeCriu(node, f"echo 'last words' > \"$work/$log\"; {HANG}")
    node.start_agent(CHECKPOINT_DEADLINE_SECONDS="1")
    worker = bystander(node)
    failed_as(ask(node, worker), "DeadlineExceeded")
    assert "last words" in node.run("logs", worker.id).stdout


DEATHS = {
    "before CRIU looks": 'kill -9 $tree; real "$@"; exit $?',
    "among the pages": """real "$@" & victim=$!
until grep -q 'Dumping pages' "$work/$log" 2>/dev/null; do kill -0 $victim 2>/dev/null || break; done
kill -9 $tree; wait $victim; exit 1""",
}


@pytest.mark.parametrize("moment", DEATHS)
def test_a_worker_that_dies_in_its_dump_is_answered_for(node: Node, moment: str) -> None:
    """The answer says that the worker is gone, and the agent lives."""
    fake = FakeCriu(node, DEATHS[moment])
    node.start_agent()
    worker = bystander(node)
    failed_as(ask(node, worker), "WorkerGone")
    nothing_left(node, worker.id)
    fake.be_real()
    assert ask(node, bystander(node))["success"] is True


def test_a_worker_that_dies_in_the_queue_is_answered_for(node: Node) -> None:
    """A worker that ends while its job waits is not dumped; the answer says so."""
    fake = FakeCriu(node, f"until [ -e {node.base}/go ]; do sleep 0.01; done; exit 1")
    node.start_agent()
    first, second = bystander(node), bystander(node)
    ready(node, first)
    until("dump", fake.began)
    ready(node, second)
    until("second job", lambda: json.loads(node.run("status", "-o", "json").stdout)["queue"]["waiting"])
    second.process.kill()
    second.process.wait()
    (node.base / "go").touch()
    failed_as(node.done(second.id), "WorkerGone")
    nothing_left(node, second.id)


def test_a_signal_directory_that_vanishes_and_comes_back_is_served(node: Node) -> None:
    """FC-26: removed and made again, then replaced by another: requests are answered where they stand."""
    node.start_agent()
    node.signals.rmdir()
    until("absent mode", lambda: _mode(node) == "absent")
    node.signals.mkdir(mode=0o1777)
    node.signals.chmod(0o1777)
    assert ask(node, bystander(node))["success"] is True
    other = node.base / "other"
    other.mkdir(mode=0o1777)
    node.signals.rename(node.base / "old")
    other.rename(node.signals)
    assert ask(node, bystander(node))["success"] is True


def _mode(node: Node) -> str:
    mode: str = json.loads(node.run("status", "-o", "json").stdout)["signals"]["mode"]
    return mode


def _plain_file(path: Path) -> None:
    path.write_text("")


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize("stand_in", [_plain_file, _link], ids=["a file", "a dangling link"])
def test_a_signal_directory_that_appears_only_later_is_served(
    node: Node, stand_in: Callable[[Path], None]
) -> None:
    """Something else stands in its place when the agent starts; the agent waits for the directory."""
    stand_in(node.signals)
    node.start_agent()
    assert _mode(node) == "absent"
    node.signals.unlink()
    node.signals.mkdir(mode=0o1777)
    assert ask(node, bystander(node))["success"] is True


def test_a_store_without_room_is_refused_before_the_worker_is_touched(node: Node) -> None:
    """FC-39: the estimate does not fit; the answer names the space, and no attempt is counted."""
    fake = FakeCriu(node, "exit 1")
    with small_tmpfs(node.store, "4m", "0700"):
        node.start_agent()
        worker = bystander(node)
        for _ in range(4):
            failed_as(ask(node, worker), "NoSpace")
        assert not fake.began()
        untouched(worker)
        nothing_left(node, worker.id)


def test_a_store_that_fills_up_in_the_dump_fails_as_no_space(node: Node) -> None:
    """FC-39: preflight has passed, then the room is gone; nothing partial is left, the next dump works."""
    filler = node.store / ".filler"
    fake = FakeCriu(node, f'head -c 1G /dev/zero > {filler} 2>/dev/null; real "$@"; exit $?')
    with small_tmpfs(node.store, "128m", "0700"):
        node.start_agent()
        worker = bystander(node)
        failed_as(ask(node, worker), "NoSpace")
        untouched(worker)
        assert node.final_name(worker.id) == "absent"
        filler.unlink()
        nothing_left(node, worker.id)
        fake.be_real()
        assert ask(node, worker)["success"] is True


def test_a_state_directory_without_room_does_not_hide_what_went_wrong(node: Node) -> None:
    """Neither notes nor the log can be kept; the answer still says why the dump failed."""
    fake = FakeCriu(node, f"head -c 1G /dev/zero > {node.state}/filler 2>/dev/null; {HALF_DUMP}")
    with small_tmpfs(node.state, "1m", "0700"):
        node.start_agent()
        worker = bystander(node)
        failed_as(ask(node, worker), "CriuFailed")
        untouched(worker)
        nothing_left(node, worker.id)
        (node.state / "filler").unlink()
        fake.be_real()
        assert ask(node, worker)["success"] is True


def test_a_full_signal_directory_is_answered_in_once_there_is_room(node: Node) -> None:
    """The agent lives, keeps the answer's request and answers when it can."""
    filler = node.signals / "filler"
    fake = FakeCriu(node, f'head -c 1G /dev/zero > {filler} 2>/dev/null; real "$@"; exit $?')
    with small_tmpfs(node.signals, "64k", "1777"):
        node.start_agent()
        worker = bystander(node)
        ready(node, worker)
        until("failed answer", lambda: "cannot write the signal file" in node.log.read_text())
        assert fake.began()
        assert not (node.signals / f"{worker.id}.done").exists()
        filler.unlink()
        assert node.done(worker.id)["success"] is True
        assert node.final_name(worker.id) == "whole"


@pytest.mark.parametrize("body", [HANG, HANG_FROZEN], ids=["before it froze", "with the worker frozen"])
def test_an_agent_that_is_told_to_stop_leaves_its_dump_to_the_next(node: Node, body: str) -> None:
    """FC-26: a dump in flight is undone: the worker runs, unanswered, and the next agent takes it up."""
    fake = FakeCriu(node, body)
    agent = node.start_agent()
    worker = bystander(node)
    ready(node, worker)
    until("dump", fake.began)
    if body == HANG_FROZEN:
        until("frozen worker", lambda: "TracerPid:\t0" not in _status(worker))
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=30) == 0
    untouched(worker)
    assert not (node.signals / f"{worker.id}.done").exists()
    nothing_left(node, worker.id)
    fake.be_real()
    node.start_agent()
    assert node.done(worker.id)["success"] is True


def test_a_dump_that_is_ended_at_any_moment_leaves_the_worker_alive(node: Node) -> None:
    """FC-04: also where CRIU has made the worker run code that is not its own."""
    node.signals.mkdir(mode=0o1777)
    worker = bystander(node)
    until("worker at work", lambda: worker.count() >= 1)
    criu = find_criu("")
    images = node.base / "images"
    for moment in range(MOMENTS):
        images.mkdir()
        args = options.dump_args(worker.pid, images, PLAIN, work_dir=images)
        asyncio.run(
            run_criu(
                criu,
                args,
                work_dir=images,
                deadline=0.004 * moment,
                marker="",
                safe=partial(is_safe, worker.pid),
            )
        )
        untouched(worker)
        shutil.rmtree(images)


BEFORE_PUBLISHING = ["locate", "preflight", "quiesce-gpu", "dump", "rootfs", "seal", "publish"]


@pytest.mark.parametrize("step", BEFORE_PUBLISHING)
def test_a_disk_that_breaks_at_a_step_undoes_the_dump(node: Node, step: str) -> None:
    """The worker runs, the answer says no, and nothing is staged or published."""
    node.start_agent(FAULT=f"fail@checkpoint.{step}")
    worker = bystander(node)
    failed_as(ask(node, worker), "FaultInjected")
    untouched(worker)
    nothing_left(node, worker.id)


def test_a_disk_that_breaks_after_publishing_does_not_take_the_checkpoint_back(node: Node) -> None:
    """What is whole and under its final name is a success, though the journal cannot say so."""
    node.start_agent(FAULT="fail@checkpoint.announce")
    worker = bystander(node)
    assert ask(node, worker)["success"] is True
    assert node.final_name(worker.id) == "whole"
    until("empty staging", lambda: not any((node.store / ".staging").iterdir()))


def test_an_agent_whose_state_directory_is_full_starts_and_recovers(node: Node) -> None:
    """What a killed agent left is dealt with though no note of it can be written."""
    with small_tmpfs(node.state, "1m", "0700"):
        dying = node.start_agent(wait=False, FAULT="kill@checkpoint.seal")
        until("signal directory", node.signals.is_dir)
        worker = bystander(node)
        ready(node, worker)
        assert dying.wait(timeout=30) == -signal.SIGKILL
        subprocess.run(
            ["/bin/sh", "-c", f"head -c 1G /dev/zero > {node.state}/filler"], check=False, stderr=-3
        )
        node.start_agent()
        until("empty staging", lambda: not any((node.store / ".staging").iterdir()))
        untouched(worker)
        os.unlink(node.state / "filler")
