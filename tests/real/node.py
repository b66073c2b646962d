"""One node for a test: directories of its own, an agent as a real process, workers as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIBERNODE = Path(sys.executable).with_name("hibernode")
WORKER = Path(__file__).with_name("worker.py")
GENEROUS_SECONDS = 30.0
"""These machines are noisy; nothing here waits this long unless it is broken."""


def until(what: str, test: Callable[[], Any], seconds: float = GENEROUS_SECONDS) -> Any:
    """Wait until ``test`` gives something true, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        value = test()
        if value:
            return value
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(0.005)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read an answer if it is there."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return content


FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the kernel's usual range for ports that it picks itself (net.ipv4.ip_local_port_range from 32768)."""


def free_port() -> int:
    """Find a TCP port nobody listens on, and which no connection of others gets while a worker is away."""
    while True:
        port = random.randint(FIRST_PORT, LAST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def state_letter(pid: int) -> str:
    """Tell the state of a process, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@dataclass
class Worker:
    """A running worker and where it says what it is up to."""

    id: str
    process: subprocess.Popen[bytes]
    state: Path

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.process.pid

    def count(self) -> int:
        """How far it has counted."""
        return int((read_json(self.state) or {"count": -1})["count"])

    def counts_on(self) -> bool:
        """Wait until it counts further: it runs, it is not stopped."""
        before = self.count()
        return bool(until("counting worker", lambda: self.count() > before + 1))


class Node:
    """Directories, agents and workers of one test; everything is ended by :meth:`close`."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.signals, self.store, self.state = base / "signals", base / "store", base / "state"
        self.socket = base / "run" / "agent.sock"
        self.port = free_port()
        self.agents: list[subprocess.Popen[bytes]] = []
        self.workers: list[Worker] = []
        self.log = base / "agent.log"
        self.config: dict[str, str] = {"SIGNALS_RESCAN_SECONDS": "1", "STORE_MIN_FREE_BYTES": "0"}

    def env(self, **more: str) -> dict[str, str]:
        """Build the agent's environment; ``more`` are settings without their prefix."""
        settings = {
            "STORE_PATH": str(self.store),
            "SIGNALS_PATH": str(self.signals),
            "STATE_DIR": str(self.state),
            "SERVER_SOCKET": str(self.socket),
            "SERVER_LISTEN": f"127.0.0.1:{self.port}",
            **self.config,
            **more,
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HIBERNODE_")}
        return {**clean, **{f"HIBERNODE_{name}": value for name, value in settings.items()}}

    def run(
        self, *args: str | int, check: int | None = 0, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        result = subprocess.run(
            [HIBERNODE, *map(str, args)],
            env=self.env(**settings),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check is not None:
            assert result.returncode == check, (result.args, result.returncode, result.stdout, result.stderr)
        return result

    def start_agent(self, *, wait: bool = True, **settings: str) -> subprocess.Popen[bytes]:
        """Start an agent; wait until it answers."""
        with self.log.open("ab") as log:
            agent = subprocess.Popen([HIBERNODE, "run"], env=self.env(**settings), stdout=log, stderr=log)
        self.agents.append(agent)
        if wait:
            until("agent", lambda: self.run("status", check=None).returncode == 0 or agent.poll() is not None)
            assert agent.poll() is None, self.log.read_text()
        return agent

    def new_id(self) -> str:
        """Make an id."""
        return secrets.token_hex(8)

    def start_worker(
        self, *args: str | int, id_: str | None = None, under: tuple[str, ...] = (), **env: str
    ) -> Worker:
        """Start a worker; ``under`` is a command line that runs it."""
        id_ = id_ or self.new_id()
        state = self.base / f"{id_}.{secrets.token_hex(2)}.json"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HIBERNODE_")},
            "DYN_CHECKPOINT_HASH": id_,
            "DYN_CHECKPOINT_SIGNAL_FILE": str(self.signals / f"{id_}.done"),
            "DYN_RESTORE_MARKER_FILE": str(self.base / f"{id_}.restored-marker"),
            "DYN_CHECKPOINT_READY_FILE": str(self.base / f"{id_}.own-ready"),
            **env,
        }
        process = subprocess.Popen(
            [*under, sys.executable, WORKER, "--state", state, *map(str, args)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        worker = Worker(id_, process, state)
        self.workers.append(worker)
        return worker

    def done(self, id_: str) -> dict[str, Any]:
        """Wait for the answer to a ready file."""
        answer: dict[str, Any] = until(
            f"signal file (agent log: {self.tail()})", lambda: read_json(self.signals / f"{id_}.done")
        )
        return answer

    def restored(self, id_: str) -> dict[str, Any]:
        """Wait for the answer to a restore request."""
        answer: dict[str, Any] = until("restored file", lambda: read_json(self.signals / f"{id_}.restored"))
        return answer

    def pids_free(self, id_: str) -> None:
        """Wait until no task of a dumped tree is left, zombies included."""
        tree = (read_json(self.store / id_ / "manifest.json") or {})["tree"]
        until("free pids", lambda: not any(state_letter(task["pid"]) for task in tree))

    def forget(self, id_: str) -> None:
        """Remove a request and its answer, as a new worker does before it starts."""
        for suffix in (".ready", ".done"):
            (self.signals / f"{id_}{suffix}").unlink(missing_ok=True)

    def restored_phase(self, id_: str, phase: str = "running") -> bool:
        """Whether a restore of ``id_`` has come to ``phase``."""
        states = (read_json(path) for path in (self.state / "restores").glob(f"{id_}.*/state.json"))
        return any(state is not None and state["phase"] == phase for state in states)

    def ask_restore(self, id_: str) -> dict[str, Any]:
        """Ask for a restore through the signal directory and wait for the answer."""
        (self.signals / f"{id_}.restored").unlink(missing_ok=True)
        (self.signals / f"{id_}.restore").touch()
        return self.restored(id_)

    def tail(self) -> str:
        """Show the end of the agents' log."""
        return self.log.read_text()[-1500:] if self.log.exists() else "none"

    def final_name(self, id_: str) -> str:
        """Say what stands under the final name: "absent", "whole", or what is wrong."""
        if not (self.store / id_).exists():
            return "absent"
        result = self.run("verify", id_, check=None)
        return "whole" if result.returncode == 0 else f"bad: {result.stdout}{result.stderr}"

    def close(self) -> None:
        """End all that was started."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(timeout=20)
                agent.kill()
            agent.wait()
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
        marks = {str(self.base).encode()}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    text = (entry / "cmdline").read_bytes()
                    if any(mark in text for mark in marks):
                        os.kill(int(entry.name), signal.SIGKILL)
