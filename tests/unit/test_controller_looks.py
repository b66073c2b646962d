"""The controller's looks: what a store says, what goes with an object, who shares a hash, conflicts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hibernode.artifact.manifest import MANIFEST_NAME
from hibernode.artifact.store import Store
from hibernode.controller.identity import identity_hash
from hibernode.controller.reconcile import HeldError
from hibernode.errors import UnavailableError
from hibernode.kube.api import KubeStatusError
from tests.unit.artifact_kit import ID, OTHER, put
from tests.unit.controller_kit import IDENTITY, START, condition_of, desk, make, reasons
from tests.unit.kube_fake import CHECKPOINTS, JOBS, Fault

COLLISION = (
    {"model": "m4516516", "backendFramework": "vllm"},
    {"model": "m11111345", "backendFramework": "vllm"},
)
"""Two identities whose hashes begin with the same twelve digits, found by trying 34 million."""


def nothing(_artifact: Path) -> None:
    """Leave it."""


def no_file(artifact: Path) -> None:
    """Lose a file."""
    (artifact / "images/pstree.img").unlink()


def short(artifact: Path) -> None:
    """Cut a file."""
    os.truncate(artifact / "images/pages-1.img", 7)


def more(artifact: Path) -> None:
    """Put in what does not belong there."""
    (artifact / "images/extra.img").write_bytes(b"x")


def no_manifest(artifact: Path) -> None:
    """Lose the sign that all is there."""
    (artifact / MANIFEST_NAME).unlink()


def forged_manifest(artifact: Path) -> None:
    """Change what the digest is of."""
    (artifact / MANIFEST_NAME).write_bytes(b"{}")


def gone(artifact: Path) -> None:
    """Lose all of it."""
    artifact.rename(artifact.with_name("elsewhere"))


def a_file(artifact: Path) -> None:
    """Put a file in its place."""
    gone(artifact)
    artifact.write_bytes(b"")


def a_link(artifact: Path) -> None:
    """Put a link in its place, to what is whole."""
    gone(artifact)
    artifact.symlink_to("elsewhere")


async def test_a_whole_artifact_is_ready(tmp_path: Path) -> None:
    """The store is looked at where the setting says so, as soon as the Job has succeeded."""
    async with desk(tmp_path / "store", verify="store") as at:
        make(at.fake)
        await at.settle()
        with Store(tmp_path / "store").open() as store:
            put(store)
        at.end()
        ready = await at.settle()
        assert ready["status"]["phase"] == "Ready"
        assert reasons(at.fake) == ["CheckpointReady", "JobCreated"]


@pytest.mark.parametrize(
    "damage",
    [no_file, short, more, no_manifest, forged_manifest, gone, a_file, a_link],
    ids=lambda it: it.__name__,
)
async def test_an_artifact_that_is_not_whole_fails_after_a_while(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    """Until then it may still become whole: another node's writes come late."""
    async with desk(tmp_path / "store", verify="store", verify_seconds=60) as at:
        make(at.fake)
        await at.settle()
        with Store(tmp_path / "store").open() as store:
            damage(put(store).path)
        at.end()
        at.wall += 59
        assert await at.look() is not None
        assert at.fake.get(CHECKPOINTS, "llama")["status"]["phase"] == "Creating"
        at.wall += 2
        failed = await at.settle()
        assert failed["status"]["phase"] == "Failed"
        assert condition_of(failed, "JobCompleted") == ("False", "CheckpointVerificationFailed")
        assert failed["status"]["message"].startswith("Checkpoint job completed, but ")


async def test_a_late_artifact_is_ready(tmp_path: Path) -> None:
    """The look is repeated until it is there."""
    async with desk(tmp_path / "store", verify="store") as at:
        make(at.fake)
        await at.settle()
        at.end()
        again = await at.look()
        assert again is not None
        assert 0 < again <= 2
        with Store(tmp_path / "store").open() as store:
            put(store)
        assert (await at.settle())["status"]["phase"] == "Ready"


