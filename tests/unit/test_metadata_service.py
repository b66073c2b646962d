"""The metadata service: upstream's semantics, health, and who may change what."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hibernode.errors import IntegrityError, UnavailableError, UsageError
from hibernode.host.procfs import read_stat
from hibernode.metadata.access import Caller, Gate, Reviewed, outermost
from hibernode.metadata.backends.sqlite import SqliteBackend
from hibernode.metadata.health import HEALTH, HealthMethods
from hibernode.metadata.mapping import owner_reference
from hibernode.metadata.records import NOBODY, PodRef, SourceStatus
from hibernode.metadata.service import CHANGES
from hibernode.metadata.token_review import reviewed
from tests.unit.service_kit import (
    CODE,
    P2P,
    READY,
    A,
    B,
    Client,
    Tokens,
    identity,
    pod,
    publication,
    refused,
    serving,
    tensors,
)
from tests.unit.test_nixl_blob import make_blob

# semantics ----------------------------------------------------------------------------------------------


async def test_a_publication_comes_back_whole() -> None:
    """Payload, tensors in both places, endpoints, topology and identity are what was published."""
    async with serving() as service, service.client() as client:
        source = await client.publish(
            nixl_metadata=b"\0blob\xff",
            metadata_endpoint="10.9.9.9:5555",
            agent_name="agent",
            worker_grpc_endpoint="10.9.9.9:6555",
            accelerator="cuda",
            topology={"host": "n"},
        )
        answer = await client.get(source, "w0")
        worker = answer.worker
        assert (answer.found, answer.mx_source_id, answer.worker_id) == (True, source, "w0")
        assert answer.identity == identity()
        assert (worker.nixl_metadata, worker.agent_name, worker.accelerator) == (
            b"\0blob\xff",
            "agent",
            "cuda",
        )
        assert (worker.metadata_endpoint, worker.worker_grpc_endpoint) == ("10.9.9.9:5555", "10.9.9.9:6555")
        assert list(worker.tensors) == list(worker.tensor_source.tensors) == tensors()
        assert (worker.status, dict(worker.topology)) == (READY, {"host": "n"})
        assert worker.updated_at > 0


async def test_a_blob_of_another_agent_is_neither_taken_nor_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published under a wrong name it is rejected; where another writer let it in, it is no answer."""
    blob = make_blob(agent=b"other")
    async with serving() as service, service.client() as client:
        answer = await client.call("PublishMetadata", publication(nixl_metadata=blob, agent_name="mine"))
        assert not answer.success
        assert "BlobAgentMismatch" in answer.message
        monkeypatch.setattr("hibernode.metadata.gate.refuse_foreign", lambda *_: None)
        source = await client.publish(nixl_metadata=blob, agent_name="mine")
        code, text = await refused(client.get(source, "w0"))
        assert (code, "BlobAgentMismatch" in text) == (CODE.DATA_LOSS, True)
        for worker, name in (("w1", "other"), ("w2", "")):
            await client.publish(worker, nixl_metadata=blob, agent_name=name)
            assert (await client.get(source, worker)).worker.nixl_metadata == blob


