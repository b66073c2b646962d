"""Kill -9 at every step: the agent at each point of its journal, CRIU at three moments, dump and restore.

Each cell asks the same three things: the worker is as it was, what stands under the final name is whole or
absent, and the next agent finishes, undoes or fails the work so that the job can go on. The table is
printed at the end of the run (``-s``, or in CI's log).
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from hibernode.criu.runner import find_criu
from tests.real.node import Node, Worker, read_json, state_letter, until

pytestmark = pytest.mark.criu

DUMP_STEPS = ["locate", "preflight", "quiesce-gpu", "dump", "rootfs", "seal", "publish", "announce"]
RESTORE_STEPS = ["verify", "compatibility", "prepare", "restore", "announce"]
DUMP_MOMENTS = {
    "freezing": "Collecting",
    "in the pages": "Dumping pages",
    "between two processes": "Dumping core",
}
RESTORE_MOMENTS = {
    "at the start": "Reading image tree",
    "forking": "Forking task",
    "in the memory": "Restoring",
}

TABLE: list[tuple[str, str, str]] = []


@pytest.fixture(scope="module", autouse=True)
def _table() -> object:
    yield
    lines = [f"{killed:<34} {outcome:<46} {result}" for killed, outcome, result in TABLE]
    print("\nkill -9 matrix\n" + "\n".join(lines))


KILL = """
import os, signal, sys, time
from hibernode.criu.moment import is_safe
victim, *tree = map(int, sys.argv[1:])
while True:
    os.kill(victim, signal.SIGSTOP)
    time.sleep(0.02)
    if all(map(is_safe, tree)):
        os.kill(victim, signal.SIGKILL)
        break
    os.kill(victim, signal.SIGCONT)
    time.sleep(0.001)
"""
"""Kills CRIU where that does not kill the dumped tree: what it has its tasks run for it ends in a trap."""


def killer(node: Node, operation: str, needle: str) -> Path:
    """Write a CRIU that is killed, once, when its log says ``needle``: an executable around the real one."""
    criu = " ".join(f"'{word}'" for word in find_criu("").argv)
    once = node.base / "killed-once"
    path = node.base / "criu-that-dies"
    path.write_text(
        f"""#!/bin/bash
if [ "$1" != {operation} ] || [ -e {once} ]; then exec {criu} "$@"; fi
args=("$@")
while [ $# -gt 0 ]; do
  case "$1" in --work-dir) work=$2;; --log-file) log=$2;; --tree) tree=$2;; esac
  shift
