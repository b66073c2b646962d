"""From a request to the process it is about, without a cluster.

A file in the signal directory is a hint. What it may lead to is decided here: the process must name
this id and this signal directory in its own environment, or be named by a file that its own user wrote,
and it must be older than the file. Two claimants are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from hibernode.apart import each, stuck, within
from hibernode.discovery.container_look import owner_of
from hibernode.discovery.signals import ReadyRequest
from hibernode.errors import RefusedError, StuckError, UsageError
from hibernode.host import inroot, procfs
from hibernode.host.procfs import Process, Stat
from hibernode.shim_placeholder import recognise
from hibernode.workload import CheckpointId, Era, ProcessKey

CONTAINER_DEPTH: Final = 2
"""A process in a container has a pid in two namespaces, the agent's and the container's."""

START_SLACK_SECONDS: Final = 0.5
"""Start times have a resolution of one clock tick, and a clock that is stepped moves them against files."""


CLAIM: Final = "a look at its environment and its signal directory"
READY: Final = "a look at its ready file"
"""What can hang, and is then named so."""


@dataclass(frozen=True, slots=True)
class Contract:
    """The names a worker was started with; empty when its environment does not hold them."""

    era: str = ""
    signal_file: str = ""
    ready_file: str = ""
    restore_marker: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A process whose environment names a checkpoint id."""

    key: ProcessKey
    hash: str
    contract: Contract


def contract_of(environ: Mapping[str, str], era: Era) -> Contract:
    """Read the contract's names out of a process's environment."""
    if era.env_hash not in environ and era.env_signal_file not in environ:
        return Contract()
    return Contract(
        era=era.name,
        signal_file=environ.get(era.env_signal_file, ""),
        ready_file=environ.get(era.env_ready_file, "")
        or environ.get(era.later_env_ready_file, "")
        or _in_control_dir(environ, era)
        or era.ready_file,
        restore_marker=environ.get(era.env_restore_marker, "") or era.restore_marker,
    )


def _in_control_dir(environ: Mapping[str, str], era: Era) -> str:
    directory = environ.get(era.later_env_control_dir, "")
    return f"{directory.rstrip('/')}/{era.later_ready_name}" if directory else ""


class ClaimIndex:
    """Which processes name which id.

    Every environment is read anew at each refresh: an exec gives a process another one under the same
    pid and start time, so that nothing which tells two looks apart is cheaper than the look itself.
    """

    def __init__(self, era: Era, signal_dir: Path) -> None:
        self._era = era
        self._signal_dir = signal_dir
        self.label_of: Callable[[int], str | None] = lambda _pid: None
        """Gives the id that a process's pod has been labelled with in a cluster: the label wins."""
        self._found: dict[int, Claim] = {}
        self._waiting: dict[int, Claim] = {}
        self._stats: dict[int, Stat] = {}

    def refresh(self) -> None:
        """Look at every process. A claim whose look hangs stays as it was.

        :raises StuckError: as :func:`hibernode.apart.each`.
        """
        self._stats = procfs.all_stats()
        keys = [stat.key for stat in self._stats.values() if not stat.is_kernel_thread]
        before = {claim.key: claim for claim in (*self._found.values(), *self._waiting.values())}
        looked = {**before, **each(keys, self._look, _owner, CLAIM)}
        found = self._labelled({key.pid: claim for key in keys if (claim := looked.get(key)) is not None})
        # A placeholder has the worker's environment, and waits for it.
        self._waiting = {pid: claim for pid, claim in found.items() if recognise(pid)}
        self._found = {pid: claim for pid, claim in found.items() if pid not in self._waiting}

    def _labelled(self, found: dict[int, Claim]) -> dict[int, Claim]:
        """Let labels win: over the environment of their own pod, and over others who claim the same id."""
        labels = {pid: label for pid in found if (label := self.label_of(pid)) is not None}
        taken = set(labels.values())
        return {
            pid: replace(claim, hash=labels[pid]) if pid in labels else claim
            for pid, claim in found.items()
            if pid in labels or claim.hash not in taken
        }

    def _look(self, key: ProcessKey) -> Claim | None:
        try:
            environ = procfs.environ(key.pid)
        except (OSError, ValueError):
            return None
        named = environ.get(self._era.env_hash, "")
        contract = contract_of(environ, self._era)
        if not named or not contract.signal_file or not self._ours(key.pid, contract.signal_file, named):
            return None
        return Claim(key, named, contract)

    def _ours(self, pid: int, signal_file: str, named: str) -> bool:
        """Whether ``signal_file``, as the process sees it, is ``<named>.done`` in our signal directory.

        The directories are compared by device and inode, since a worker in a container sees the same
        hostPath under another name.
        """
        path = PurePosixPath(signal_file)
        if path.name != f"{named}{self._era.done_suffix}" or not path.is_absolute():
            return False
        try:
            ours = self._signal_dir.stat()
            theirs = stat_in_root(pid, path.parent)
        except OSError:
            return False
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def claims(self) -> list[Claim]:
        """List the topmost claimants of every id: a child inherits its parent's environment."""
        return [claim for claim in self._found.values() if not self._below(claim, self._found)]

    def placeholders(self) -> list[Claim]:
        """List the placeholders that name an id, and no worker that was restored into them."""
        return list(self._waiting.values())

    def _below(self, claim: Claim, found: Mapping[int, Claim]) -> bool:
        pid = self._stats[claim.key.pid].ppid
        for _ in range(len(self._stats)):
            if pid not in self._stats:
                return False
            if pid in found and found[pid].hash == claim.hash:
                return True
            pid = self._stats[pid].ppid
        return False