async def test_legacy_tensors_session_ids_and_artifacts_are_taken() -> None:
    """Each form of a payload that upstream knows comes back as such; source_payload wins over tensors."""
    async with serving() as service, service.client() as client:
        legacy = publication("legacy", count=0, transfer_engine_session_id="10.0.0.1:1")
        legacy.worker.ClearField("tensor_source")
        legacy.worker.tensors.extend(tensors(3))
        artifact = publication("artifact")
        artifact.worker.tensors.extend(tensors(3))
        artifact.worker.artifact_source.artifact_id = "a"
        artifact.worker.artifact_source.total_size = 1 << 62
        both = publication("both", count=1)
        both.worker.tensors.extend(tensors(3))
        for request in (legacy, artifact, both):
            answer = await client.call("PublishMetadata", request)
            assert answer.success, answer.message
        source = answer.mx_source_id
        got = (await client.get(source, "legacy")).worker
        assert (got.transfer_engine_session_id, len(got.tensors)) == ("10.0.0.1:1", 3)
        got = (await client.get(source, "artifact")).worker
        assert (got.artifact_source.total_size, len(got.tensors)) == (1 << 62, 0)
        assert got.WhichOneof("source_payload") == "artifact_source"
        assert len((await client.get(source, "both")).worker.tensors) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.ClearField("identity"), "identity is required"),
        (lambda r: r.identity.ClearField("model_name"), "model_name is required"),
        (lambda r: r.ClearField("worker_id"), "worker_id is required"),
        (lambda r: r.ClearField("worker"), "worker is required"),
        (lambda r: setattr(r, "worker_id", "../x"), "InvalidWorkerId"),
        (lambda r: setattr(r.worker, "worker_rank", 1 << 31), "worker_rank"),
        (lambda r: setattr(r.worker, "nixl_metadata", b"x" * ((16 << 20) + 1)), "BlobTooLarge"),
    ],
    ids=["identity", "model name", "worker id", "worker", "bad worker id", "rank", "blob"],
)
async def test_a_publication_that_cannot_be_is_rejected_with_success_false(change: Any, said: str) -> None:
    """GRPC says OK, as upstream does, and nothing is there afterwards."""
    async with serving() as service, service.client() as client:
        request = publication()
        change(request)
        answer = await client.call("PublishMetadata", request)
        assert not answer.success
        assert said in answer.message
        assert await client.list() == []
        assert (
            service.sample("hibernode_metadata_requests_total", method="PublishMetadata", result="rejected")
            == 1
        )


async def test_what_is_not_there_is_not_found() -> None:
    """Ids that are empty, malformed or unknown read as found=false; a status for them as success=false."""
    async with serving() as service, service.client() as client:
        source = await client.publish()
        for one, other in ((source, "w9"), ("0" * 16, "w0"), ("", ""), ("../../x", "w0"), (source, "W 0")):
            assert not (await client.get(one, other)).found
            assert not (await client.status(one, other)).success
        assert not (await client.status(source, "w0", rank=1)).success
        assert not (await client.status(source, "w0", status=9)).success


async def test_lists_filter_as_upstream() -> None:
    """By identity, status, name, rank, time and limit; an identity without a name is no filter."""
    async with serving(locality=False) as service, service.client() as client:
        await client.publish("w0", 0)
        await client.publish("w1", 1)
        await client.publish("w2", 1, ready=False)
        await client.publish("x0", 0, model="other")

        def names(found: list[Any]) -> list[str]:
            return sorted(one.worker_id for one in found)

        assert names(await client.list()) == ["w0", "w1", "w2", "x0"]
        assert names(await client.list(identity=P2P.SourceIdentity(dtype="int8"))) == ["w0", "w1", "w2", "x0"]
        assert names(await client.list(identity=identity())) == ["w0", "w1", "w2"]
        assert names(await client.list(identity=identity(), status_filter=READY)) == ["w0", "w1"]
        assert names(await client.list(status_filter=0)) == ["w2"]
        assert names(await client.list(worker_rank_filter=0)) == ["w0", "x0"]
        assert names(await client.list(model_name_filter="other")) == ["x0"]
        assert await client.list(min_training_step=0) == []
        assert await client.list(status_filter=17) == []
        assert len(await client.list(limit=2)) == 2
        newest = max(one.updated_at for one in await client.list())
        assert await client.list(min_updated_at=newest + 1) == []


