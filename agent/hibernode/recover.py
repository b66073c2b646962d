"""What dead ones were in the middle of: finish, undo or fail it, and say which.

An agent does this when it starts and from time to time; who begins a dump or a restore does it for its own id
and its own process or container. It is done under the locks that its owner held, which end with their owner:
that of the id, that of the staging directory, and the claim on the worker or on the container.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

from hibernode import links, restored
from hibernode.apart import FILES_SECONDS, within
from hibernode.artifact.staging import Staging
from hibernode.artifact.store import Store
from hibernode.container import leftovers
from hibernode.container import restore as filling
from hibernode.criu import moment
from hibernode.criu.options import DUMP_LOG
from hibernode.criu.runner import kill_leftovers
from hibernode.discovery.signals import SignalDir
from hibernode.errors import BusyError, HibernodeError, IntegrityError, NotFoundError, RefusedError
from hibernode.gpu.quiesce import owe, wake_noted
from hibernode.host import netlock
from hibernode.host.freezer import Freezer
from hibernode.host.procfs import Process, boot_id
from hibernode.host.safefs import Dir
from hibernode.journal import Step, read_journal
from hibernode.restored import Phase, Restored
from hibernode.settings import GpuSettings
from hibernode.state import StateDir, read_json
from hibernode.worker import end_since, noted_key, noted_time, noted_worker, settle_from_note
from hibernode.workload import ERA_A1, CheckpointId, ProcessKey

log = logging.getLogger("hibernode.recover")


NO_GPU: Final = GpuSettings()
"""For who has no settings: the tool that is in PATH, and the usual deadlines."""


class Ending(StrEnum):
    """What was done with work that had no owner."""

    FINISHED = "finished"
    UNDONE = "undone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Recovered:
    """One piece of work that had no owner."""

    id: CheckpointId
    kind: str
    step: str
    ending: Ending
    message: str


@dataclass(frozen=True, slots=True)
class Held:
    """What the caller holds itself: the lock of ``id``, the claim on ``root``, and the restore ``name``."""

    id: CheckpointId
    root: ProcessKey | None = None
    name: str = ""


def recover(
    store: Store,
    state: StateDir,
    signals: SignalDir | None,
    *,
    this_boot: bool = False,
    gpu: GpuSettings = NO_GPU,
) -> Iterator[Recovered]:
    """Deal with every dump and every restore whose owner is gone; see :func:`recover_dumps`."""
    yield from recover_dumps(store, state, signals, this_boot=this_boot, gpu=gpu)
    for entry in _newest_first(state):
        try:
            yield from _restore(store, state, signals, entry, None)
        except BusyError:
            log.debug("%s: its restore is under way in another process", entry.id)


def recover_dumps(
    store: Store,
    state: StateDir,
    signals: SignalDir | None,
    *,
    this_boot: bool = False,
    gpu: GpuSettings = NO_GPU,
) -> Iterator[Recovered]:
    """Deal with every dump whose owner is gone; each is held by its locks, so any process may do this.

    ``this_boot``: only those that were begun since this machine was started. In a store that several nodes
    share the others may be those of a node that will deal with them itself.
    """
    for staging in store.orphans():
        with staging:
            journal = read_journal(staging.dir) or {}
            if not this_boot or journal.get("boot_id") == boot_id():
                yield from _dump(store, state, signals, staging, None, gpu=gpu)


def make_way(
    store: Store, state: StateDir, signals: SignalDir | None, held: Held, *, gpu: GpuSettings = NO_GPU
) -> list[Recovered]:
    """Settle what dead ones have begun with the id or with the process that the caller holds.

    :raises BusyError: somebody else is about to settle what was done to the process.
    """
    found: list[Recovered] = []
    for staging in store.orphans():
        with staging:
            journal = read_journal(staging.dir) or {}
            ours = staging.id == held.id or (held.root is not None and noted_key(journal) == held.root)
            if ours and journal.get("boot_id") == boot_id():
                found += _dump(store, state, signals, staging, held, gpu=gpu)
    for entry in _newest_first(state):
        into = held.root is not None and entry.target == held.root
        if entry.name != held.name and (into or entry.id == held.id):
            try:
                found += _restore(store, state, signals, entry, held)
            except BusyError:
                if into:
                    raise
    for item in found:
        log.warning("%s: a dead %s is settled, %s: %s", item.id, item.kind, item.ending, item.message)
    return found


def see_clean(state: StateDir, held: Held) -> None:
    """See that no earlier restore has left files in the container that the caller has claimed.

    :raises RefusedError: reason ``TargetDirty``.
    """
    for entry in restored.restores(state):
        there = entry.target == held.root and entry.name != held.name and entry.key is None
        if there and (entry.dirty or entry.step != Step.DONE):
            raise RefusedError(
                f"the container still has files of an earlier restore, of {entry.id}: "
                f"{entry.dirty or 'it cannot be undone now'}",
                remedy="restore into a fresh container",
                reason="TargetDirty",
            )


def _newest_first(state: StateDir) -> list[Restored]:
    """List unfinished restores so that what one has changed is undone before what an older one has."""
    return list(restored.unfinished(state))[::-1]


@contextlib.contextmanager
def _alone(
    store: Store, state: StateDir, id_: CheckpointId, root: ProcessKey | None, held: Held | None
) -> Iterator[None]:
    """Hold an id and a process against everybody who would begin something with them, but for the caller."""
    with contextlib.ExitStack() as locks:
        if held is None or id_ != held.id:
            locks.enter_context(store.lock(id_))
        if root is not None and (held is None or held.root is None or root.pid != held.root.pid):
            locks.enter_context(state.claim(root.pid))
        yield


def _dump(
    store: Store,
    state: StateDir,
    signals: SignalDir | None,
    staging: Staging,
    held: Held | None,
    *,
    gpu: GpuSettings,
) -> list[Recovered]:
    try:
        with _alone(store, state, staging.id, noted_key(read_journal(staging.dir)), held):
            seconds = FILES_SECONDS + 4 * (gpu.quiesce_seconds + gpu.start_seconds)
            work = partial(_checkpoint, store, staging, signals, gpu)
            return list(_guarded(staging.id, "checkpoint", work, seconds))
    except BusyError:
        log.debug("%s: something else is under way with it or its worker", staging.id)
        return []


def _restore(
    store: Store, state: StateDir, signals: SignalDir | None, entry: Restored, held: Held | None
) -> list[Recovered]:
    """Settle a restore if it is still to be settled.

    :raises BusyError: its owner lives, or somebody else is at it.
    """
    with _alone(store, state, entry.id, entry.target, held):
        try:
            # Read again: whoever held the locks until now may have finished it.
            if restored.read(state, entry.name).step == Step.DONE:
                return []
        except FileNotFoundError:
            return []
        return list(_guarded(entry.id, "restore", partial(settle, state, signals, entry.name)))


def _guarded(
    id_: CheckpointId, kind: str, work: Callable[[], Recovered], seconds: float = FILES_SECONDS
) -> Iterator[Recovered]:
    """Go on with the others where one cannot be dealt with, or hangs: the next agent tries again."""
    try:
        yield within(work, f"the {kind} of {id_}", "its recovery", seconds=seconds)
    except (OSError, HibernodeError) as error:
        log.error("%s: the interrupted %s cannot be dealt with: %s", id_, kind, error)  # noqa: TRY400


def _checkpoint(store: Store, staging: Staging, signals: SignalDir | None, gpu: GpuSettings) -> Recovered:
    id_ = staging.id
    journal = read_journal(staging.dir) or {}
    _end_criu(staging, journal)
    if journal.get("freezer"):
        with contextlib.suppress(HibernodeError, TypeError, ValueError):
            directory, version = journal["freezer"]
            Freezer(Path(directory), version).thaw()
    step = str(journal.get("step", ""))
    worker_lives = settle_from_note(journal)
    woken = ""
    if journal.get("boot_id", boot_id()) == boot_id():
        try:
            woken = wake_noted(journal, gpu)
        except HibernodeError:
            owe(staging.dir)  # the journal stays, and whoever comes next tries again
            raise
    answers = signals if journal.get("announce", True) else None

    if step in (Step.PUBLISH, Step.ANNOUNCE):
        path = _published(store, staging)
        if path is not None:
            _answer(answers, id_, path=path)
            store.discard(staging)
            return Recovered(
                id_, "checkpoint", step, Ending.FINISHED, f"{id_} is whole and in the store{woken}"
            )
        if step == Step.ANNOUNCE:
            error = str(journal.get("error") or "the agent ended before it could answer")
            _answer(answers, id_, error=error)
            store.discard(staging)
            return Recovered(id_, "checkpoint", step, Ending.FAILED, error + woken)
    store.discard(staging)
    if worker_lives or not step:  # without a step nothing has begun, and who the worker is is not known
        return Recovered(
            id_,
            "checkpoint",
            step,
            Ending.UNDONE,
            f"{id_}: {'the worker runs' if worker_lives else 'nothing was begun'}, "
            "its request will be taken up again",
        )
    error = "WorkerGone: the agent was restarted during the dump and the worker has ended since"
    _answer(answers, id_, error=error)
    return Recovered(id_, "checkpoint", step, Ending.FAILED, error)


def _end_criu(staging: Staging, journal: dict[str, Any]) -> None:
    """Kill what is left of the dump's CRIU at a moment that does the worker no harm; its connections live."""
    root = noted_worker(journal)
    if root is None or journal.get("step") not in (Step.DUMP, Step.ROOTFS):
        kill_leftovers(staging.uuid)
        return
    safe = partial(moment.is_safe, root)
    if journal.get("tcp") != "established":
        kill_leftovers(staging.uuid, safe=safe)
        return
    kill_leftovers(staging.uuid, safe=safe, before_kill=partial(netlock.hold, root))
    netlock.heal(root, staging.artifact_path / DUMP_LOG, stopped=set(journal.get("stopped_before") or ()))


