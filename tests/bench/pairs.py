"""Our dump and restore beside bare criu: the same program, the same options, turn and turn about."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hibernode.answers import Outcome, Request, RestoreRequest, Trigger
from hibernode.artifact.store import Store
from hibernode.checkpoint import Checkpointer
from hibernode.criu import options
from hibernode.criu.runner import clean_env, find_criu
from hibernode.discovery.locate import Contract
from hibernode.dump_work import dump_options
from hibernode.host.procfs import Process
from hibernode.preflight import preflight
from hibernode.restore import Restorer
from hibernode.settings import Settings
from hibernode.state import StateDir
from hibernode.workload import CheckpointId
from tests.bench.measure import Report, drop_cache, end, settle, victim
from tests.bench.stamp import StampedCriu

RATIO = 1.05
FASTER = 1.0
OWN_WORK_SECONDS = 0.1


@dataclass(frozen=True)
class Restored:
    """One restore of ours: ``own`` is from the request to CRIU's start, ``criu`` from there to the answer."""

    whole: float
    own: float
    phases: dict[str, float]


class Pair:
    """One victim's size: where bare criu's images are and where ours."""

    def __init__(self, base: Path, criu: StampedCriu, mib: int) -> None:
        self.mib, self.base, self.criu = mib, base, criu
        self.settings = Settings.model_validate(
            {
                "store": {"path": base / "store", "min_free_bytes": 0},
                "state_dir": base / "state",
                "criu": {"binary": str(criu.path)},
            }
        )
        self.store = Store(base / "store").open()
        self.state = StateDir.open(base / "state")
        self.checkpointer = Checkpointer(self.settings, self.store, self.state, None)
        self.restorer = Restorer(self.settings, self.store, self.state, None)
        self.found = find_criu(str(criu.path))
        self.bare_dir = base / "bare"
        self.id = CheckpointId("be9cbe9cbe9c")

    def close(self) -> None:
        """Give the disk back."""
        self.store.close()
        self.state.close()
        shutil.rmtree(self.base)

    # dump ---------------------------------------------------------------------------------------------

    def bare_dump(self, process: Process) -> float:
        """Dump by hand, as one who knows the options would; seconds."""
        shutil.rmtree(self.bare_dir, ignore_errors=True)
        self.bare_dir.mkdir(mode=0o700)
        checked = preflight(process, self.settings, self.found, self.store.path)
        args = options.dump_args(process.pid, self.bare_dir, dump_options(self.settings, checked))
        settle()
        return self._bare([*args, "--work-dir", str(self.bare_dir)])

    def our_dump(self, process: Process) -> Outcome:
        """Dump as the agent does."""
        shutil.rmtree(self.store.path / self.id, ignore_errors=True)
        request = Request(self.id, process, Contract(), Trigger.COMMAND, announce=False)
        settle()
        outcome = asyncio.run(self.checkpointer.run(request))
        if not outcome.success:
            raise SystemExit(f"our dump failed: {outcome.message}")
        return outcome

    def _bare(self, args: list[str]) -> float:
        started = time.monotonic()
        result = subprocess.run(
            [*self.found.argv, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=clean_env(),
            check=False,
            umask=0o077,
            start_new_session=True,
        )
        seconds = time.monotonic() - started
        if result.returncode:
            log = self.bare_dir / f"{args[0]}.log"
            raise SystemExit(f"bare criu {args[0]} failed:\n{log.read_text()[-2000:]}")
        return seconds

    # restore ------------------------------------------------------------------------------------------

    def bare_restore(self, *, cold: bool) -> float:
        """Restore by hand and end what came back; seconds."""
        work = self.base / "bare-restore"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        manifest = self.store.get(self.id).manifest
        criu = self.settings.criu
        opts = options.RestoreOptions(
            shell_job=manifest.shell_job,
            tcp="close" if manifest.tcp == "close" else "established",
            file_locks=criu.file_locks,
            link_remap=criu.link_remap,
            ghost_limit_bytes=criu.ghost_limit_bytes,
            log_level=criu.log_level,
        )
        args = options.restore_args(self.bare_dir, work / "pid", opts, work_dir=work)
        self._prepare(self.bare_dir, cold=cold)
        seconds = self._bare(args)
        end(int((work / "pid").read_text()))
        return seconds

    def our_restore(self, *, cold: bool) -> Restored:
        """Restore as the agent does and end what came back."""
        self._prepare(self.store.path / self.id, cold=cold)
        started = time.monotonic()
        outcome = asyncio.run(self.restorer.run(RestoreRequest(self.id, announce=False)))
        whole = time.monotonic() - started
        if not outcome.success:
            raise SystemExit(f"our restore failed: {outcome.message}")
        end(outcome.pid)
        return Restored(whole, self.criu.last("restore") - started, outcome.phases)

    def _prepare(self, images: Path, *, cold: bool) -> None:
        settle()
        if cold:
            drop_cache(images)
        else:
            for path in images.rglob("*.img"):
                with path.open("rb", buffering=0) as file:
                    while file.read(1 << 20):
                        pass


def turns(
    rounds: int, bare: Callable[[], float], ours: Callable[[], object]
) -> tuple[list[float], list[object]]:
    """Run the two in turn, the one first in even rounds and the other in odd ones."""
    theirs: list[float] = []
    mine: list[object] = []
    for number in range(rounds):
        if number % 2 == 0:
            theirs.append(bare())
            mine.append(ours())
        else:
            mine.append(ours())
            theirs.append(bare())
    return theirs, mine


def size_name(mib: int) -> str:
    """Name a size."""
    return f"{mib >> 10} GiB" if mib >= 1 << 10 else f"{mib} MiB"


def measure(report: Report, base: Path, criu: StampedCriu, mib: int, rounds: int) -> None:
    """Measure one size: dumps, warm restores, cold restores, verify."""
    size = size_name(mib)
    directory = base / f"pair{mib}"
    directory.mkdir(mode=0o700)
    pair = Pair(directory, criu, mib)
    with contextlib.closing(pair):
        with victim(mib) as process, Process.open(process.pid) as held:
            # Not counted: the host gives a virtual machine its memory at the first touch.
            pair.bare_dump(held)
            bare, dumps = turns(rounds, lambda: pair.bare_dump(held), lambda: pair.our_dump(held))
        _report_dumps(report, size, bare, [dump for dump in dumps if isinstance(dump, Outcome)])
        for cold in (False, True):
            bare, restores = turns(
                rounds, partial(pair.bare_restore, cold=cold), partial(pair.our_restore, cold=cold)
            )
            ours = [restore for restore in restores if isinstance(restore, Restored)]
            _report_restores(report, size, bare, ours, cold=cold)
        _verify(report, pair, size, rounds)


def _report_dumps(report: Report, size: str, bare: list[float], ours: list[Outcome]) -> None:
    # Digest and fsync begin together, so that the longer one is what the two cost.
    durable = [max(dump.phases["digest"], dump.phases["fsync"]) for dump in ours]
    rest = [dump.seconds - seconds for dump, seconds in zip(ours, durable, strict=True)]
    report.section(f"dump, {size}")
    report.add(f"dump {size}: bare criu", "s", bare)
    report.add(f"dump {size}: ours, criu alone", "s", [dump.phases["criu"] for dump in ours])
    report.add(f"dump {size}: ours, without digest and fsync", "s", rest)
    report.ratio(f"dump {size}: ours without digest and fsync / bare", rest, bare, "<= 1.05", RATIO)
    report.add(f"dump {size}: digest", "s", [dump.phases["digest"] for dump in ours])
    report.add(f"dump {size}: fsync, beside the digest", "s", [dump.phases["fsync"] for dump in ours])
    report.add(f"dump {size}: ours, whole", "s", [dump.seconds for dump in ours])


def _report_restores(
    report: Report, size: str, bare: list[float], ours: list[Restored], *, cold: bool
) -> None:
    name = f"restore {size} {'cold' if cold else 'warm'}"
    whole = [restore.whole for restore in ours]
    report.section(name)
    report.add(f"{name}: bare criu", "s", bare)
    report.add(f"{name}: ours, whole", "s", whole)
    aim, limit = ("< 1", FASTER) if cold else ("<= 1.05", RATIO)
    report.ratio(f"{name}: ours / bare", whole, bare, aim, limit)
    own = [restore.own for restore in ours]
    report.add(f"{name}: own work until criu starts", "s", own, "< 0.1", OWN_WORK_SECONDS)
    for phase in ("verify", "compatibility", "prepare"):
        report.add(f"{name}:   of it {phase}", "s", [restore.phases[phase] for restore in ours])


def _verify(report: Report, pair: Pair, size: str, rounds: int) -> None:
    artifact = pair.store.get(pair.id)
    rates: list[float] = []
    for _ in range(rounds):
        started = time.monotonic()
        verdicts = pair.store.verify(artifact, digests=True)
        rates.append(artifact.manifest.total_bytes / (time.monotonic() - started) / 1e9)
        assert all(verdict.ok for verdict in verdicts)
    report.section(f"verify, {size}")
    report.add(f"verify {size}: digests, warm", "GB/s", rates)
