"""The compatibility gate: can this artifact run here, asked before anything is touched.

Pure, but for :func:`host_facts` which asks the machine. A fact that cannot be compared is *skip*, never a
mismatch; ``strict`` turns skips and warnings into failures.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.artifact.manifest import Manifest
from hibernode.host import procfs
from hibernode.workload import Finding, Verdict

PIDS_CHECK: Final = "restore.pids"

SHOWN: Final = 8
"""How many items of a long list a row names."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file as it is now: size in bytes, mtime in nanoseconds."""

    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What of this machine the gate compares.

    ``tasks`` maps each number that cannot be given out as a task id to who has it: a task of that id, or a
    process whose session or process group has it.
    """

    machine: str
    kernel: str
    cpu_features: frozenset[str]
    criu_version: str
    tasks: Mapping[int, str]
    files: Mapping[str, FileFacts | None]
    mem_available_bytes: int


def cpu_features() -> list[str]:
    """List the CPU's feature flags as /proc/cpuinfo names them (``flags``, or ``Features`` on arm64)."""
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(value.split())
    return []


def host_facts(manifest: Manifest, criu_version: str) -> HostFacts:
    """Ask this machine what the gate needs to know about ``manifest``."""
    wanted = {tid for task in manifest.tree for tid in (task.pid, *task.threads)}
    tasks = _taken(wanted)
    uname = os.uname()
    return HostFacts(
        machine=uname.machine,
        kernel=uname.release,
        cpu_features=frozenset(cpu_features()),
        criu_version=criu_version,
        tasks=tasks,
        files={entry.path: _file_facts(entry.path) for entry in manifest.mapped_files},
        mem_available_bytes=procfs.mem_available_bytes(),
    )


def _taken(wanted: set[int]) -> dict[int, str]:
    """Find who has the ids: also a session or a group keeps its number from being given out (FC-08)."""
    taken: dict[int, str] = {}
    for stat in procfs.all_stats().values():
        for number, what in ((stat.session, "session"), (stat.pgrp, "group")):
            if number in wanted and number != stat.pid:
                taken[number] = f"{what} of pid {stat.pid}, {stat.comm}, state {stat.state}"
    for tid in wanted:
        comm = _comm(tid)
        if comm is not None:
            taken[tid] = comm
    return taken