def _published(store: Store, staging: Staging) -> str | None:
    """Publish the staged artifact if it was sealed; its path, or None when it is not whole."""
    try:
        if not staging.published():
            store.publish(staging, staging.id)
        artifact = store.get(staging.id)
    except (IntegrityError, NotFoundError, OSError) as error:
        log.info("%s: what was staged is not whole: %s", staging.id, error)
        return None
    return str(artifact.path) if artifact.manifest.uuid == staging.uuid else None


def _answer(signals: SignalDir | None, id_: CheckpointId, *, path: str = "", error: str = "") -> None:
    if signals is None:
        return
    with contextlib.suppress(OSError, HibernodeError):
        signals.answer_done(id_, checkpoint_path=path, success=not error, error=error)


def settle(state: StateDir, signals: SignalDir | None, name: str) -> Recovered:
    """Finish, undo or fail one restore; the caller holds its locks, and nobody works on it any more."""
    entry = restored.read(state, name)
    with state.restores_dir.subdir(name) as directory:
        journal = read_journal(directory) or {}
        if entry.phase in (*restored.UNFINISHED, Phase.LOST) and entry.key is None:
            restored.undo(directory)
            entry = restored.read(state, name)
        if entry.key is not None:
            _answer_restored(
                signals, entry, {"success": True, "pid": entry.key.pid, **restored.end_of(entry)}
            )
            filling.forget_undo(directory, filling.noted(journal))
            ending, message = Ending.FINISHED, f"{entry.id} was restored as pid {entry.key.pid}"
        elif journal.get("step") == Step.ANNOUNCE:
            error = str(journal.get("error") or "the agent ended before it could answer")
            _answer_restored(signals, entry, {"success": False, "error": error})
            ending, message = Ending.FAILED, error
        else:
            container, problems = _take_back(state, entry, directory, journal)
            journal["dirty"] = "; ".join(problems)
            ending, message = (
                Ending.UNDONE,
                f"{entry.id}: nothing of the restore is left; it can be asked again"
                + (f"; {container}" if container else ""),
            )
        links.take_away_noted(journal.get("links"))
        restored.finish(directory, journal)
    return Recovered(entry.id, "restore", entry.step, ending, message)