async def test_a_store_that_cannot_be_read_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late it is: nothing was seen of the artifact."""
    async with desk(tmp_path / "store", verify="store", cleanup="store") as at:
        make(at.fake)
        await at.settle()
        at.end()
        at.wall += 3600

        def away(*_: object) -> None:
            raise OSError(116, "Stale file handle")

        monkeypatch.setattr(Store, "get", away)
        monkeypatch.setattr(Store, "remove", away)
        with pytest.raises(UnavailableError, match="Stale file handle"):
            await at.look()
        assert at.fake.get(CHECKPOINTS, "llama")["status"]["phase"] == "Creating"
        at.fake.remove(JOBS, "checkpoint-llama")
        at.fake.remove(CHECKPOINTS, "llama")
        with pytest.raises(UnavailableError, match="Stale file handle"):
            await at.look()
        assert at.fake.names(CHECKPOINTS) == ["llama"]


# What goes with an object.


async def test_an_artifact_goes_with_its_object_after_its_job(tmp_path: Path) -> None:
    """The Job may still write it; another id's stays."""
    async with desk(tmp_path / "store", cleanup="store") as at:
        with Store(tmp_path / "store").open() as store:
            put(store)
            put(store, OTHER)
        make(at.fake)
        await at.settle()
        at.fake.remove(CHECKPOINTS, "llama")
        assert await at.look() is not None
        assert at.fake.names(JOBS) == []
        assert (tmp_path / "store" / ID).exists()
        assert await at.look() is None
        assert not (tmp_path / "store" / ID).exists()
        assert (tmp_path / "store" / OTHER).exists()
        assert at.fake.names(CHECKPOINTS) == []
        assert reasons(at.fake) == ["ArtifactRemoved", "JobCreated"]


@pytest.mark.parametrize("why", ["it is pinned", "it is in use"])
async def test_an_artifact_that_somebody_keeps_stays(why: str, tmp_path: Path) -> None:
    """The object goes all the same, and says so."""
    async with desk(tmp_path / "store", cleanup="store") as at:
        make(at.fake)
        await at.settle()
        at.fake.remove(CHECKPOINTS, "llama")
        with Store(tmp_path / "store").open() as store:
            put(store)
            await at.look()
            if why == "it is pinned":
                store.pin(ID)
                await at.look()
            else:
                with store.lock(ID, shared=True):  # as a restore does
                    await at.look()
            assert store.get(ID)
        assert at.fake.names(CHECKPOINTS) == []
        (event,) = (
            raw for (_, kind, _), raw in at.fake.objects.items() if raw.get("reason") == "ArtifactKept"
        )
        assert event["message"] == f"{ID} is kept: {why}"


@pytest.mark.parametrize("namespace", ["ns", "other", "excluded"])
async def test_an_artifact_of_another_object_too_stays(namespace: str, tmp_path: Path) -> None:
    """Wherever it is, also where another controller works; the last of them takes it along."""
    async with desk(tmp_path / "store", cleanup="store", excluded_namespaces=["excluded"]) as at:
        with Store(tmp_path / "store").open() as store:
            put(store)
        make(at.fake)
        await at.settle()
        at.fake.remove(JOBS, "checkpoint-llama")
        make(at.fake, "heir", namespace)
        at.fake.remove(CHECKPOINTS, "llama")
        await at.look()
        assert at.fake.names(CHECKPOINTS) == (["heir"] if namespace == "ns" else [])
        assert (tmp_path / "store" / ID).exists()
        assert reasons(at.fake) == ["ArtifactKept", "JobCreated"]


async def test_an_artifact_that_the_status_only_claims_stays(tmp_path: Path) -> None:
    """Whoever may write the status could have any artifact removed."""
    async with desk(tmp_path / "store", cleanup="store") as at:
        with Store(tmp_path / "store").open() as store:
            put(store, OTHER)
        raw = make(at.fake)
        raw["metadata"]["finalizers"] = ["hibernode.io/artifact"]
        at.fake.put(CHECKPOINTS, {**raw, "status": {"identityHash": str(OTHER), "phase": "Ready"}})
        at.fake.remove(CHECKPOINTS, "llama")
        await at.look()
        assert at.fake.names(CHECKPOINTS) == []
        assert (tmp_path / "store" / OTHER).exists()


# Who shares a hash.