def _comm(tid: int) -> str | None:
    """Name the task ``tid``: /proc/TID answers for threads too, though it does not list them."""
    try:
        return Path(f"/proc/{tid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _file_facts(path: str) -> FileFacts | None:
    try:
        stat = os.stat(path)  # noqa: PTH116 - one call a file, there may be thousands
    except (OSError, ValueError):
        return None
    return FileFacts(stat.st_size, stat.st_mtime_ns)


def compatibility(manifest: Manifest, host: HostFacts) -> list[Finding]:
    """Compare the artifact with this machine; a row a check."""
    return [
        _machine(manifest, host),
        _kernel(manifest, host),
        _cpu(manifest, host),
        _criu(manifest, host),
        *_files(manifest, host),
        _pids(manifest, host),
        _memory(manifest, host),
    ]


def strictly(rows: Iterable[Finding]) -> list[Finding]:
    """Turn warnings and what could not be compared into failures."""
    return [
        dataclasses.replace(row, verdict=Verdict.FAIL, reason=row.reason or "RestoreIncompatible")
        if row.verdict in (Verdict.WARN, Verdict.SKIP)
        else row
        for row in rows
    ]


def row(check: str, verdict: Verdict, expected: str, found: str, remedy: str = "") -> Finding:
    """Make a row of the gate; one that fails has its reason, one that is ok no remedy."""
    reason = "RestoreIncompatible" if verdict is Verdict.FAIL else ""
    return Finding(check, verdict, expected, found, "" if verdict is Verdict.OK else remedy, reason)


def _machine(manifest: Manifest, host: HostFacts) -> Finding:
    same = manifest.machine == host.machine
    return row(
        "restore.architecture",
        Verdict.OK if same else Verdict.FAIL,
        manifest.machine,
        host.machine,
        "restore on a node of the architecture that the checkpoint was made on",
    )


def _series(release: str) -> tuple[str, ...]:
    return tuple(release.split("-", 1)[0].split(".")[:2])


def _kernel(manifest: Manifest, host: HostFacts) -> Finding:
    if manifest.kernel == host.kernel:
        return row("restore.kernel", Verdict.OK, manifest.kernel, host.kernel)
    verdict = Verdict.OK if _series(manifest.kernel) == _series(host.kernel) else Verdict.WARN
    return row(
        "restore.kernel",
        verdict,
        manifest.kernel,
        host.kernel,
        "CRIU restores across kernels as a rule, but only the same series has been tried",
    )


def _cpu(manifest: Manifest, host: HostFacts) -> Finding:
    if not manifest.cpu_features or not host.cpu_features:
        return row("restore.cpu", Verdict.SKIP, "known features", "features not readable", "compare by hand")
    missing = sorted(set(manifest.cpu_features) - host.cpu_features)
    if not missing:
        count = len(manifest.cpu_features)
        return row("restore.cpu", Verdict.OK, f"{count} features", "all present")
    return row(
        "restore.cpu",
        Verdict.FAIL,
        f"the source's features: {' '.join(missing[:SHOWN])}{' ...' if len(missing) > SHOWN else ''}",
        "missing on this CPU",
        "code that was compiled or chosen for those features would crash; restore on a like node",
    )


def _criu(manifest: Manifest, host: HostFacts) -> Finding:
    dumped, here = (_version(text) for text in (manifest.criu.version, host.criu_version))
    if dumped is None or here is None:
        return row("restore.criu", Verdict.SKIP, manifest.criu.version, host.criu_version, "compare by hand")
    return row(
        "restore.criu",
        Verdict.OK if here >= dumped else Verdict.FAIL,
        f">= {manifest.criu.version}",
        host.criu_version,
        "images of a newer CRIU are not read by an older one: update CRIU on this node",
    )


def _version(text: str) -> tuple[int, ...] | None:
    """Read a version for comparison: 4.2 and 4.2.0 are the same one."""
    try:
        parts = [int(part) for part in text.split(".")]
    except ValueError:
        return None
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _files(manifest: Manifest, host: HostFacts) -> list[Finding]:
    """Compare the files that the image maps or holds open; CRIU checks their sizes, and so do we."""
    missing: list[str] = []
    resized: list[str] = []
    touched: list[str] = []
    for entry in manifest.mapped_files:
        now = host.files.get(entry.path)
        if now is None:
            missing.append(entry.path)
        elif entry.size_checked and now.size != entry.size:
            resized.append(f"{entry.path} ({entry.size} then, {now.size} now)")
        elif entry.size_checked and now.mtime_ns != entry.mtime_ns:
            touched.append(entry.path)
    rows = [
        row(
            "restore.files",
            Verdict.FAIL if missing or resized else Verdict.OK,
            f"{len(manifest.mapped_files)} files as they were",
            "; ".join(
                [f"missing: {_some(missing)}"] * bool(missing)
                + [f"size differs: {_some(resized)}"] * bool(resized)
            )
            or "all there",
            "put back the files that the worker has mapped or open: the same packages, the same data",
        )
    ]
    if touched:
        rows.append(
            row(
                "restore.files_mtime",
                Verdict.WARN,
                "files unchanged since the dump",
                f"changed, same size: {_some(touched)}",
                "another build of a library crashes the worker: make sure that it is the same",
            )
        )
    return rows


def _some(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def _pids(manifest: Manifest, host: HostFacts) -> Finding:
    wanted = sorted({tid for task in manifest.tree for tid in (task.pid, *task.threads)})
    clashes = [f"{tid} ({host.tasks[tid]})" for tid in wanted if tid in host.tasks]
    if not clashes:
        return row(PIDS_CHECK, Verdict.OK, f"{len(wanted)} pids free", "free")
    finding = row(
        PIDS_CHECK,
        Verdict.FAIL,
        f"{len(wanted)} pids free",
        f"in use: {_some(clashes)}",
        "CRIU brings every task back under its own pid: wait for the worker to end (and to be reaped), or "
        "stop what has taken the pid",
    )
    return dataclasses.replace(finding, reason="PidInUse")


def _memory(manifest: Manifest, host: HostFacts) -> Finding:
    need = manifest.total_bytes
    return row(
        "restore.memory",
        Verdict.OK if host.mem_available_bytes >= need else Verdict.WARN,
        f"{need} bytes available",
        f"{host.mem_available_bytes} bytes",
        "the restored worker needs about the image's size in memory; the OOM killer may end it",
    )