async def test_ready_lists_leave_out_who_has_not_been_heard_of(tmp_path: Path) -> None:
    """A heartbeat older than the limit is not READY; lists without the filter still have it."""
    backend = SqliteBackend(tmp_path / "db")
    async with serving(records=backend) as service, service.client() as client:
        source = await client.publish()
        now = (await client.list())[0].updated_at
        assert await backend.update_status(source, "w0", 0, SourceStatus.READY, now)
        service.methods._clock = lambda: (now + 90_000) * 1_000_000
        assert len(await client.list(status_filter=READY)) == 1
        service.methods._clock = lambda: (now + 90_001) * 1_000_000
        assert await client.list(status_filter=READY) == []
        assert len(await client.list()) == 1
        service.methods._clock = lambda: (now - 90_001) * 1_000_000  # a clock behind: age 0
        assert len(await client.list(status_filter=READY)) == 1


class Broken(SqliteBackend):
    """A backend that fails once it is told to."""

    error: Exception | None = None

    async def list_workers(self, *arguments: Any) -> Any:
        if self.error is not None:
            raise self.error
        return await super().list_workers(*arguments)

    async def get_metadata(self, *arguments: Any) -> Any:
        if self.error is not None:
            raise self.error
        return await super().get_metadata(*arguments)


async def test_an_outage_is_never_an_empty_answer(tmp_path: Path) -> None:
    """UNAVAILABLE for an outage, DATA_LOSS for a record that is not whole, INTERNAL for a fault of ours."""
    backend = Broken(tmp_path / "db")
    async with serving(records=backend) as service, service.client() as client:
        source = await client.publish()
        for error, code in (
            (UnavailableError("down"), CODE.UNAVAILABLE),
            (IntegrityError("cut"), CODE.DATA_LOSS),
            (KeyError("oops"), CODE.INTERNAL),
        ):
            backend.error = error
            assert (await refused(client.list()))[0] is code
            assert (await refused(client.get(source, "w0")))[0] is code
        assert "oops" not in (await refused(client.list()))[1]
        backend.error = UnavailableError("down")
        assert (await refused(client.status(source, "w0")))[0] is CODE.UNAVAILABLE
        assert (await refused(client.call("PublishMetadata", publication())))[0] is CODE.UNAVAILABLE
        backend.error = None
        assert (await client.get(source, "w0")).found


async def test_before_the_records_are_read_everything_is_unavailable() -> None:
    """Neither an empty list nor SERVING, until the backend is there."""
    async with serving() as service, service.client() as client:
        service.methods.ready = False
        assert (await refused(client.list()))[0] is CODE.UNAVAILABLE
        assert await health(client) == 2
        service.methods.ready = True
        assert await client.list() == []
        assert await health(client) == 1


async def health(client: Client, service: str = "") -> int:
    check = HEALTH.services["Health"]["Check"]
    call = client.channel.unary_unary(check.path, check.request.SerializeToString, check.response.FromString)
    return int((await call(check.request(service=service), timeout=20)).status)


async def test_health_is_told_and_reflection_is_not_there() -> None:
    """Check knows the service by name, Watch begins with the state, and nothing else is served."""
    async with serving() as service, service.client() as client:
        assert await health(client, "model_express.p2p.P2pService") == 1
        assert (await refused(health(client, "other")))[0] is CODE.NOT_FOUND
        watch = HEALTH.services["Health"]["Watch"]
        call: Any = client.channel.unary_stream(
            watch.path, watch.request.SerializeToString, watch.response.FromString
        )
        stream = call(watch.request(service="other"))
        assert (await stream.read()).status == 3
        stream.cancel()
        for path in ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "x/y"):
            other: Any = client.channel.unary_unary(f"/{path}")
            assert (await refused(other(b"")))[0] is CODE.UNIMPLEMENTED


async def test_health_is_looked_at_once_for_all_who_ask() -> None:
    """Hundreds may watch it, and a look goes over every record."""
    looks = Counter[str]()

    def serves() -> bool:
        looks["looks"] += 1
        return True

    methods = HealthMethods(("x",), serves, lambda _: None)
    context: Any = None
    for name in ("", "x") * 50:
        assert (await methods._check(HEALTH.HealthCheckRequest(service=name), context)).status == 1
    assert looks.total() < 50