done
{criu} "${{args[@]}}" &
victim=$!
until grep -q '{needle}' "$work/$log" 2>/dev/null; do kill -0 $victim 2>/dev/null || break; done
if [ {operation} = restore ]; then kill -9 $victim && touch {once}
else kill -STOP $victim; {sys.executable} -c '{KILL}' $victim $tree && touch {once}; fi
wait $victim
exit $?
"""
    )
    path.chmod(stat.S_IRWXU)
    return path


def settled(worker: Worker) -> bool:
    """Whether the worker runs, is not stopped and is not traced."""
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return "TracerPid:\t0" in status and state_letter(worker.pid) in "SRD"


def dumped_in_the_end(node: Node, worker: Worker) -> None:
    """See that the worker got its answer and ended with 0, and that the artifact is whole."""
    assert node.done(worker.id)["success"] is True, node.tail()
    assert worker.process.wait(timeout=30) == 0
    assert node.final_name(worker.id) == "whole"
    node.pids_free(worker.id)


@pytest.mark.parametrize("step", DUMP_STEPS)
def test_the_agent_is_killed_in_a_dump(node: Node, step: str) -> None:
    """FC-26: after a restart the dump is finished or made again, and the worker has never been harmed."""
    agent = node.start_agent(wait=False, FAULT=f"kill@checkpoint.{step}")
    until("signal directory", node.signals.is_dir)
    worker = node.start_worker("--children", 1)
    assert agent.wait(timeout=60) == -signal.SIGKILL
    until("worker that runs", lambda: settled(worker) or worker.process.poll() is not None)
    assert worker.process.poll() is None
    assert worker.counts_on()
    between = node.final_name(worker.id)
    assert between == ("whole" if step == "announce" else "absent")
    assert not (node.signals / f"{worker.id}.done").exists()
    node.start_agent()
    dumped_in_the_end(node, worker)
    assert not any((node.store / ".staging").iterdir())
    TABLE.append((f"agent, dump, {step}", f"worker ran on, artifact {between}, then whole", "ok"))


@pytest.mark.parametrize("step", RESTORE_STEPS)
def test_the_agent_is_killed_in_a_restore(node: Node, step: str) -> None:
    """After a restart the worker is there once, answered for, or the request is taken up again."""
    node.start_agent()
    worker = node.start_worker()
    dumped_in_the_end(node, worker)
    node.agents[-1].terminate()
    node.agents[-1].wait(timeout=30)
    dying = node.start_agent(wait=False, FAULT=f"kill@restore.{step}")
    until("agent", node.socket.exists)
    (node.signals / f"{worker.id}.restore").touch()
    assert dying.wait(timeout=60) == -signal.SIGKILL
    between = "alive" if state_letter(worker.pid) else "not there"
    node.start_agent()
    answer = node.restored(worker.id)
    assert answer["success"] is True, (answer, node.tail())
    assert answer["pid"] == worker.pid
    assert worker.counts_on()
    assert not (node.signals / f"{worker.id}.restore").exists()
    assert node.final_name(worker.id) == "whole"
    TABLE.append((f"agent, restore, {step}", f"worker {between}, then alive once", "ok"))


@pytest.mark.parametrize("moment", DUMP_MOMENTS)
def test_criu_is_killed_in_a_dump(node: Node, moment: str) -> None:
    """FC-04, FC-05: the worker runs on and is told; nothing is under the final name; the next dump works."""
    fake = killer(node, "dump", DUMP_MOMENTS[moment])
    node.start_agent(CRIU_BINARY=str(fake))
    worker = node.start_worker("--mib", 256, "--children", 1)
    answer = node.done(worker.id)
    assert answer["success"] is False, answer
    assert (node.base / "killed-once").exists()
    assert worker.process.wait(timeout=30) == 3
    assert node.final_name(worker.id) == "absent"
    assert node.run("restore", worker.id, check=1).stderr
    node.forget(worker.id)
    dumped_in_the_end(node, node.start_worker(id_=worker.id))
    TABLE.append((f"CRIU, dump, {moment}", "worker ran on and was told, nothing published", "ok"))


@pytest.mark.parametrize("moment", RESTORE_MOMENTS)
def test_criu_is_killed_in_a_restore(node: Node, moment: str) -> None:
    """The half-restored tree is ended, the caller is told, and a second request succeeds."""
    fake = killer(node, "restore", RESTORE_MOMENTS[moment])
    node.start_agent(CRIU_BINARY=str(fake))
    worker = node.start_worker("--mib", 256, "--children", 1)
    dumped_in_the_end(node, worker)
    first = node.ask_restore(worker.id)
    assert first["success"] is False, first
    assert (node.base / "killed-once").exists(), first
    until("pid that is free", lambda: not state_letter(worker.pid))
    marker = node.base / f"{worker.id}.restored-marker"
    assert not marker.exists()
    second = node.ask_restore(worker.id)
    assert second["success"] is True, second
    assert worker.counts_on()
    TABLE.append((f"CRIU, restore, {moment}", "half tree ended, told, second request alive", "ok"))


def test_the_shim_is_killed_with_the_agent_in_a_restore(node: Node) -> None:
    """Nobody is left who knows of the restore but the disk; the next agent clears up and starts over."""
    stuck = node.base / "criu-that-hangs"
    criu = " ".join(f"'{word}'" for word in find_criu("").argv)
    once = node.base / "once"
    stuck.write_text(
        "#!/bin/bash\n"
        f'if [ "$1" = restore ] && [ ! -e {once} ]; then touch {once}; exec sleep 600; fi\n'
        f'exec {criu} "$@"\n'
    )
    stuck.chmod(0o700)
    agent = node.start_agent(CRIU_BINARY=str(stuck))
    worker = node.start_worker()
    dumped_in_the_end(node, worker)
    (node.signals / f"{worker.id}.restore").touch()
    until("hanging CRIU", once.exists)
    states = until(
        "shim", lambda: [s for p in (node.state / "restores").glob("*/state.json") if (s := read_json(p))]
    )
    agent.kill()
    agent.wait()
    os.kill(states[0]["shim_pid"], signal.SIGKILL)
    node.start_agent(CRIU_BINARY=str(stuck))
    assert node.restored(worker.id)["success"] is True, node.tail()
    assert worker.counts_on()
    TABLE.append(("agent and shim, restore", "cleared up, worker alive once", "ok"))


def test_the_shim_of_a_worker_that_runs_is_killed(node: Node) -> None:
    """The worker runs on; its end is told without an exit code, and its marker is taken away all the same."""
    node.start_agent()
    worker = node.start_worker()
    dumped_in_the_end(node, worker)
    marker = node.base / f"{worker.id}.restored-marker"
    assert node.ask_restore(worker.id)["success"] is True
    (state,) = (node.state / "restores").glob("*/state.json")
    os.kill((read_json(state) or {})["shim_pid"], signal.SIGKILL)
    assert worker.counts_on()
    assert marker.exists()
    os.kill(worker.pid, signal.SIGKILL)
    until("end", lambda: (read_json(node.signals / f"{worker.id}.restored") or {}).get("ended"))
    until("no marker", lambda: not marker.exists())
    assert not {"exit_code", "exit_signal"} & (read_json(node.signals / f"{worker.id}.restored") or {}).keys()
    TABLE.append(("shim, worker restored", "worker ran on, its end told, marker gone", "ok"))
