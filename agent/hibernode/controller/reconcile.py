"""One look at one DynamoCheckpoint: where it stands, and the one step from there.

"" -> Pending -> Creating -> Ready | Failed. Each look reads the object and its Job anew, and each write is of
the state that was read, so that it does not matter how often, after what, or by how many it is done.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hibernode.controller.identity import identity_hash
from hibernode.controller.job import JobOptions, build_job, job_name
from hibernode.controller.shelf import Checkpoints, seen
from hibernode.controller.status import (
    JOB_COMPLETED,
    JOB_CREATED,
    TAR_AVAILABLE,
    Condition,
    Phase,
    bounded,
    condition,
    holds,
    moment,
    number_of,
    text_of,
)
from hibernode.controller.writes import ATTEMPTS, FINALIZER, RETRIES, Writes, is_ours, makes
from hibernode.errors import HibernodeError, RefusedError, UnavailableError, UsageError
from hibernode.kube import names
from hibernode.kube.api import CONFLICT, KubeStatusError
from hibernode.kube.objects import metadata_of, stamp, status_of
from hibernode.workload import CheckpointId

if TYPE_CHECKING:
    from hibernode.controller.artifacts import Artifacts
    from hibernode.kube.events import EventWriter
    from hibernode.settings import Settings

SOON_SECONDS: Final = 2.0
"""Until another look at what goes away by itself."""

LONGEST_RETRY_SECONDS: Final = 6 * 3600.0
NOT_ACCEPTABLE: Final = frozenset({400, 413, 422})
"""What an API server says of an object that it will never take."""

_RETRYABLE: Final = frozenset({"JobFailed", "CheckpointVerificationFailed"})
_COUNT: Final = re.compile(r"[0-9]{1,3}", re.ASCII)


class HeldError(HibernodeError):
    """Something outside stands in the way; the object waits, and is looked at again later."""

    default_reason = "Held"


class Reconciler:
    """Looks at one object at a time; what it needs to know of the others it takes from ``others``."""

    def __init__(
        self,
        writes: Writes,
        events: EventWriter,
        settings: Settings,
        others: Checkpoints,
        artifacts: Artifacts | None = None,
    ) -> None:
        self._writes, self._events, self._others = writes, events, others
        self._settings, self._artifacts = settings.controller, artifacts
        self._options = JobOptions.of(settings)

    async def look(self, namespace: str, name: str) -> float | None:
        """Take the next step; tells after how many seconds to look again, whatever happens.

        :raises KubeStatusError: 409, somebody else changed it: look again.
        :raises HibernodeError: it cannot be done now.
        """
        raw = await self._writes.checkpoint(namespace, name)
        if raw is None:
            return None
        if metadata_of(raw).get("deletionTimestamp"):
            return await self._leave(raw)
        finalizers = _finalizers(raw)
        if self._settings.cleanup == "store" and FINALIZER not in finalizers:
            await self._writes.finalizers(raw, [*finalizers, FINALIZER])
            return None  # the write is news of its own, as all below
        return await self._step(raw)

    async def _step(self, raw: Mapping[str, Any]) -> float | None:
        again: float | None = None
        try:
            id_ = CheckpointId(text_of(status_of(raw), "identityHash"))
        except UsageError:
            await self._begin(raw)
            return None
        match text_of(status_of(raw), "phase"):
            case Phase.PENDING:
                await self._pending(raw, id_)
            case Phase.CREATING:
                again = await self._creating(raw, id_)
            case Phase.READY:
                pass  # there is nothing to do
            case Phase.FAILED:
                again = await self._failed(raw)
            case _:
                await self._writes.status(raw, {"phase": Phase.PENDING})
        return again

    # phases -------------------------------------------------------------------------------------------

    async def _begin(self, raw: Mapping[str, Any]) -> None:
        spec = raw.get("spec")
        try:
            identity = spec.get("identity") if isinstance(spec, Mapping) else None
            id_ = identity_hash(identity, self._settings.hash_length)
        except RefusedError as error:
            if text_of(status_of(raw), "phase") != Phase.FAILED or _changed(raw, JOB_CREATED):
                await self._refuse(raw, error)
            return
        await self._writes.status(raw, {"identityHash": str(id_), "phase": Phase.PENDING})

    async def _pending(self, raw: Mapping[str, Any], id_: CheckpointId) -> None:
        namespace = str(metadata_of(raw)["namespace"])
        if not seen(raw).digest.startswith(id_):  # the identity was changed meanwhile
            await self._writes.status(raw, {"identityHash": None})
            return
        try:
            job = build_job(raw, id_, self._options)
            self._check_rivals(raw, id_)
            await self._make(raw, namespace, job, id_)
        except RefusedError as error:
            await self._refuse(raw, error)
            return
        except HeldError as error:
            await self._hold(raw, error)
            raise
        except UnavailableError as error:
            if error.reason == "ApiForbidden":  # a quota, an admission webhook, or a role
                await self._hold(raw, error)
            raise
        name = str(job["metadata"]["name"])
        text = f"Checkpoint job {name} created"
        changes = {"phase": Phase.CREATING, "jobName": name, "message": None}
        await self._writes.status(raw, changes, [Condition(JOB_CREATED, True, "JobCreated", text)])
        if not holds(raw, JOB_CREATED):  # not by who made it: the write of the status may have failed then
            await self._events.say(raw, "Normal", "JobCreated", text)

    async def _creating(self, raw: Mapping[str, Any], id_: CheckpointId) -> float | None:
        metadata, status = metadata_of(raw), status_of(raw)
        name = text_of(status, "jobName")
        # Another name is nobody's work of ours, and it goes into a path.
        known = name == job_name(str(metadata["name"]))
        job = await self._writes.job(str(metadata["namespace"]), name) if known else None
        if job is None or not is_ours(job, raw) or not makes(job, id_):
            gone = Condition(JOB_CREATED, False, "JobDeleted", "Checkpoint job was deleted")
            await self._writes.status(raw, {"phase": Phase.PENDING, "jobName": None}, [gone])
            return None
        if number_of(status_of(job), "succeeded") > 0 or holds(job, "Complete"):
            return await self._succeeded(raw, job, id_)
        failures = number_of(status_of(job), "failed")
        if holds(job, "Failed"):
            await self._fail(raw, "JobFailed", "Checkpoint job failed", _why(job))
        elif failures and (text := _tries(failures)) != text_of(status, "message"):
            await self._writes.status(raw, {"message": text})
        return None

    async def _succeeded(
        self, raw: Mapping[str, Any], job: Mapping[str, Any], id_: CheckpointId
    ) -> float | None:
        problem = await self._problem(job, id_)
        if problem:
            ended = status_of(job).get("completionTime") or condition(job, "Complete").get(
                "lastTransitionTime"
            )
            left = moment(ended) + self._settings.verify_seconds - self._writes.wall()
            if left > 0:
                return float(min(left + 0.1, SOON_SECONDS))
            text = f"Checkpoint job completed, but {problem}"
            await self._fail(raw, "CheckpointVerificationFailed", text, problem)
            return None
        location = self._options.location(id_)
        changes = {
            "phase": Phase.READY,
            "createdAt": stamp(self._writes.wall()),
            "location": location,
            "storageType": names.STORAGE_TYPE,
            "message": None,
        }
        said = "Checkpoint job completed successfully"
        done = Condition(JOB_COMPLETED, True, "JobSucceeded", said)
        there = Condition(TAR_AVAILABLE, True, "TarCreated", f"Checkpoint available at {location}")
        await self._writes.status(raw, changes, [done, there])
        await self._events.say(raw, "Normal", "CheckpointReady", "Checkpoint creation completed successfully")
        return None

    async def _failed(self, raw: Mapping[str, Any]) -> float | None:
        """Begin anew if the spec was changed, or if there may be another try and it is time for it."""
        completed = condition(raw, JOB_COMPLETED)
        type_ = JOB_COMPLETED if completed.get("status") == "False" else JOB_CREATED
        if _changed(raw, type_):
            if _count(raw, ATTEMPTS, 0):
                raw = await self._writes.annotate(raw, {ATTEMPTS: None})
            await self._again(raw, "SpecChanged", "The object was changed after its failure")
            return None
        if type_ != JOB_COMPLETED or completed.get("reason") not in _RETRYABLE:
            return None
        attempts, most = _count(raw, ATTEMPTS, 0), _count(raw, RETRIES, self._settings.retries)
        if attempts >= most:
            return None
        pause = min(self._settings.retry_seconds * 2 ** min(attempts, 30), LONGEST_RETRY_SECONDS)
        left = moment(completed.get("lastTransitionTime")) + pause - self._writes.wall()
        if left > 0:
            return float(left + 0.1)
        # Counted before it is done: a controller that dies in between has tried once too little.
        raw = await self._writes.annotate(raw, {ATTEMPTS: str(attempts + 1)})
        await self._again(raw, "Retrying", f"Retry {attempts + 1} of {most} begins")
        return None

    # steps --------------------------------------------------------------------------------------------

    def _check_rivals(self, raw: Mapping[str, Any], id_: CheckpointId) -> None:
        """Let an elder with the same hash go first: two at once would take each other's answers."""
        me = seen(raw)
        for elder in self._others.rivals(me, len(id_)):
            # Times are whole seconds: of two of the same second the one that has begun goes first.
            if elder.leaving or (elder.age > me.age and elder.phase != Phase.CREATING):
                continue
            name = elder.key[1]
            if elder.digest != me.digest:
                raise RefusedError(
                    f"another identity has the hash {id_} too: that of {name}",
                    remedy="change an extra parameter of this one, or set controller.hash_length to 16",
                    reason="HashCollision",
                )
            if elder.phase not in (Phase.READY, Phase.FAILED):
                raise HeldError(
                    f"waits for {name}, which makes the same checkpoint", reason="WaitsForSameIdentity"
                )

    async def _make(
        self, raw: Mapping[str, Any], namespace: str, job: Mapping[str, Any], id_: CheckpointId
    ) -> None:
        """Make the Job, unless it is there already; one of ours with another id goes first."""
        try:
            await self._writes.create(namespace, job)
        except KubeStatusError as error:
            if error.code in NOT_ACCEPTABLE:
                raise RefusedError(
                    f"the API server does not take the Job: {error.message}", reason="InvalidPodTemplate"
                ) from error
            if error.code != CONFLICT:
                raise
            name = str(job["metadata"]["name"])
            there = await self._writes.job(namespace, name)
            if there is None or metadata_of(there).get("deletionTimestamp"):
                raise HeldError(f"the old Job {name} is being deleted", reason="JobEnding") from error
            if not is_ours(there, raw):
                raise HeldError(
                    f"there is a Job {name} that is another's; delete or rename it", reason="JobNameTaken"
                ) from error
            if not makes(there, id_):  # the status was lost, and then the identity or the length changed
                await self._writes.delete(there)
                raise HeldError(
                    f"the Job {name} makes another checkpoint than {id_} and is being deleted",
                    reason="JobEnding",
                ) from error

    async def _hold(self, raw: Mapping[str, Any], error: HibernodeError) -> None:
        """Say what stands in the way, once."""
        text = bounded(error.message)
        if text_of(status_of(raw), "message") == text:
            return
        blocked = Condition(JOB_CREATED, False, error.reason, error.message)
        await self._writes.status(raw, {"message": text}, [blocked])
        await self._events.say(raw, "Warning", error.reason, text)

    async def _refuse(self, raw: Mapping[str, Any], error: HibernodeError) -> None:
        """Fail before there is a Job."""
        text = bounded(str(error).replace("\n  ", "; "))
        refused = Condition(JOB_CREATED, False, error.reason, text)
        await self._writes.status(raw, {"phase": Phase.FAILED, "message": text}, [refused])
        await self._events.say(raw, "Warning", error.reason, text)

    async def _fail(self, raw: Mapping[str, Any], reason: str, text: str, why: str) -> None:
        failed = Condition(JOB_COMPLETED, False, reason, text)
        await self._writes.status(raw, {"phase": Phase.FAILED, "message": bounded(text)}, [failed])
        said = f"Checkpoint creation failed{': ' if why else ''}{why}"
        await self._events.say(raw, "Warning", "CheckpointFailed", said)

    async def _again(self, raw: Mapping[str, Any], reason: str, text: str) -> None:
        """Begin anew: the Job goes first, or it would be found again."""
        metadata = metadata_of(raw)
        job = await self._writes.job(str(metadata["namespace"]), job_name(str(metadata["name"])))
        if job is not None and is_ours(job, raw):
            await self._writes.delete(job)
        changes: dict[str, Any] = {"phase": Phase.PENDING, "jobName": None, "message": None}
        if reason == "SpecChanged":
            changes["identityHash"] = None  # it may be another identity now
        begun = Condition(JOB_CREATED, False, reason, text)
        await self._writes.status(raw, changes, [begun], without=JOB_COMPLETED)
        await self._events.say(raw, "Normal", reason, text)

    async def _problem(self, job: Mapping[str, Any], id_: CheckpointId) -> str:
        """Ask whether the artifact is whole, whom the settings name; empty if it is, or nobody is asked."""
        if self._settings.verify == "agent":
            annotations = metadata_of(job).get("annotations")
            told = annotations.get(names.JOB_STATUS) if isinstance(annotations, dict) else None
            said = {names.COMPLETED: "", names.FAILED: "the node agent says that it failed"}
            return said.get(str(told), "no node agent has confirmed the artifact")
        if self._settings.verify == "store" and self._artifacts is not None:
            return await self._artifacts.problem(id_)
        return ""

    async def _leave(self, raw: Mapping[str, Any]) -> float | None:
        """Let a deleted object go; what it made goes before it, if that is wanted."""
        finalizers = _finalizers(raw)
        if FINALIZER not in finalizers:
            return None
        metadata = metadata_of(raw)
        if self._settings.cleanup == "store" and self._artifacts is not None:
            job = await self._writes.job(str(metadata["namespace"]), job_name(str(metadata["name"])))
            if job is not None and is_ours(job, raw):
                if not metadata_of(job).get("deletionTimestamp"):
                    await self._writes.delete(job, wait=True)
                return SOON_SECONDS
            try:
                id_ = CheckpointId(text_of(status_of(raw), "identityHash"))
            except UsageError:
                pass  # nothing was made under what is no id
            else:
                await self._remove(raw, id_)
        await self._writes.finalizers(raw, [one for one in finalizers if one != FINALIZER])
        return None

    async def _remove(self, raw: Mapping[str, Any], id_: CheckpointId) -> None:
        me = seen(raw)
        if not me.digest.startswith(id_):
            return  # the status names what this identity did not make
        heirs = [one for one in self._others.rivals(me, len(id_), everywhere=True) if not one.leaving]
        if heirs:
            await self._events.say(raw, "Normal", "ArtifactKept", f"{id_} is also that of {heirs[0].key[1]}")
            return
        assert self._artifacts is not None
        kept = await self._artifacts.remove(id_)
        if kept:
            await self._events.say(raw, "Normal", "ArtifactKept", f"{id_} is kept: {kept}")
        else:
            await self._events.say(raw, "Normal", "ArtifactRemoved", f"{id_} was removed from the store")


def _finalizers(raw: Mapping[str, Any]) -> list[str]:
    found = metadata_of(raw).get("finalizers")
    return [str(one) for one in found] if isinstance(found, list) else []


def _changed(raw: Mapping[str, Any], type_: str) -> bool:
    """Tell whether the spec is another than the one that a condition is about."""
    told = condition(raw, type_).get("observedGeneration")
    generation = metadata_of(raw).get("generation")
    return isinstance(told, int) and isinstance(generation, int) and told < generation


def _count(raw: Mapping[str, Any], annotation: str, default: int) -> int:
    annotations = metadata_of(raw).get("annotations")
    text = annotations.get(annotation) if isinstance(annotations, dict) else None
    return int(text) if isinstance(text, str) and _COUNT.fullmatch(text) else default


def _tries(failures: int) -> str:
    return f"{failures} {'pod has' if failures == 1 else 'pods have'} failed; the job tries again"


def _why(job: Mapping[str, Any]) -> str:
    failed = condition(job, "Failed")
    return ": ".join(str(failed[key])[:500] for key in ("reason", "message") if failed.get(key))