async def test_only_a_watch_over_tcp_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token may be good no longer; on the Unix socket it goes on for as long as the caller likes."""
    monkeypatch.setattr("hibernode.metadata.service.WATCH_SECONDS", 0.05)
    watch = CHANGES.services["Changes"]["Watch"]
    async with serving() as service, service.client() as client, service.client(target=service.tcp) as far:

        def follow(who: Client) -> Any:
            call: Any = who.channel.unary_stream(
                watch.path, watch.request.SerializeToString, watch.response.FromString
            )
            return call(watch.request())

        here, there = follow(client), follow(far)
        assert [(await stream.read()).kind for stream in (here, there)] == [3, 3]
        code, text = await refused(there.read())
        assert (code, "begin again" in text) == (CODE.UNAVAILABLE, True)
        await client.publish()
        assert (await here.read()).worker_id == "w0"
        here.cancel()


# who may ------------------------------------------------------------------------------------------------


async def test_a_worker_publishes_for_its_own_pod_only() -> None:
    """Neither by naming another pod, nor over another's record, nor its status; reading is for all."""
    async with serving() as service:
        async with service.client(pod(A)) as worker:
            source = await worker.publish(pod_uid=A, pod_name="p", pod_namespace="n")
        async with service.client(pod(B)) as stranger:
            request = publication("w9", pod={"pod_uid": A, "pod_name": "p", "pod_namespace": "n"})
            for call in (
                stranger.call("PublishMetadata", request),
                stranger.call("PublishMetadata", publication("w0")),
                stranger.status(source, "w0", status=3),
            ):
                code, details = await refused(call)
                assert code is CODE.PERMISSION_DENIED
                assert "WrongPod" in details
            assert [one.worker_id for one in await stranger.list()] == ["w0"]
            assert (await stranger.get(source, "w0")).worker.status == READY
        async with service.client(target=service.tcp) as outside:
            assert (await refused(outside.status(source, "w0", status=3)))[0] is CODE.PERMISSION_DENIED
        async with service.client(Caller("uid:0")) as root:
            assert (await root.status(source, "w0", status=3)).success


async def test_the_process_that_published_is_known() -> None:
    """Its pidfd can then tell when the worker has ended."""
    async with serving() as service, service.client() as client:
        source = await client.publish()
        found = service.methods._gate.publisher((source, "w0"))
        assert found.key == f"uid:{os.getuid()}"
        assert found.process == read_stat(os.getpid()).key


async def test_without_a_pod_the_container_or_the_user_owns_a_record() -> None:
    """What belongs to one container, another one and another user cannot change; it holds after a restart."""
    one, other = Caller("container:1:x"), Caller("container:2:y")
    async with serving() as service:
        async with service.client(one) as worker:
            source = await worker.publish()
        service.methods._gate._claims.clear()
        for who in (other, Caller("uid:1000")):
            async with service.client(who) as stranger:
                assert (await refused(stranger.status(source, "w0", status=3)))[0] is CODE.PERMISSION_DENIED
        async with service.client(one) as worker:
            assert (await worker.status(source, "w0")).success


async def test_on_tcp_a_token_says_who_calls() -> None:
    """No token or a bad one is UNAUTHENTICATED, a good one is its pod's; an outage is UNAVAILABLE."""
    tokens = Tokens()
    async with serving(reviewer=tokens) as service, service.client(target=service.tcp) as client:
        listing = P2P.ListSourcesRequest()
        for token in ("", "bad", "x" * 9000):
            code = (await refused(client.call("ListSources", listing, token=token)))[0]
            assert code is CODE.UNAUTHENTICATED
        asked = tokens.asked
        for _ in range(5):
            await client.call("ListSources", listing, token="good")
        assert tokens.asked == asked + 1
        stolen = publication(pod={"pod_uid": B})
        code = (await refused(client.call("PublishMetadata", stolen, token="good")))[0]
        assert code is CODE.PERMISSION_DENIED
        assert (await client.call("PublishMetadata", publication(), token="good")).success
        async with service.client(pod(A)) as same_pod:
            assert len(await same_pod.list()) == 1
            source = (await same_pod.list())[0].mx_source_id
            assert (await same_pod.status(source, "w0")).success
        tokens.down = True
        assert (await refused(client.call("ListSources", listing, token="new")))[0] is CODE.UNAVAILABLE


