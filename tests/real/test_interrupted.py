"""Commands that are told to end undo what they have begun; what was killed is settled by who comes next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.real.boxes import Box
from tests.real.fakes import HANG_FROZEN, FakeCriu
from tests.real.node import HIBERNODE, Node, Worker, read_json, state_letter, until
from tests.real.places import Place, processes_with, refused
from tests.real.test_container_faults import (
    Frozen,
    artifact,
    fake_restore,
    frozen,
    place,
    runs_on,
    started,
    stop,
    stopped_dump,
    text_of,
    thaws_after_all,
    untouched,
    waiting,
)

__all__ = ["artifact", "frozen", "place", "waiting"]  # fixtures

pytestmark = [pytest.mark.containers, pytest.mark.criu]

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
HANGS = """cp "$(command -v sleep)" "$work/criu"; exec "$work/criu" 600"""
"""A CRIU by its name, so that it is found and killed."""


KILLS_ITS_WORKER = """"${criu[@]}" "$@"; code=$?
while [ $# -gt 0 ]; do [ "$1" != --pidfile ] || pidfile=$2; shift; done
kill -9 $(cat "$pidfile")
until grep -q '^State:.Z' /proc/$(cat "$pidfile")/status; do :; done
exit $code"""
"""A CRIU whose worker does not outlive it; it sees the pids, and the /proc, that its worker sees."""


@contextmanager
def running(node: Node, *words: str | int, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command beside the test."""
    command = subprocess.Popen(
        [HIBERNODE, *map(str, words)],
        env=node.env(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield command
    finally:
        command.kill()
        command.communicate(timeout=30)


def ends_as(command: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal, and see that the command says that it was interrupted and has its exit code."""
    command.send_signal(number)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 128 + number, said
    assert f"interrupted by {number.name}" in said
    assert "Traceback" not in said


def journals(node: Node) -> list[dict[str, Any]]:
    """Read how far the restores of a node have come."""
    found = [read_json(path) for path in sorted(node.state.glob("restores/*/journal.json"))]
    return [journal for journal in found if journal is not None]


def at(node: Node, step: str) -> bool:
    """Whether a restore has come to a step."""
    return any(journal.get("step") == step for journal in journals(node))


def all_done(node: Node) -> bool:
    """Whether nothing is left to be undone of any restore."""
    return all(journal["step"] == "done" for journal in journals(node))


def numb(_number: int = 0) -> None:
    """Ignore SIGHUP, as under nohup(1)."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


# a restore that is told to end ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_restore_that_is_told_to_end_undoes_itself(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box, number: signal.Signals
) -> None:
    """CRIU has begun: the container is as it was when the command has ended, without an agent."""
    assert artifact.is_dir()
    node = place.node
    with untouched(node, waiting):
        fake = fake_restore(node, HANGS)
        with running(node, "restore", frozen.id, "--into", waiting.id, CRIU_BINARY=fake) as command:
            until("restore", (node.base / "began").exists)
            ends_as(command, number)
    assert all_done(node)
    assert not list(node.state.glob("restores/*/*.undo"))
    thaws_after_all(place, frozen, waiting)


@pytest.mark.parametrize("step", ["verify", "compatibility", "prepare", "rootfs", "restore"])
def test_a_restore_that_is_told_to_end_at_a_step_undoes_itself(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box, step: str
) -> None:
    """Whatever it has done so far."""
    assert artifact.is_dir()
    node = place.node
    fault = f"hang@restore.{step}"
    words = ("restore", frozen.id, "--into", waiting.id)
    with untouched(node, waiting), running(node, *words, FAULT=fault) as command:
        until("step", lambda: at(node, step))
        ends_as(command, signal.SIGTERM)
    assert all_done(node)
    thaws_after_all(place, frozen, waiting)


def test_a_second_signal_does_not_cut_off_what_undoes_a_restore(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box
) -> None:
    """Who presses Ctrl-C again and again gets a clean container too."""
    assert artifact.is_dir()
    node = place.node
    fake = fake_restore(node, HANGS)
    words = ("restore", frozen.id, "--into", waiting.id)
    with untouched(node, waiting), running(node, *words, CRIU_BINARY=fake) as command:
        until("restore", (node.base / "began").exists)
        while command.poll() is None:
            for number in SIGNALS:
                command.send_signal(number)
            time.sleep(0.02)
        assert command.returncode in {128 + number for number in SIGNALS}
    assert all_done(node)


def test_a_signal_that_comes_too_late_lets_the_worker_live(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box
) -> None:
    """All is restored when it comes, so that this is a success."""
    assert artifact.is_dir()
    node = place.node
    fake = fake_restore(
        node,
        f'"${{criu[@]}}" "$@"; code=$?; touch {node.base}/restored;'
        f"until [ -e {node.base}/go ]; do sleep 0.01; done; exit $code",
    )
    with running(node, "restore", frozen.id, "--into", waiting.id, CRIU_BINARY=fake) as command:
        until("restored worker", (node.base / "restored").exists)
        command.send_signal(signal.SIGTERM)
        until("undo", lambda: list(node.state.glob("restores/*/undone")))
        (node.base / "go").touch()
        out, said = command.communicate(timeout=60)
    assert command.returncode == 0, said
    assert f"{frozen.id}: pid" in out
    assert waiting.counts_on()["restored"] is True
    assert all_done(node)
    waiting.ask_exit(11)
    assert waiting.wait() == 11


# a dump that is told to end -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_dump_that_is_told_to_end_lets_its_worker_go(place: Place, number: signal.Signals) -> None:
    """CRIU hangs with the container frozen."""
    node = place.node
    id_, box = started(place)
    fake = FakeCriu(node, HANG_FROZEN)
    with running(node, "checkpoint", "--container", box.id) as command:
        until("dump", fake.began)
        until("frozen", lambda: "TracerPid:\t0" not in Path(f"/proc/{box.pid}/status").read_text())
        ends_as(command, number)
    runs_on(node, box)
    assert node.final_name(id_) == "absent"
    assert not any((node.store / ".staging").iterdir())
    fake.be_real()
    node.run("checkpoint", "--container", box.id)
    assert node.final_name(id_) == "whole"


def test_a_command_that_is_to_survive_its_terminal_does(node: Node) -> None:
    """Under nohup SIGHUP stays ignored."""
    worker = silent(node)
    with subprocess.Popen(
        [HIBERNODE, "checkpoint", "--pid", str(worker.pid)],
        env=node.env(FAULT="hang@checkpoint.locate"),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=numb,  # noqa: PLW1509 - before anything else of ours runs
    ) as command:
        try:
            until("dump", lambda: list(node.store.glob(".staging/*/journal.json")))
            command.send_signal(signal.SIGHUP)
            ends_as(command, signal.SIGTERM)
        finally:
            command.kill()
    assert not any((node.store / ".staging").iterdir())
    assert worker.counts_on()


def silent(node: Node) -> Worker:
    """Start a worker of the node that asks for nothing."""
    worker = node.start_worker("--no-ready")
    until("worker at work", lambda: worker.count() >= 1)
    return worker


# a command that is killed ---------------------------------------------------------------------------------


def killed(node: Node, id_: str, *more: str, step: str = "restore") -> None:
    """Have a restore end at a step as SIGKILL ends it."""
    node.run("restore", id_, *more, check=-signal.SIGKILL, FAULT=f"kill@restore.{step}")


def test_an_agent_that_runs_settles_a_command_that_was_killed(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box
) -> None:
    """It need not be started anew."""
    assert artifact.is_dir()
    node = place.node
    agent = node.start_agent()
    with untouched(node, waiting):
        killed(node, frozen.id, "--into", waiting.id)
        assert not all_done(node)
        until("settled restore", lambda: all_done(node), seconds=60)
    assert "Recovered" in node.run("events").stdout
    stop(node, agent)
    thaws_after_all(place, frozen, waiting)


def test_the_next_restore_into_a_container_settles_the_dead_one(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box
) -> None:
    """What undoes it later does no harm to the worker that lives there now."""
    assert artifact.is_dir()
    node = place.node
    killed(node, frozen.id, "--into", waiting.id)
    (old,) = node.state.glob("restores/*/journal.json")
    unfinished = old.read_text()
    place.thaw(frozen.id, waiting)
    assert waiting.counts_on()["restored"] is True
    assert json.loads(old.read_text())["step"] == "done"
    old.write_text(unfinished)  # as an agent of an earlier release would have left it
    node.start_agent()
    until("settled restore", lambda: json.loads(old.read_text())["step"] == "done")
    assert waiting.counts_on()["restored"] is True
    waiting.ask_exit(11)
    assert waiting.wait() == 11


def test_the_next_restore_on_the_node_settles_the_dead_one(node: Node) -> None:
    """The same without containers, where the pids are the same too."""
    worker = silent(node)
    node.run("checkpoint", "--pid", worker.pid, "--leave", "killed")
    worker.process.wait(timeout=30)
    node.pids_free(worker.id)
    killed(node, worker.id)
    (old,) = node.state.glob("restores/*/journal.json")
    unfinished = {**json.loads(old.read_text()), "pids": [worker.pid]}
    node.run("restore", worker.id)
    assert worker.counts_on()
    assert json.loads(old.read_text())["step"] == "done"
    old.write_text(json.dumps(unfinished))
    node.start_agent()
    until("settled restore", lambda: json.loads(old.read_text())["step"] == "done")
    assert worker.counts_on()


def kill_frozen(node: Node, box: Box) -> FakeCriu:
    """Kill a dump whose CRIU is stopped, and holds the container."""
    fake = stopped_dump(node, "Dumping pages")
    with running(node, "checkpoint", "--container", box.id) as command:
        victim = int(until("stopped criu", lambda: text_of(node.base / "victim")))
        until("stopped criu", lambda: state_letter(victim) == "T")
    assert command.returncode == -signal.SIGKILL
    assert "TracerPid:\t0" not in Path(f"/proc/{box.pid}/status").read_text()
    return fake


def test_an_agent_that_runs_settles_a_dump_that_was_killed(place: Place) -> None:
    """The container was frozen when the command was killed; it is let go, and dumped by the next command."""
    node = place.node
    id_, box = started(place)
    node.start_agent()
    fake = kill_frozen(node, box)
    until("empty staging", lambda: not any((node.store / ".staging").iterdir()), seconds=60)
    runs_on(node, box)
    fake.be_real()
    node.run("checkpoint", "--container", box.id)
    assert node.final_name(id_) == "whole"


def test_the_next_dump_of_a_container_settles_the_dead_one(place: Place) -> None:
    """Without an agent, and though the dead one's CRIU still holds the container."""
    node = place.node
    id_, box = started(place)
    fake = kill_frozen(node, box)
    fake.be_real()
    node.run("checkpoint", "--container", box.id)
    assert node.final_name(id_) == "whole"
    assert not any((node.store / ".staging").iterdir())
    runs_on(node, box)


# a worker that ends at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [False, True], ids=["told", "waited for"])
def test_a_container_that_ends_with_its_worker_is_not_called_untouched(
    place: Place, frozen: Frozen, artifact: Path, waiting: Box, *, wait: bool
) -> None:
    """It was restored, and was killed before anybody looked: the code is the worker's if it is asked for."""
    assert artifact.is_dir()
    node = place.node
    result = node.run(
        "restore",
        frozen.id,
        "--into",
        waiting.id,
        *(["--wait"] if wait else []),
        check=128 + signal.SIGKILL if wait else 1,
        CRIU_BINARY=fake_restore(node, KILLS_ITS_WORKER),
    )
    refused(result, "ended at once, signal 9", "the container ends with it")
    assert "as it was" not in result.stderr
    assert waiting.wait() == 128 + signal.SIGKILL
    until("end of all helpers", lambda: not processes_with(str(node.base)))
    assert all_done(node)
    assert not list(node.state.glob("restores/*/*.undo"))


def test_the_code_of_a_worker_of_the_node_that_ends_at_once_is_given(node: Node) -> None:
    """The same without containers."""
    worker = silent(node)
    node.run("checkpoint", "--pid", worker.pid, "--leave", "killed")
    worker.process.wait(timeout=30)
    node.pids_free(worker.id)
    result = node.run(
        "restore",
        worker.id,
        "--wait",
        check=128 + signal.SIGKILL,
        CRIU_BINARY=fake_restore(node, KILLS_ITS_WORKER),
    )
    refused(result, "ended at once, signal 9")
    assert not state_letter(worker.pid)
    assert os.path.exists(node.store / worker.id)
