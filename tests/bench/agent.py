"""The agent as a process: from ready file to CRIU, at rest, at its start, and under a flood of files."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.measure import Report, percentile, victim
from tests.bench.stamp import StampedCriu
from tests.real.node import Node, read_json, until

P50_SECONDS, P99_SECONDS = 0.050, 0.250
RSS_MIB, CPU_PERCENT = 60.0, 1.0
DUMPS_BEFORE_REST = 10
FLOOD_SECONDS = 300.0


@contextlib.contextmanager
def node(base: Path, name: str, criu: StampedCriu | None = None) -> Iterator[Node]:
    """Run a node of its own directories with the agent's default periods."""
    directory = base / name
    directory.mkdir(mode=0o700)
    made = Node(directory)
    made.config = {"STORE_MIN_FREE_BYTES": "0"}
    if criu is not None:
        made.config["CRIU_BINARY"] = str(criu.path)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory, ignore_errors=True)


def one_dump(made: Node) -> float:
    """Start a worker, write its ready file, wait for the answer; when the file came to be."""
    id_ = made.new_id()
    env = {"DYN_CHECKPOINT_HASH": id_, "DYN_CHECKPOINT_SIGNAL_FILE": str(made.signals / f"{id_}.done")}
    with victim(1, env):
        new = made.signals / f".{id_}.new"
        new.touch()
        written = time.monotonic()
        new.rename(made.signals / f"{id_}.ready")
        answer = until("answer", lambda: read_json(made.signals / f"{id_}.done"))
        assert answer["success"], answer
    made.forget(id_)
    return written


def latency(report: Report, base: Path, criu: StampedCriu, workers: int) -> None:
    """Measure from the ready file to CRIU's start."""
    report.section(f"ready file to criu started, {workers} workers one after another")
    times: list[float] = []
    with node(base, "latency", criu) as made:
        made.start_agent()
        for _ in range(workers):
            written = one_dump(made)
            times.append(criu.last("dump") - written)
    report.add("ready file -> criu started, all", "s", times)
    report.add("ready file -> criu started, p50", "s", [percentile(times, 0.5)], "< 0.05", P50_SECONDS)
    report.add("ready file -> criu started, p99", "s", [percentile(times, 0.99)], "< 0.25", P99_SECONDS)


def rest(report: Report, base: Path, seconds: float) -> None:
    """Measure an agent with nothing to do, fresh and after dumps."""
    report.section(f"at rest, {seconds:g} s")
    with node(base, "rest") as made:
        pid = made.start_agent().pid
        time.sleep(2)
        for when in ("fresh", f"after {DUMPS_BEFORE_REST} dumps"):
            before, began = cpu_seconds(pid), time.monotonic()
            time.sleep(seconds)
            share = 100 * (cpu_seconds(pid) - before) / (time.monotonic() - began)
            report.add(f"agent at rest, {when}: memory", "MiB", [rss_mib(pid)], "< 60", RSS_MIB)
            report.add(f"agent at rest, {when}: CPU of one core", "%", [share], "< 1", CPU_PERCENT)
            if when == "fresh":
                for _ in range(DUMPS_BEFORE_REST):
                    one_dump(made)
                time.sleep(2)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


def start_up(report: Report, base: Path, rounds: int) -> None:
    """Measure how long commands and the agent take to start."""
    report.section("start-up")
    with node(base, "start") as made:
        made.run("list")
        for name, args in (("hibernode --help", ["--help"]), ("hibernode list", ["list"])):
            runs = []
            for _ in range(rounds):
                started = time.monotonic()
                made.run(*args)
                runs.append(time.monotonic() - started)
            report.add(name, "s", runs)
        runs = []
        for _ in range(rounds):
            started = time.monotonic()
            agent = made.start_agent(wait=False)
            until("ready agent", lambda: get(made.port, "/readyz") == 200)
            runs.append(time.monotonic() - started)
            agent.terminate()
            agent.wait()
        report.add("agent, start to ready", "s", runs)


def get(port: int, path: str) -> int:
    """Ask the agent's server; the status, 0 when it does not listen."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionError:
        return 0
    finally:
        connection.close()


def flood(report: Report, base: Path, files: int) -> None:
    """Write many ready files of which nobody knows, and wait until each has its answer."""
    report.section(f"{files} ready files at once, of which no worker knows")
    with node(base, "flood") as made:
        made.start_agent()
        names = [f"{number:012x}" for number in range(files)]
        latencies: list[float] = []
        stop = threading.Event()

        def probe() -> None:
            while not stop.wait(0.02):
                asked = time.monotonic()
                assert get(made.port, "/livez") == 200
                latencies.append(time.monotonic() - asked)

        prober = threading.Thread(target=probe)
        prober.start()
        try:
            started = time.monotonic()
            for name in names:
                (made.signals / f"{name}.ready").touch()
            deadline = started + FLOOD_SECONDS
            while _answered(made.signals) < files:
                assert time.monotonic() < deadline, made.tail()
                time.sleep(0.1)
            seconds = time.monotonic() - started
        finally:
            stop.set()
            prober.join()
        report.add(f"{files} ready files: until all are answered", "s", [seconds])
        report.add(f"{files} ready files: /livez meanwhile", "s", latencies)
        report.add(f"{files} ready files: /livez meanwhile, p99", "s", [percentile(latencies, 0.99)])


def _answered(directory: Path) -> int:
    with os.scandir(directory) as entries:
        return sum(entry.name.endswith(".done") and not entry.name.startswith(".") for entry in entries)
