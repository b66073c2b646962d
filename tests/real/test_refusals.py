"""Requests that must not be followed: refused with both sides named, and nothing touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.real.fakes import HALF_DUMP, FakeCriu
from tests.real.node import HIBERNODE, Node, Worker, state_letter, until
from tests.real.test_failures import ask, bystander, failed_as, nothing_left, ready, untouched

pytestmark = pytest.mark.criu

NOBODY = 65534


def ask_empty(node: Node, id_: str) -> dict[str, Any]:
    """Write an empty ready file and wait for its answer."""
    node.forget(id_)
    (node.signals / f"{id_}.ready").touch()
    return node.done(id_)


# attempts -----------------------------------------------------------------------------------------------


def test_three_failed_dumps_exhaust_an_id_until_somebody_says_retry(node: Node) -> None:
    """FC-05: the fourth is refused without a dump and names the last reason; retry lets it go on."""
    fake = FakeCriu(node, HALF_DUMP)
    node.start_agent()
    worker = bystander(node)
    for _ in range(3):
        failed_as(ask(node, worker), "CriuFailed")
    fake.be_real()
    answer = ask(node, worker)
    failed_as(answer, "AttemptsExhausted")
    assert "CriuFailed" in answer["error"]
    assert f"hibernode retry {worker.id}" in answer["error"]
    nothing_left(node, worker.id)
    node.run("retry", worker.id)
    assert ask(node, worker)["success"] is True


def test_refusals_are_no_attempts(node: Node) -> None:
    """FC-01: a worker that preflight refuses four times is refused for the same reason each time."""
    node.start_agent()
    worker = node.start_worker(
        "--no-ready", "--io-uring",
        under=("/usr/bin/env", f"DYN_CHECKPOINT_SIGNAL_FILE={node.base}/elsewhere.done"),
    )  # fmt: skip
    for _ in range(4):
        failed_as(ask(node, worker), "IoUringInUse")
    untouched(worker)


# who is meant -------------------------------------------------------------------------------------------


def test_two_claimants_of_one_id_are_refused_by_pid(node: Node) -> None:
    """Neither is frozen; the answer names both."""
    node.start_agent()
    id_ = node.new_id()
    # They do not look for their answer while they are stopped, so that one id's two can be told apart.
    pair = [
        subprocess.Popen(
            ["/bin/sleep", "600"],
            env={"DYN_CHECKPOINT_HASH": id_, "DYN_CHECKPOINT_SIGNAL_FILE": str(node.signals / f"{id_}.done")},
            start_new_session=True,
        )
        for _ in range(2)
    ]
    try:
        answer = ask_empty(node, id_)
        failed_as(answer, "TwoClaimants")
        assert all(str(process.pid) in answer["error"] for process in pair)
        assert all(state_letter(process.pid) == "S" for process in pair)
        nothing_left(node, id_)
    finally:
        for process in pair:
            process.kill()
            process.wait()


def test_an_id_that_nobody_claims_is_refused(node: Node) -> None:
    """The answer says which variable the worker lacks."""
    node.start_agent()
    answer = ask_empty(node, node.new_id())
    failed_as(answer, "NoClaimant")
    assert "DYN_CHECKPOINT_HASH" in answer["error"]


def test_a_pid_of_another_users_process_is_refused(node: Node) -> None:
    """A file of uid 0 does not freeze uid 65534's process, nor the other way round."""
    node.start_agent()
    id_ = node.new_id()
    victim = subprocess.Popen(["/bin/sleep", "600"], user=NOBODY, group=NOBODY, extra_groups=[])
    mine = subprocess.Popen(["/bin/sleep", "600"])
    try:
        for process, owner in ((victim, 0), (mine, NOBODY)):
            node.forget(id_)
            temporary = node.signals / ".new"
            temporary.write_text(json.dumps({"pid": process.pid}))
            os.chown(temporary, owner, owner)
            temporary.rename(node.signals / f"{id_}.ready")
            answer = node.done(id_)
            failed_as(answer, "WrongOwner")
            assert str(process.pid) in answer["error"]
            assert state_letter(process.pid) == "S"
    finally:
        for process in (victim, mine):
            process.kill()
            process.wait()


