"""After a restart: finish, undo or fail what a dead agent was in the middle of, and say which."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from hibernode import links, restored
from hibernode.artifact.staging import Staging
from hibernode.artifact.store import Store
from hibernode.container.restore import undo_noted
from hibernode.criu import moment
from hibernode.criu.options import DUMP_LOG
from hibernode.criu.runner import kill_leftovers
from hibernode.discovery.signals import SignalDir
from hibernode.errors import BusyError, HibernodeError, IntegrityError, NotFoundError
from hibernode.host import netlock
from hibernode.host.freezer import Freezer
from hibernode.journal import Step, read_journal
from hibernode.restored import Phase, Restored
from hibernode.state import StateDir
from hibernode.worker import noted_worker, settle_from_note
from hibernode.workload import ERA_A1, CheckpointId

log = logging.getLogger("hibernode.recover")


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


def recover(store: Store, state: StateDir, signals: SignalDir | None) -> Iterator[Recovered]:
    """Deal with every dump and every restore whose agent is gone."""
    yield from recover_dumps(store, signals)
    for entry in restored.unfinished(state):
        try:
            with store.lock(entry.id):
                # Read again: whoever held the lock until now may have finished it.
                if restored.read(state, entry.name).step != Step.DONE:
                    yield from _guarded(entry.id, "restore", partial(_restore, state, entry, signals))
        except BusyError:
            log.info("%s: its restore is under way in another process", entry.id)


def recover_dumps(store: Store, signals: SignalDir | None) -> Iterator[Recovered]:
    """Deal with every dump whose owner is gone; each is held by its lock, so any process may do this."""
    for staging in store.orphans():
        with staging:
            yield from _guarded(staging.id, "checkpoint", partial(_checkpoint, store, staging, signals))


def _guarded(id_: CheckpointId, kind: str, work: Callable[[], Recovered]) -> Iterator[Recovered]:
    """Go on with the others where one cannot be dealt with: the next agent tries again."""
    try:
        yield work()
    except (OSError, HibernodeError) as error:
        log.error("%s: the interrupted %s cannot be dealt with: %s", id_, kind, error)  # noqa: TRY400


def _checkpoint(store: Store, staging: Staging, signals: SignalDir | None) -> Recovered:
    id_ = staging.id
    journal = read_journal(staging.dir) or {}
    _end_criu(staging, journal)
    if journal.get("freezer"):
        with contextlib.suppress(HibernodeError, TypeError, ValueError):
            directory, version = journal["freezer"]
            Freezer(Path(directory), version).thaw()
    step = str(journal.get("step", ""))
    worker_lives = settle_from_note(journal)
    answers = signals if journal.get("announce", True) else None

    if step in (Step.PUBLISH, Step.ANNOUNCE):
        path = _published(store, staging)
        if path is not None:
            _answer(answers, id_, path=path)
            store.discard(staging)
            return Recovered(id_, "checkpoint", step, Ending.FINISHED, f"{id_} is whole and in the store")
        if step == Step.ANNOUNCE:
            error = str(journal.get("error") or "the agent ended before it could answer")
            _answer(answers, id_, error=error)
            store.discard(staging)
            return Recovered(id_, "checkpoint", step, Ending.FAILED, error)
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


def _restore(state: StateDir, entry: Restored, signals: SignalDir | None) -> Recovered:
    with state.restores_dir.subdir(entry.name) as directory:
        journal = read_journal(directory) or {}
        if entry.phase in (Phase.STARTING, Phase.CRIU, Phase.LOST) and entry.key is None:
            restored.undo(directory)
            entry = restored.read(state, entry.name)
        if entry.key is not None:
            _answer_restored(
                signals, entry, {"success": True, "pid": entry.key.pid, **restored.end_of(entry)}
            )
            ending, message = Ending.FINISHED, f"{entry.id} was restored as pid {entry.key.pid}"
        elif journal.get("step") == Step.ANNOUNCE:
            error = str(journal.get("error") or "the agent ended before it could answer")
            _answer_restored(signals, entry, {"success": False, "error": error})
            ending, message = Ending.FAILED, error
        else:
            restored.end_half_tree(journal)
            container = undo_noted(journal, directory)
            ending, message = (
                Ending.UNDONE,
                f"{entry.id}: nothing of the restore is left; it can be asked again"
                + (f"; {container}" if container else ""),
            )
        links.take_away_noted(journal.get("links"))
        restored.finish(directory, journal)
    return Recovered(entry.id, "restore", entry.step, ending, message)


def _answer_restored(signals: SignalDir | None, entry: Restored, body: dict[str, Any]) -> None:
    if signals is None or not entry.announce:
        return
    with contextlib.suppress(OSError, HibernodeError):
        signals.clear(entry.id, ERA_A1.restore_suffix)
        signals.answer_restored(entry.id, body)