def _take_back(
    state: StateDir, entry: Restored, directory: Dir, journal: dict[str, Any]
) -> tuple[str, list[str]]:
    """Undo what a restore has done outside its directory: what became of the container, and what is dirty.

    What another restore has taken since is that one's: the container, or on the node pids and the marker.
    """
    same_boot = journal.get("boot_id", boot_id()) == boot_id()
    if isinstance(journal.get("target"), dict):
        there = [
            other
            for other in restored.restores(state)
            if other.target == entry.target and other.name != entry.name
        ]
        if not same_boot or any(other.key is not None for other in there):
            filling.forget_undo(directory, filling.noted(journal))
            return f"its container {'has taken another worker since' if same_boot else 'is gone'}", []
        # A placeholder that is told may begin something else, so that the last one to undo tells it.
        return filling.undo_noted(journal, directory, tell=all(o.step == Step.DONE for o in there))
    _end_on_node(state, entry, directory, journal, same_boot=same_boot)
    return "", []


def end_left(state: StateDir, name: str) -> None:
    """End what a restore of the caller's own has made whose shim is gone or does not end: all but its files.

    The shim does so itself if it can. Of a worker that runs by now nothing is touched.
    """
    with state.restores_dir.subdir(name) as directory:
        restored.undo(directory)
        entry = restored.read(state, name)
        if entry.key is not None or entry.phase is Phase.FAILED:
            return
        journal = read_journal(directory) or {}
        if entry.target is None:
            _end_on_node(state, entry, directory, journal)
            return
        with contextlib.suppress(ProcessLookupError), Process.open(entry.target.pid) as process:
            if process.key == entry.target and filling.waits(process, journal["target"]):
                filling.end_left(process, journal, directory)