def test_a_ready_file_older_than_its_worker_is_removed_unanswered(node: Node) -> None:
    """It was another worker's: this one would take the answer for its own."""
    node.signals.mkdir(mode=0o1777)
    id_ = node.new_id()
    stale = node.signals / f"{id_}.ready"
    stale.touch()
    # A worker younger than the file by more than the slack; the clock is the only thing to wait for.
    born_late = stale.stat().st_ctime + 2.5
    until("younger worker", lambda: time.time() > born_late)
    worker = node.start_worker("--no-ready", id_=id_)
    until("worker at work", lambda: worker.count() >= 1)
    node.start_agent()
    until("removal", lambda: not stale.exists())
    assert not (node.signals / f"{id_}.done").exists()
    untouched(worker)
    stale.touch()
    assert node.done(id_)["success"] is True


def test_a_pid_that_names_another_id_is_refused(node: Node) -> None:
    """A worker is frozen under its own id only."""
    node.start_agent()
    worker = bystander(node)
    until("worker at work", lambda: worker.count() >= 1)
    other = node.new_id()
    temporary = node.signals / ".new"
    temporary.write_text(json.dumps({"pid": worker.pid}))
    temporary.rename(node.signals / f"{other}.ready")
    answer = node.done(other)
    failed_as(answer, "WrongId")
    assert worker.id in answer["error"]
    untouched(worker)


def test_many_requests_that_nobody_claims_do_not_stop_the_agent(node: Node) -> None:
    """FC-24: 200 at once are all answered, and the agent answers its probe meanwhile."""
    node.start_agent()
    ids = [node.new_id() for _ in range(200)]
    for id_ in ids:
        (node.signals / f"{id_}.ready").touch()
    while not all((node.signals / f"{id_}.done").exists() for id_ in ids):
        with urllib.request.urlopen(f"http://127.0.0.1:{node.port}/livez", timeout=5) as reply:
            assert reply.status == 200
    for id_ in ids:
        failed_as(node.done(id_), "NoClaimant")


# restores -----------------------------------------------------------------------------------------------


def captured(node: Node) -> Worker:
    """Dump a worker by hand and end it."""
    node.signals.mkdir(mode=0o1777, exist_ok=True)
    worker = bystander(node)
    until("worker at work", lambda: worker.count() >= 1)
    node.run("checkpoint", "--pid", worker.pid)
    worker.process.kill()
    worker.process.wait()
    return worker


def pages(artifact: Path) -> Path:
    """Find the largest page image."""
    return max((artifact / "images").glob("pages-*.img"), key=lambda path: path.stat().st_size)


def _truncate(artifact: Path) -> str:
    path = pages(artifact)
    os.truncate(path, path.stat().st_size - 4096)
    return path.name


def _flip(artifact: Path) -> str:
    path = pages(artifact)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return path.name


def _add(artifact: Path) -> str:
    (artifact / "images" / "extra.img").write_bytes(b"x")
    return "extra.img"


def _link(artifact: Path) -> str:
    path = pages(artifact)
    path.rename(artifact.parent / "moved-away")
    path.symlink_to(artifact.parent / "moved-away")
    return path.name


def _swell(artifact: Path) -> str:
    with (artifact / "manifest.json").open("ab") as file:
        file.write(b" " * (17 << 20))
    return "manifest.json"


@pytest.mark.parametrize(
    ("damage", "options"),
    [(_truncate, []), (_flip, ["--digests"]), (_add, []), (_link, []), (_swell, [])],
    ids=[
        "a page image is cut",
        "one bit is flipped",
        "a file is added",
        "a file is a link",
        "a huge manifest",
    ],
)
def test_an_artifact_that_is_not_whole_is_not_run(
    node: Node, damage: Callable[[Path], str], options: list[str]
) -> None:
    """Exit code 5, the file is named, nothing runs; the agent says the same to who asks it."""
    worker = captured(node)
    name = damage(node.store / worker.id)
    result = node.run("restore", worker.id, *options, check=5)
    assert name in result.stderr
    assert not state_letter(worker.pid)
    node.start_agent(RESTORE_VERIFY="digests")
    answer = node.ask_restore(worker.id)
    assert answer["success"] is False
    assert name in answer["error"]
    assert not state_letter(worker.pid)


