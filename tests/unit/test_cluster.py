"""The agent's part in a cluster, piece by piece: what waits, what is known, what is done in a container."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hibernode.answers import Outcome, Request, Trigger
from hibernode.cli.agent import _kubernetes
from hibernode.cluster import inside, node
from hibernode.cluster.checkpoints import Checkpoints
from hibernode.cluster.outbox import FORBIDDEN_TRIES, Outbox
from hibernode.cluster.part import versions, wanted
from hibernode.cluster.pods import Kind, Ref, ask_of
from hibernode.cluster.roster import Entry, Roster
from hibernode.cluster.shared import MISSING_SECONDS, Shared, locate
from hibernode.cluster.teller import Teller
from hibernode.discovery.locate import Contract
from hibernode.errors import RefusedError, UnavailableError
from hibernode.gpu.state import Gpu, GpuState, Happened, NvmlState, Snapshot
from hibernode.host.procfs import Process
from hibernode.kube.api import MERGE, KubeApi, KubeStatusError
from hibernode.kube.events import BURST
from hibernode.kube.lease import Lease
from hibernode.kube.names import ERAS, TRUE
from hibernode.settings import CriuSettings, GpuSettings, KubernetesSettings, Settings
from hibernode.workload import CheckpointId
from tests.unit.box_kit import box
from tests.unit.test_pods import CONTAINER, ID, NODE, UID, pod, source

A1, B, C = ERAS
DEADLINE = 60.0


class Server:
    """Takes messages, or not: ``error`` is raised while it is set."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.tries = 0
        self.error: Exception | None = None

    def send(self, text: str) -> Callable[[], Awaitable[None]]:
        """Make a message."""

        async def send() -> None:
            self.tries += 1
            if self.error is not None:
                raise self.error
            self.taken.append(text)

        return send


async def until(test: Callable[[], object]) -> None:
    """Wait until ``test`` gives something true."""
    async with asyncio.timeout(DEADLINE):
        while not test():
            await asyncio.sleep(0.001)