def _owner(key: ProcessKey) -> str:
    return owner_of(key.pid)


def stat_in_root(pid: int, path: PurePosixPath) -> os.stat_result:
    """Stat ``path`` as process ``pid`` sees it, following its links but never out of its root."""
    with inroot.opened(pid, str(path), os.O_PATH) as fd:
        return os.fstat(fd)


@dataclass(frozen=True, slots=True)
class Located:
    """The process that a request is about, held by its pidfd, and the names it was started with."""

    process: Process
    contract: Contract


def locate(request: ReadyRequest, index: ClaimIndex, era: Era) -> Located:
    """Find and hold the process that ``request`` is about.

    ``index`` must have been refreshed since the request's file appeared.

    :raises RefusedError: nobody, somebody else's process, a younger process, or two claimants.
    """
    if request.pid is not None:
        return _by_pid(request, request.pid, era)
    claims = [claim for claim in index.claims() if claim.hash == request.id]
    if not claims:
        hang = ", ".join(entry.owner for entry in stuck() if entry.what == CLAIM)
        raise RefusedError(
            f"no process on this node names {era.env_hash}={request.id} and this signal directory"
            + (f"; a look at these hangs: {hang}" if hang else ""),
            remedy=f"start the worker with {era.env_hash} and {era.env_signal_file}, or write its pid into "
            f'{request.id}{era.ready_suffix}: {{"pid": 1234}}',
            reason="NoClaimant",
        )
    if len(claims) > 1:
        pids = sorted(claim.key.pid for claim in claims)
        named = ", ".join(map(_named, pids))
        raise RefusedError(
            f"{len(claims)} separate processes claim {request.id}: pids {named}",
            remedy="set the variables for the worker alone (env, not export), or name its pid in the file",
            reason="TwoClaimants",
            pids=", ".join(map(str, pids)),
        )
    process = _hold(claims[0].key.pid, request.id)
    if process.key != claims[0].key:
        process.close()
        raise _gone(claims[0].key.pid, request.id)
    return Located(_fitting(process, request), claims[0].contract)


def _named(pid: int) -> str:
    try:
        return f"{pid} ({procfs.read_stat(pid).comm})"
    except OSError:
        return str(pid)


def _by_pid(request: ReadyRequest, pid: int, era: Era) -> Located:
    process = _hold(pid, request.id)
    try:
        # The pages that it is read from can be mapped from a file system that hangs.
        environ = within(lambda: procfs.environ(pid), owner_of(pid), CLAIM)
    except OSError:
        process.close()
        raise _gone(pid, request.id) from None
    except StuckError:
        process.close()
        raise
    named = environ.get(era.env_hash, "")
    if named and named != request.id:
        process.close()
        raise RefusedError(
            f"pid {pid} belongs to {era.env_hash}={named[:64]!r}, not to {request.id}",
            remedy="write the ready file of the id that the worker was started with",
            reason="WrongId",
            pid=pid,
        )
    return Located(_fitting(process, request), contract_of(environ, era))