async def test_different_identities_with_one_hash_are_not_taken_for_one_another() -> None:
    """The younger is refused; all digits tell them apart."""
    one, other = COLLISION
    assert identity_hash(one) == identity_hash(other)
    assert identity_hash(one, 16) != identity_hash(other, 16)
    for digits, phase in ((12, "Failed"), (16, "Creating")):
        async with desk(hash_length=digits) as at:
            make(at.fake, "elder", identity=one)
            make(at.fake, "younger", identity=other, created=START + 1)
            assert (await at.settle("elder"))["status"]["phase"] == "Creating"
            younger = await at.settle("younger")
            assert younger["status"]["phase"] == phase
            if phase == "Failed":
                assert condition_of(younger, "JobCreated") == ("False", "HashCollision")
                assert at.fake.names(JOBS) == ["checkpoint-elder"]
                make(at.fake, "younger", identity=IDENTITY)
                changed = at.fake.get(CHECKPOINTS, "younger")
                changed["metadata"]["generation"] += 1
                changed["status"] = younger["status"]
                assert (await at.settle("younger"))["status"]["phase"] == "Creating"


# A status that somebody has changed.


@pytest.mark.parametrize("phase", ["Creating", "Ready"])
async def test_a_job_of_another_identity_makes_nothing_ready(phase: str) -> None:
    """The status is lost and the identity changed: what the old Job made is not there under the new hash."""
    async with desk() as at:
        raw = make(at.fake)
        await at.settle()
        old = at.fake.get(JOBS, "checkpoint-llama")["metadata"]["uid"]
        at.end()
        if phase == "Ready":
            await at.settle()
        raw = at.fake.get(CHECKPOINTS, "llama")
        changed = {**raw["spec"], "identity": {**IDENTITY, "model": "another"}}
        at.fake.put(CHECKPOINTS, {**raw, "spec": changed, "status": {}})
        with pytest.raises(HeldError, match="makes another checkpoint"):
            await at.settle()
        creating = await at.settle()
        assert creating["status"]["phase"] == "Creating"
        job = at.fake.get(JOBS, "checkpoint-llama")
        assert job["metadata"]["uid"] != old
        assert job["metadata"]["labels"]["nvidia.com/checkpoint-hash"] == creating["status"]["identityHash"]


async def test_a_status_that_names_another_hash_does_not_become_ready_by_the_old_job() -> None:
    """The hash is that of the identity again before anything is Ready, and the Job is still the right one."""
    async with desk() as at:
        make(at.fake)
        raw = await at.settle()
        at.end()
        at.fake.put(CHECKPOINTS, {**raw, "status": {**raw["status"], "identityHash": "0" * 12}})
        ready = await at.settle()
        assert ready["status"]["phase"] == "Ready"
        assert ready["status"]["location"] == f"/checkpoints/{raw['status']['identityHash']}"


# Conflicts.


async def test_a_conflict_of_the_status_changes_nothing_twice() -> None:
    """Whatever step it meets: the Job is made once, each event is said once."""
    async with desk() as at:
        make(at.fake)
        at.fake.fail(1, r"PATCH .*/llama/status", Fault(409))
        with pytest.raises(KubeStatusError):
            await at.look()
        assert "status" not in at.fake.get(CHECKPOINTS, "llama")
        await at.look()
        at.fake.fail(1, r"PATCH .*/llama/status", Fault(409))
        with pytest.raises(KubeStatusError):
            await at.look()
        assert at.fake.get(CHECKPOINTS, "llama")["status"]["phase"] == "Pending"
        uid = at.fake.get(JOBS, "checkpoint-llama")["metadata"]["uid"]
        await at.settle()
        at.end()
        at.fake.fail(1, r"PATCH .*/llama/status", Fault(409))
        with pytest.raises(KubeStatusError):
            await at.look()
        assert (await at.settle())["status"]["phase"] == "Ready"
        assert at.fake.get(JOBS, "checkpoint-llama")["metadata"]["uid"] == uid
        assert reasons(at.fake) == ["CheckpointReady", "JobCreated"]


async def test_a_conflict_of_the_job_is_looked_into() -> None:
    """The old one goes, or the new one is there already, by us a moment ago."""
    async with desk() as at:
        make(at.fake)
        await at.look()
        at.fake.fail(1, r"POST .*/jobs", Fault(409))
        with pytest.raises(HeldError, match="is being deleted"):
            await at.look()
        assert condition_of(at.fake.get(CHECKPOINTS, "llama"), "JobCreated") == ("False", "JobEnding")
        at.fake.fail(1, r"POST .*/jobs", Fault(409, after=True))
        creating = await at.settle()
        assert creating["status"]["phase"] == "Creating"
        assert "message" not in creating["status"]
        assert at.fake.names(JOBS) == ["checkpoint-llama"]