def test_a_restore_that_another_user_asks_for_is_refused(node: Node) -> None:
    """The request's owner is neither root nor the worker's user; the file is consumed."""
    worker = captured(node)
    node.start_agent()
    temporary = node.signals / ".new"
    temporary.touch()
    os.chown(temporary, NOBODY, NOBODY)
    request = node.signals / f"{worker.id}.restore"
    temporary.rename(request)
    answer = node.restored(worker.id)
    assert answer["success"] is False
    assert answer["error"].startswith("WrongOwner: ")
    assert not request.exists()
    assert not state_letter(worker.pid)


def test_a_restore_whose_pid_is_taken_is_refused(node: Node) -> None:
    """Who has it is named by pid and command and goes on; the request is consumed."""
    node.start_agent()
    worker = bystander(node)
    assert ask(node, worker)["success"] is True
    answer = node.ask_restore(worker.id)
    assert answer["success"] is False
    assert answer["error"].startswith("PidInUse: ")
    assert str(worker.pid) in answer["error"]
    assert Path(f"/proc/{worker.pid}/comm").read_text().strip() in answer["error"]
    assert not (node.signals / f"{worker.id}.restore").exists()
    untouched(worker)
    assert node.final_name(worker.id) == "whole"


# one at a time ------------------------------------------------------------------------------------------


def test_two_that_dump_one_id_at_once_make_one_dump(node: Node) -> None:
    """The second command is told that the id is busy, with exit code 4, and the agent waits its turn."""
    go = node.base / "go"
    fake = FakeCriu(node, f'until [ -e {go} ]; do sleep 0.01; done; real "$@"; exit $?')
    node.start_agent()
    worker = bystander(node)
    until("worker at work", lambda: worker.count() >= 1)
    first = subprocess.Popen(
        [HIBERNODE, "checkpoint", "--pid", str(worker.pid)], env=node.env(), stdout=subprocess.DEVNULL
    )
    until("dump", fake.began)
    second = node.run("checkpoint", "--pid", worker.pid, check=4)
    assert worker.id in second.stderr
    assert str(first.pid) in second.stderr
    node.forget(worker.id)
    ready(node, worker)
    until("agent that waits", lambda: "Busy" in node.log.read_text())
    go.touch()
    assert first.wait(timeout=30) == 0
    assert node.done(worker.id)["success"] is True
    versions = json.loads(node.run("list", "-o", "json").stdout)["items"]
    assert [item["id"] for item in versions] == [worker.id]
    untouched(worker)


def test_a_second_agent_refuses_to_start_and_says_who_runs(node: Node) -> None:
    """Exit code 4, the first one's pid; the first goes on."""
    agent = node.start_agent()
    result = node.run("run", check=4)
    assert str(agent.pid) in result.stderr
    assert agent.poll() is None
    node.run("status")


def test_a_worker_with_a_hostile_environment_does_not_hold_up_the_others(node: Node) -> None:
    """An environment of megabytes, with bytes that are no text, is looked at and passed by."""
    node.start_agent()
    big = {f"V{n}": "x" * 100_000 for n in range(15)}
    odd = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
        env={**big, os.fsdecode(b"DYN_\xff"): os.fsdecode(b"\xfe\xff")},
    )
    try:
        id_ = node.new_id()
        temporary = node.signals / ".new"
        temporary.write_text(json.dumps({"pid": odd.pid}))
        temporary.rename(node.signals / f"{id_}.ready")
        assert ask(node, bystander(node))["success"] is True
    finally:
        odd.kill()
        odd.wait()