def _hold(pid: int, id_: CheckpointId) -> Process:
    try:
        return Process.open(pid)
    except ProcessLookupError:
        raise _gone(pid, id_) from None


def _gone(pid: int, id_: CheckpointId) -> RefusedError:
    return RefusedError(
        f"pid {pid} of {id_} is not running",
        remedy="the worker must stay alive until it reads the signal file",
        reason="WorkerGone",
        pid=pid,
    )


def _fitting(process: Process, request: ReadyRequest) -> Process:
    """Let ``process`` through if its owner and its age fit the request's file; else close it."""
    try:
        status = procfs.read_status(process.pid)
        started = procfs.start_time(process.key.start_ticks)
    except ProcessLookupError:
        process.close()
        raise _gone(process.pid, request.id) from None
    refusal: RefusedError | None = None
    if request.uid not in (status.uids[0], status.uids[1]):
        refusal = RefusedError(
            f"{request.id}: the ready file belongs to uid {request.uid}, pid {process.pid} to uid "
            f"{status.uids[0]}",
            remedy="the worker itself must write its ready file",
            reason="WrongOwner",
            pid=process.pid,
        )
    elif started > request.ctime + START_SLACK_SECONDS:
        refusal = RefusedError(
            f"{request.id}: pid {process.pid} started {started - request.ctime:.1f} s after the ready "
            "file was written, so the file is another worker's",
            remedy="remove the stale ready file; the worker writes its own when it is warm",
            reason="StaleReadyFile",
            pid=process.pid,
        )
    if refusal is not None:
        process.close()
        raise refusal
    return process


def own_ready_files(claims: Iterable[Claim]) -> list[ReadyRequest]:
    """Find the claimants whose own ready file (inside their root) says that they may be frozen now.

    Those whose file hangs are not among them.

    :raises StuckError: as :func:`hibernode.apart.each`.
    """
    looked = each(claims, _own_ready_file, lambda claim: owner_of(claim.key.pid), READY)
    return [request for request in looked.values() if request is not None]


def _own_ready_file(claim: Claim) -> ReadyRequest | None:
    try:
        id_ = CheckpointId(claim.hash)
        stat = stat_in_root(claim.key.pid, PurePosixPath(claim.contract.ready_file))
        status = procfs.read_status(claim.key.pid)
        started = procfs.start_time(claim.key.start_ticks)
    except (OSError, ValueError, UsageError):
        return None
    if len(status.ns_pids) > CONTAINER_DEPTH:
        return None  # it was restored into a container, its ready file with it
    if stat.st_uid not in status.uids or stat.st_ctime + START_SLACK_SECONDS < started or stat.st_nlink != 1:
        return None
    return ReadyRequest(
        id=id_,
        pid=claim.key.pid,
        uid=stat.st_uid,
        gid=stat.st_gid,
        ctime=stat.st_ctime,
        identity=(stat.st_dev, stat.st_ino, stat.st_ctime_ns),
    )


def others_with_marker(marker: str, id_: CheckpointId, era: Era) -> list[int]:
    """Find the workers of other ids that would take this restore marker for theirs, by pid.

    A worker that is not told of a path looks at the era's own, which all workers on a host share.
    """
    namespace = procfs.namespaces(os.getpid()).get("mnt")
    found: list[int] = []
    for stat in procfs.all_stats().values():
        if stat.is_kernel_thread:
            continue
        try:
            # First: a process in a container can make the look at its environment hang.
            if procfs.namespaces(stat.pid).get("mnt") != namespace:
                continue
            environ = procfs.environ(stat.pid)
            named = environ.get(era.env_hash, "")
            if not named or named == id_:
                continue
        except OSError:
            continue
        if contract_of(environ, era).restore_marker == marker:
            found.append(stat.pid)
    return found