def forget_marker(state: StateDir, entry: Restored) -> None:
    """Take away the restore marker of a worker that has ended, where its shim could not.

    With a container that has ended too there is no way to it.

    :raises OSError: the restore has been forgotten, or its disk fails.
    """
    pid = os.getpid() if entry.target is None else entry.target.pid
    with contextlib.suppress(ProcessLookupError), Process.open(pid) as process:
        if entry.target in (None, process.key):
            with state.restores_dir.subdir(entry.name) as directory:
                began = noted_time((read_journal(directory) or {}).get("started_at"))
                _remove_marker(state, entry, directory, pid, began)


def _remove_marker(state: StateDir, entry: Restored, directory: Dir, pid: int, began: float) -> None:
    """Remove the marker as ``pid`` sees files, unless a later restore has it."""
    marker = _marker(directory)
    if marker is None or (entry.target is None and marker.get("path") in _taken_since(state, entry)[1]):
        return
    with contextlib.suppress(OSError), leftovers.files_of(pid) as root:
        leftovers.remove_marker(root, marker, began)


def _end_on_node(
    state: StateDir, entry: Restored, directory: Dir, journal: dict[str, Any], *, same_boot: bool = True
) -> None:
    """End the tree, or half a tree, that a dead restore has left on the node, and take its marker away."""
    began = noted_time(journal.get("started_at"))
    phase = (read_json(directory, "state.json") or {}).get("phase")
    # Before CRIU there is no tree, and a shim that has failed has ended its own: who has a pid is another.
    if same_boot and phase not in (None, Phase.STARTING, Phase.FAILED):
        # A task that CRIU had forked may have the worker's memory, and no mark of ours any more, when CRIU
        # dies; it then waits for ever. It is known by its pid, which CRIU gave it, and by its start.
        end_since(_pids(journal), began, lambda: _taken_since(state, entry)[0])
    _remove_marker(state, entry, directory, os.getpid(), began)


def _taken_since(state: StateDir, entry: Restored) -> tuple[set[int], set[str]]:
    """List the pids and the markers of restores on this node that began after this one."""
    pids: set[int] = set()
    markers: set[str] = set()
    for other in restored.restores(state):
        if other.started_at > entry.started_at and other.target is None:
            with contextlib.suppress(OSError), state.restores_dir.subdir(other.name) as directory:
                pids.update(_pids(read_journal(directory) or {}))
                markers.add(str((_marker(directory) or {}).get("path")))
    return pids, markers


def _pids(journal: dict[str, Any]) -> list[int]:
    """Read which pids a restore on the node was to bring back; what is damaged is left out."""
    noted = journal.get("pids")
    return [pid for pid in noted if isinstance(pid, int)] if isinstance(noted, list) else []


def _marker(directory: Dir) -> dict[str, Any] | None:
    """Read which marker the shim was to write."""
    marker = (read_json(directory, "spec.json") or {}).get("marker")
    return marker if isinstance(marker, dict) else None


def _answer_restored(signals: SignalDir | None, entry: Restored, body: dict[str, Any]) -> None:
    if signals is None or not entry.announce:
        return
    with contextlib.suppress(OSError, HibernodeError):
        signals.clear(entry.id, ERA_A1.restore_suffix)
        signals.answer_restored(entry.id, body)