@pytest.fixture
async def outbox() -> Any:
    """Run an outbox that keeps three messages."""
    made = Outbox(kept=3)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_cannot_be_told_waits_and_goes_in_order(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage loses nothing; the newest under a key replaces the older one."""
    monkeypatch.setattr("hibernode.cluster.outbox.LONGEST_PAUSE", 0.01)
    server = Server()
    server.error = UnavailableError("away")
    outbox.put(server.send("one"))
    outbox.put(server.send("old status"), "status")
    outbox.put(server.send("new status"), "status")
    await until(lambda: server.tries > 2)
    assert len(outbox) == 2
    server.error = None
    await until(lambda: not len(outbox))
    assert (server.taken, outbox.lost) == (["one", "new status"], 0)


async def test_what_is_refused_is_given_up_and_counted(outbox: Outbox) -> None:
    """The object has gone, or the message is wrong; the next one is not held up by it."""
    server = Server()
    for error in (KubeStatusError(404, "NotFound", "gone"), ValueError("a fault of ours")):
        server.error = error
        before = outbox.lost
        outbox.put(server.send("x"))
        await until(lambda: outbox.lost > before)  # noqa: B023 - it is awaited here
    server.error = None
    outbox.put(server.send("next"))
    await until(lambda: server.taken == ["next"])


async def test_what_is_forbidden_for_a_while_is_told_later(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server that has just started knows no roles; what others are told goes meanwhile."""
    monkeypatch.setattr("hibernode.cluster.outbox.LONGEST_PAUSE", 0.001)
    forbidding, other = Server(), Server()
    forbidding.error = UnavailableError("may not", reason="ApiForbidden")
    outbox.put(forbidding.send("early"))
    outbox.put(other.send("another"))
    await until(lambda: other.taken and forbidding.tries > 2)
    outbox.put(other.send("later"))
    await until(lambda: other.taken == ["another", "later"])
    forbidding.error = None
    await until(lambda: not len(outbox))
    assert (forbidding.taken, outbox.lost) == (["early"], 0)
    forbidding.error = UnavailableError("may not", reason="ApiForbidden")
    tries = forbidding.tries
    outbox.put(forbidding.send("never"))
    await until(lambda: outbox.lost)
    assert (forbidding.tries - tries, len(outbox)) == (FORBIDDEN_TRIES, 0)


def test_an_outage_uses_up_no_budget_of_events() -> None:
    """An event counts when it happens, not whenever the outbox tries it."""
    teller = Teller(Outbox(), NODE)
    for number in range(BURST + 2):
        teller.event(Ref("Pod", "ns", "p", UID), "Normal", "Reason", f"text {number}")
    assert len(teller.outbox) == BURST


async def test_the_oldest_are_lost_when_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded however long an outage lasts."""
    made, server = Outbox(kept=3), Server()
    for number in range(5):
        made.put(server.send(str(number)))
    task = asyncio.create_task(made.run())
    await until(lambda: len(server.taken) == 3)
    task.cancel()
    assert (server.taken, made.lost) == (["2", "3", "4"], 2)


async def test_a_message_that_cannot_go_at_once_waits_with_the_others(outbox: Outbox) -> None:
    """Whoever sends it waits for no longer than he said."""
    server = Server()
    assert await outbox.now(server.send("first"), "key", 5.0)
    server.error = UnavailableError("away")
    assert not await outbox.now(server.send("second"), "key", 5.0)
    server.error = None
    await until(lambda: server.taken == ["first", "second"])


def kept(raw: dict[str, Any], version: int, **metadata: Any) -> dict[str, Any]:
    """Give a pod a resource version."""
    raw["metadata"] |= {"resourceVersion": str(version), **metadata}
    return raw


def test_pods_are_known_by_uid_and_never_by_name() -> None:
    """A new pod of the same name is another; the old one's deletion does not take it away."""
    roster = Roster(NODE, lambda: None)
    other = UID.replace("0", "1")
    roster.apply(kept(pod(source(A1)), 5))
    roster.entries[UID].settled = True
    roster.apply(kept(pod(source(A1)), 7, uid=other))
    roster.gone(kept(pod(source(A1)), 8))
    assert list(roster.entries) == [other]
    assert not roster.entries[other].settled


def test_an_older_state_changes_nothing_and_a_list_drops_what_it_lacks() -> None:
    """Events may come late; what was made after the list was taken stays."""
    roster = Roster(NODE, lambda: None)
    roster.apply(kept(pod(source(A1)), 9))
    roster.apply(kept(pod({}), 8))
    assert list(roster.entries) == [UID]
    roster.listed({}, "8")
    assert list(roster.entries) == [UID]
    roster.listed({}, "9")
    assert not roster.entries
    assert len(roster) == 0


def test_pods_that_ask_for_nothing_are_only_counted() -> None:
    """A node has hundreds of them."""
    roster = Roster(NODE, lambda: None)
    roster.apply(kept(pod({"app": "web"}), 1))
    assert (len(roster), roster.entries) == (1, {})
    assert roster.of_kind(Kind.CHECKPOINT) == []


def test_another_run_of_the_container_is_asked_for_anew() -> None:
    """A restarted container is another worker, also with an empty status in between; so is another id."""
    roster = Roster(NODE, lambda: None)
    roster.apply(kept(pod(source(A1)), 1))
    first = roster.entries[UID]
    roster.apply(kept(pod(source(A1), status={"containerStatuses": []}), 2))
    assert roster.entries[UID] is first
    again = pod(source(A1))
    again["status"]["containerStatuses"][0]["containerID"] = "containerd://" + "cd" * 32
    roster.apply(kept(again, 3))
    assert roster.entries[UID] is not first
    second = roster.entries[UID]
    roster.apply(kept(pod({A1.source: TRUE, A1.ids[0]: "0" * 12}), 4))
    assert roster.entries[UID] is not second


async def test_a_container_that_is_not_there_is_a_failure_only_if_the_api_server_was_heard_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kubelet is a moment late to say that one has ended, and cannot say it in an outage."""
    roster = Roster(NODE, lambda: None)
    roster.apply(kept(pod(source(A1)), 1))
    entry = roster.entries[UID]
    now = [1000.0]
    monkeypatch.setattr("hibernode.cluster.shared.time.monotonic", lambda: now[0])
    assert await locate(entry, heard=now[0]) is None
    now[0] += MISSING_SECONDS + 1
    assert await locate(entry, heard=1000.0) is None
    now[0] += 2
    problem = await locate(entry, heard=now[0])
    assert problem is not None
    assert problem.reason == "ContainerNotFound"
    assert CONTAINER in problem.message


def test_a_signal_file_is_written_as_the_container_sees_its_path(tmp_path: Path) -> None:
    """Whole, under its own name; a link under that name is replaced and not followed."""
    (tmp_path / "root").mkdir()
    script = "mkdir data/s; ln -s /data/s data/link; echo kept >data/victim"
    with box(tmp_path / "root", script) as pid, Process.open(pid) as process:
        inside.write_signal(process, f"/data/link/{ID}.done", CheckpointId(ID), b"answer")
        os.symlink("/data/victim", f"/proc/{pid}/root/data/s/{ID}.done.link")
        assert Path(f"/proc/{pid}/root/data/s/{ID}.done").read_bytes() == b"answer"
        os.replace(f"/proc/{pid}/root/data/s/{ID}.done.link", f"/proc/{pid}/root/data/s/{ID}.done")
        inside.write_signal(process, f"/data/s/{ID}.done", CheckpointId(ID), b"again")
        assert Path(f"/proc/{pid}/root/data/victim").read_bytes() == b"kept\n"
        for path in (f"/proc/1/root/tmp/{ID}.done", f"/absent/{ID}.done", f"/data/victim/{ID}.done"):
            with pytest.raises(OSError):
                inside.write_signal(process, path, CheckpointId(ID), b"x")
        for name in ("passwd", f"{'0' * 12}.done"):
            with pytest.raises(RefusedError) as caught:
                inside.write_signal(process, f"/data/s/{name}", CheckpointId(ID), b"x")
            assert caught.value.reason == "WrongSignalFile"


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that says a word when it is ready."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as run:
        assert run.stdout
        assert run.stdout.readline()
        yield run
        run.kill()


HANDLER = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5)); print(1, flush=True)"
WRAPPED = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {HANDLER + "; signal.pause()"!r}])
sys.exit(child.wait())
"""


def test_a_signal_goes_to_the_topmost_process_that_handles_it() -> None:
    """A shell that wraps the worker gets none; it would be killed by it, or as pid 1 not notice."""
    with running(WRAPPED) as run, Process.open(run.pid) as root:
        assert inside.tell(root, signal.SIGUSR1) != run.pid
        assert run.wait(timeout=DEADLINE) == 5


def test_nobody_is_signalled_who_does_not_handle_it() -> None:
    """The default action would end it, as if it had failed."""
    with running("print(1, flush=True); input()") as run, Process.open(run.pid) as root:
        with pytest.raises(RefusedError) as caught:
            inside.tell(root, signal.SIGUSR1)
        assert caught.value.reason == "SignalNotCaught"
        assert run.poll() is None


GPU = Gpu("GPU-1", 0, GpuState.OK)


@pytest.mark.parametrize(
    ("snapshot", "status", "reason"),
    [
        (Snapshot(NvmlState.UP, gpus=(GPU,)), "False", "GpusWell"),
        (Snapshot(NvmlState.UP, gpus=(Gpu("GPU-1", 0, GpuState.FAILED, "lost"),)), "True", "GpuLost"),
        (Snapshot(NvmlState.STUCK, "no answer"), "True", "NvmlDown"),
        (Snapshot(NvmlState.STARTING), "Unknown", "Starting"),
        (
            Snapshot(
                NvmlState.UP, gpus=(GPU,), happened=(Happened("GPU-1", "xid", 79, 1, 0, 0),), fatal_xids=(79,)
            ),
            "True",
            "GpuXidFatal",
        ),
        (
            Snapshot(
                NvmlState.UP, gpus=(GPU,), happened=(Happened("GPU-1", "xid", 13, 1, 0, 0),), fatal_xids=(79,)
            ),
            "False",
            "GpusWell",
        ),
    ],
)
def test_the_nodes_condition_says_whether_its_gpus_are_well(
    snapshot: Snapshot, status: str, reason: str
) -> None:
    """True is the bad case; an XID that is not fatal is none."""
    judged = node.condition(snapshot)
    assert judged is not None
    assert judged[:2] == (status, reason)
    (patched,) = node.condition_patch(judged, changed=True)["status"]["conditions"]
    assert patched["lastTransitionTime"] == patched["lastHeartbeatTime"]


def test_a_node_without_a_driver_gets_no_condition_and_bad_values_no_label() -> None:
    """What a label cannot hold is taken away; free space is told in whole GiB."""
    assert node.condition(Snapshot(NvmlState.ABSENT)) is None
    found = node.facts("4.1.1", "no label", (5 << 30) + 7)["metadata"]
    assert found["labels"] == {node.CRIU: "4.1.1", node.CUDA_CHECKPOINT: None}
    assert found["annotations"] == {node.FREE: str(5 << 30)}


def test_the_nodes_labels_tell_what_may_be_run(tmp_path: Path) -> None:
    """The tool of the settings, at its own version; one that others than root can change is none."""
    tool = tmp_path / "cuda-checkpoint"
    tool.write_text("#!/bin/sh\necho Version 580.65.06. --action\n")
    tool.chmod(0o755)
    settings = Settings(criu=CriuSettings(binary="/no/such/criu"), gpu=GpuSettings(cuda_checkpoint=str(tool)))
    assert versions(settings) == (None, "580.65.06")
    tool.chmod(0o777)
    assert versions(settings) == (None, None)


@pytest.mark.parametrize(("value", "taken"), [("auto", "auto"), (True, "on"), (False, "off"), ("off", "off")])
def test_on_and_off_may_be_yamls_booleans(value: object, taken: str) -> None:
    """YAML has no other way to write them without quotes."""
    assert KubernetesSettings(enabled=value).enabled == taken


def test_a_cluster_is_served_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told so, given a kubeconfig, or in a pod with a service account."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert not wanted(Settings())
    assert wanted(Settings(kubernetes=KubernetesSettings(enabled="on")))
    assert wanted(Settings(kubernetes=KubernetesSettings(kubeconfig="/k")))
    assert not wanted(Settings(kubernetes=KubernetesSettings(enabled="off", kubeconfig="/k")))


def test_an_answered_worker_may_ask_again() -> None:
    """By a new file in the signal directory; all is said anew then."""
    roster = Roster(NODE, lambda: None)
    roster.apply(kept(pod(source(A1)), 1))
    entry = roster.entries[UID]
    entry.settled, entry.trigger = True, Trigger.SIGNAL
    assert entry.first("outcome")
    entry.ask_again()
    assert not entry.settled
    assert entry.first("outcome")
    assert Outcome(CheckpointId(ID), success=True).answered


async def test_a_dump_whose_lease_another_has_taken_is_undone_and_not_answered() -> None:
    """Whoever has the Lease tells the worker; an API server that is away takes none from us."""
    undone = asyncio.Event()

    async def dump(_request: Request) -> Outcome:
        try:
            await asyncio.Event().wait()
        finally:
            undone.set()
        raise AssertionError

    asks: list[bool | Exception] = [True, UnavailableError("away"), True, False]

    class Held:
        async def ask(self) -> bool:
            answer = asks.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    ask = ask_of(pod(source(C), metadata={"ownerReferences": [JOB]}), NODE)
    assert ask is not None
    shared = SimpleNamespace(
        requests=SimpleNamespace(parts=SimpleNamespace(checkpointer=SimpleNamespace(run=dump)))
    )
    checkpoints = Checkpoints(cast("Shared", shared), renew_seconds=0.001)
    checkpoints._leases[UID] = cast("Lease", Held())
    with Process.open(os.getpid()) as process:
        request = Request(CheckpointId(ID), process, Contract(), Trigger.READY_FILE)
        outcome = await checkpoints._leased(ask, request)
    assert undone.is_set()
    assert (outcome.success, outcome.answered, outcome.reason) == (False, False, "LeaseLost")
    assert asks == []


class Patched:
    """An API server that takes patches and nothing else."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, dict[str, Any]]] = []

    def budget(self) -> None:
        """Give no limit."""

    async def call(
        self, method: str, path: str, _budget: None, *, body: dict[str, Any], content: str
    ) -> None:
        """Note a merge patch."""
        assert (method, content) == ("PATCH", MERGE)
        self.taken.append((path, body["metadata"]))


JOB = {"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": UID, "controller": True}


@pytest.mark.parametrize(("success", "word"), [(True, "completed"), (False, "failed")])
async def test_the_job_of_a_pod_of_era_a1_is_told_later_if_it_cannot_be_now(success: bool, word: str) -> None:
    """By era C's annotation, but the worker waits for nobody, and no Lease is asked for."""
    outbox, server = Outbox(), Patched()
    teller = Teller(outbox, NODE)
    checkpoints = Checkpoints(cast("Shared", SimpleNamespace(teller=teller)))
    ask = ask_of(pod(source(A1), metadata={"ownerReferences": [JOB]}), NODE)
    assert ask is not None
    await checkpoints._tell_status(ask, success=success)  # there is no API server yet
    assert len(outbox) == 1
    teller.connect(cast("KubeApi", server))
    assert await checkpoints._may_begin(Entry(ask, "1"))
    task = asyncio.create_task(outbox.run())
    await until(lambda: not len(outbox))
    task.cancel()
    told = {"uid": UID, "annotations": {"nvidia.com/snapshot-checkpoint-status": word}}
    assert server.taken == [("/apis/batch/v1/namespaces/workers/jobs/job", told)]


async def test_nobody_is_told_where_a_pod_of_era_a1_has_no_job() -> None:
    """An owner of another kind, or one that only has the name of a Job, is none."""
    outbox = Outbox()
    checkpoints = Checkpoints(cast("Shared", SimpleNamespace(teller=Teller(outbox, NODE))))
    for owner in ({**JOB, "kind": "ReplicaSet"}, {**JOB, "controller": False}, {**JOB, "uid": "../x"}):
        ask = ask_of(pod(source(A1), metadata={"ownerReferences": [owner]}), NODE)
        assert ask is not None
        await checkpoints._tell_status(ask, success=True)
    assert not len(outbox)


def test_the_status_command_names_each_pod_that_asks() -> None:
    """A machine without a cluster has no line of it."""
    pod_said = {"namespace": "workers", "name": "w0", "kind": "checkpoint", "id": ID, "state": "found"}
    said = {"pods": 7, "namespace": "", "synced": False, "trouble": "", "untold": 2, "asking": [pod_said]}
    assert _kubernetes(said) == [
        "kubernetes 7 pods of all namespaces, not heard: the API server is away; 2 messages wait",
        f"  workers/w0: checkpoint {ID}, found",
    ]
    assert _kubernetes(None) == []
