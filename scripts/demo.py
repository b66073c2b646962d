"""The main job, end to end, on this machine: warm up, freeze, answer, thaw, answer again.

Starts the agent on directories of its own below a temporary one, and a worker under the seccomp profile.
Prints what each part took; the last line starts with ``demo ok`` or ``demo failed``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
HIBERNODE = Path(sys.executable).with_name("hibernode")
QUERY = 20260


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def until(what: str, seconds: float, test: Callable[[], object]) -> None:
    """Wait until ``test`` is true."""
    deadline = time.monotonic() + seconds
    while not test():
        if time.monotonic() > deadline:
            raise SystemExit(f"demo failed: no {what} within {seconds:g} s")
        time.sleep(0.002)


def free_port() -> int:
    """Find a TCP port that nobody listens on, below those that the kernel gives to connections by itself."""
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def ask(port: int) -> dict[str, object] | None:
    """Ask the worker; None when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/?q={QUERY}", timeout=10) as reply:
            answer: dict[str, object] = json.load(reply)
            return answer
    except OSError:
        return None


def read(path: Path) -> dict[str, object]:
    """Read an answer of the agent's; it is whole whenever it is there."""
    content: dict[str, object] = json.loads(path.read_text())
    return content


def gone(pid: int) -> bool:
    """Whether the pid is free again."""
    return not Path(f"/proc/{pid}").exists()


def demo(base: Path, mib: int, keep: contextlib.ExitStack) -> str:
    """Run the story; returns the last line."""
    id_ = secrets.token_hex(8)
    signals, store = base / "signals", base / "checkpoints"
    agent_env = {
        **os.environ,
        "HIBERNODE_STORE_PATH": str(store),
        "HIBERNODE_SIGNALS_PATH": str(signals),
        "HIBERNODE_STATE_DIR": str(base / "state"),
        "HIBERNODE_SERVER_SOCKET": str(base / "run" / "agent.sock"),
        "HIBERNODE_SERVER_LISTEN": f"127.0.0.1:{free_port()}",
    }
    agent_log = keep.enter_context((base / "agent.log").open("w"))
    agent = subprocess.Popen([HIBERNODE, "run"], env=agent_env, stdout=agent_log, stderr=agent_log)
    keep.callback(stop, agent)
    until("agent", 20, lambda: signals.is_dir() and (base / "run" / "agent.sock").exists())

    port = free_port()
    worker_env = {
        **os.environ,
        "DYN_CHECKPOINT_HASH": id_,
        "DYN_CHECKPOINT_SIGNAL_FILE": str(signals / f"{id_}.done"),
        "DYN_RESTORE_MARKER_FILE": str(base / "restored"),
    }
    command = [
        HIBERNODE, "seccomp", "exec", "--",
        sys.executable, HERE / "demo_worker.py", "--mib", str(mib), "--port", str(port),
    ]  # fmt: skip
    worker_log = keep.enter_context((base / "worker.log").open("w"))
    say(f"cold start: a worker with {mib} MiB to compute, under the seccomp profile, id {id_}")
    start = time.monotonic()
    worker = subprocess.Popen(
        command,
        env=worker_env,
        stdin=subprocess.DEVNULL,
        stdout=worker_log,
        stderr=worker_log,
        start_new_session=True,
    )
    keep.callback(stop, worker)
    until("ready file", 120, lambda: (signals / f"{id_}.ready").exists() or worker.poll() is not None)
    cold = time.monotonic() - start
    first = ask(port)
    if first is None:
        raise SystemExit("demo failed: the worker does not answer")
    say(f"  warm after {cold:.2f} s; pid {worker.pid} answers {str(first['answer'])[:16]}...")

    until("signal file", 120, (signals / f"{id_}.done").exists)
    done = read(signals / f"{id_}.done")
    if done["success"] is not True:
        raise SystemExit(f"demo failed: {done.get('error')}")
    code = worker.wait(timeout=30)
    manifest = read(store / id_ / "manifest.json")
    phases = manifest["phases"]
    assert isinstance(phases, dict)
    dump = sum(value for name, value in phases.items() if name in ("preflight", "dump", "seal"))
    size = manifest["total_bytes"]
    assert isinstance(size, int)
    say(
        f"dump: {size / 2**20:.0f} MiB in {dump:.2f} s "
        f"(criu {phases['criu']:.2f} s, digests and fsync {phases['seal']:.2f} s)"
    )
    say(f"  the signal file says success: true; the worker exits {code}")
    if code != 0 or ask(port) is not None:
        raise SystemExit(f"demo failed: the worker exited {code}")

    until("free pid", 10, lambda: gone(worker.pid))
    start = time.monotonic()
    (signals / f"{id_}.restore").touch()
    until("restored worker", 120, (signals / f"{id_}.restored").exists)
    restored = read(signals / f"{id_}.restored")
    if restored["success"] is not True:
        raise SystemExit(f"demo failed: {restored.get('error')}")
    second = ask(port)
    thaw = time.monotonic() - start
    pid = restored["pid"]
    assert isinstance(pid, int)
    keep.callback(end_restored, pid)
    if second is None or second["answer"] != first["answer"]:
        raise SystemExit(f"demo failed: the restored worker answers {second}")
    say(f"restore: pid {second['pid']} answers the same after {thaw:.2f} s")
    return (
        f"demo ok: cold start {cold:.2f} s, dump {dump:.2f} s, restore {thaw:.2f} s, "
        f"{cold / thaw:.1f} times faster than a cold start"
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def end_restored(pid: int) -> None:
    """End the restored worker; its shim ends with it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)


def main() -> int:
    """Run the demo in a temporary directory; with --keep the directory stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the worker's data")
    parser.add_argument("--keep", action="store_true", help="leave the directory for a look")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="hibernode-demo-"))
    try:
        with contextlib.ExitStack() as keep:
            last = demo(base, args.mib, keep)
    except SystemExit as failure:
        log = base / "agent.log"
        say(log.read_text()[-4000:] if log.exists() else "")
        say(str(failure))
        return 1
    finally:
        if args.keep:
            say(f"kept: {base}")
        else:
            shutil.rmtree(base, ignore_errors=True)
    say(last)
    return 0


if __name__ == "__main__":
    sys.exit(main())