async def test_accounts_that_are_not_named_are_refused() -> None:
    """A token of the cluster is not enough where accounts are named."""
    async with (
        serving(reviewer=Tokens(), accounts=("other",)) as service,
        service.client(target=service.tcp) as client,
    ):
        code, details = await refused(client.call("ListSources", P2P.ListSourcesRequest(), token="good"))
        assert (code, "AccountRefused" in details) == (CODE.PERMISSION_DENIED, True)


async def test_without_tokens_no_other_address_than_loopback_is_listened_on() -> None:
    """The agent says why it does not start."""
    with pytest.raises(UsageError, match="tokens"):
        async with serving(listen="0.0.0.0:0"):
            pass


STATUS: dict[str, Any] = {
    "authenticated": True,
    "user": {
        "username": "system:serviceaccount:ns:sa",
        "extra": {
            "authentication.kubernetes.io/pod-name": ["p"],
            "authentication.kubernetes.io/pod-uid": ["u"],
        },
    },
    "audiences": ["mx"],
}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (STATUS, Reviewed("system:serviceaccount:ns:sa", PodRef("p", "u", "ns"))),
        ({**STATUS, "user": {"username": "jane"}}, Reviewed("jane", None)),
        ({**STATUS, "user": {"username": "jane", "extra": STATUS["user"]["extra"]}}, Reviewed("jane", None)),
        ({**STATUS, "authenticated": "true"}, None),
        ({**STATUS, "error": "expired"}, None),
        ({**STATUS, "audiences": ["other"]}, None),
        ({**STATUS, "audiences": None}, None),
        ({**STATUS, "user": {"username": 5}}, None),
        ({**STATUS, "user": None}, None),
        (None, None),
    ],
)
def test_a_token_review_is_good_only_if_it_plainly_says_so(status: Any, expected: Reviewed | None) -> None:
    """The pod comes from the account's own claims, and only for a service account."""
    assert reviewed({"status": status}, ("mx",)) == expected


def test_the_outermost_container_below_the_agent_counts() -> None:
    """A pod cannot take another's name by making cgroups inside its own."""
    a, b, node = "a" * 64, "b" * 64, "c" * 64
    mine, lie = f"/kubepods/pod{A}/{a}", f"/kubepods/pod{A}/{a}/kubepods/pod{B}/{b}"
    assert outermost([lie]).pod_uid == A
    assert outermost([mine]).pod_uid == A
    around = f"/docker/{node}"
    assert outermost([around + lie], [f"{around}/kubepods/pod{B}/{b}"]).pod_uid == A
    assert outermost([around + lie]).pod_uid == ""
    assert outermost([around + lie]).id == node


async def test_a_pod_without_a_name_gets_no_owner_that_a_cluster_would_collect() -> None:
    """Only names that the caller told itself, for its own uid, reach an owner reference."""
    gate = Gate(keep_names=False)
    nameless = gate.owner(pod(A), PodRef("", "", ""))
    assert nameless == PodRef(NOBODY, A, NOBODY)
    assert owner_reference(nameless, "ns") == []
    assert gate.owner(Caller("uid:7"), PodRef("", "", "")) is None
    assert gate.owner(pod(A), PodRef("p", A, "n")) == PodRef("p", A, "n")
    assert gate.owner(pod(A, pod=PodRef("q", A, "m")), PodRef("p", A, "n")) == PodRef("q", A, "m")
