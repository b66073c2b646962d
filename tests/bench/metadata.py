"""The metadata service of a real agent: answers to 64 clients, lists over 10,000 records, memory, start.

Lists are measured beside the seed's way, a LIST of the API server for each request, in turns in one run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from hibernode.client import AgentClient
from hibernode.errors import AgentUnreachableError
from hibernode.kube.api import KubeApi
from hibernode.metadata import proto
from hibernode.metadata.backends.kubernetes import KubernetesBackend
from hibernode.metadata.backends.sqlite import SqliteBackend
from hibernode.metadata.identity import mx_source_id
from hibernode.metadata.mapping import LABEL_SOURCE
from hibernode.metadata.records import SourceIdentity
from hibernode.metadata.wire import identity_message
from tests.bench.agent import cpu_seconds, rss_mib
from tests.bench.measure import Report, percentile
from tests.cluster.kube import Kube
from tests.cluster.program import PROGRAMS
from tests.real.node import Node, until
from tests.unit.metadata_kit import BASE, central, peer, tensors

P2P = proto.load("p2p")
CLIENTS, PROCESSES = 64, 2
LOADS = (
    ("1 client, no pause", 1, 0.0),
    (f"{CLIENTS} clients, one request a second each", CLIENTS, 1.0),
    (f"{CLIENTS} clients, no pause", CLIENTS, 0.0),
)
"""Title, clients, seconds from one request of a client to its next."""
WORKERS = 10
"""Of a source in the store of many records."""

GET_P99_SECONDS, LIST_P50_SECONDS = 0.002, 0.005
CRD = Path(__file__).parents[2] / "daemonset/crds/modelmetadata.yaml"
POPULATING = 16
START_SECONDS = 300.0


def measure(report: Report, base: Path, *, quick: bool) -> None:
    """Measure all of it; what needs an API server is left out, and said, where it is not built."""
    records = 500 if quick else 10_000
    with _node(base, "get") as made:
        _gets(report, made, 2.0 if quick else 10.0)
    with _node(base, "many") as made:
        _many(report, made, records, 100 if quick else 1000)
    missing = [name for name in ("etcd", "kube-apiserver", "kubectl") if not (PROGRAMS / name).exists()]
    if missing:
        report.section(
            f"lists beside an API server: left out, {', '.join(missing)} missing: make cluster-tools"
        )
        return
    with _node(base, "cluster") as made:
        _beside(report, made, records, 10 if quick else 20)


@contextlib.contextmanager
def _node(base: Path, name: str) -> Iterator[Node]:
    directory = base / f"metadata-{name}"
    directory.mkdir(mode=0o700)
    made = Node(directory)
    made.config = {
        "STORE_MIN_FREE_BYTES": "0",
        "METADATA_ENABLED": "true",
        "METADATA_LISTEN": "",
        "METADATA_SOCKET": str(directory / "mx" / "mx.sock"),
        "METADATA_CONNECTIONS": "1024",
        "METADATA_REQUESTS": "1024",
    }
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory, ignore_errors=True)


def _start(made: Node) -> tuple[int, float]:
    """Start an agent; its pid, and the seconds until it has its records."""
    began = time.monotonic()
    agent = made.start_agent(wait=False)
    client = AgentClient(made.socket)

    def has_records() -> bool:
        assert agent.poll() is None, made.tail()
        try:
            return bool(client.get("/v1/status")["metadata"]["ready"])
        except AgentUnreachableError:
            return False
        finally:
            time.sleep(0.02)  # each question takes the agent some time of its start

    until("records", has_records, START_SECONDS)
    return agent.pid, time.monotonic() - began


def _socket(made: Node) -> str:
    return made.config["METADATA_SOCKET"]


@contextlib.contextmanager
def _channel(made: Node) -> Iterator[Any]:
    options = [("grpc.max_receive_message_length", 100 << 20)]
    with grpc.insecure_channel(f"unix:{_socket(made)}", options) as channel:

        def call(name: str, request: Any) -> Any:
            method = P2P.services["P2pService"][name]
            return channel.unary_unary(
                method.path, method.request.SerializeToString, method.response.FromString
            )(request, wait_for_ready=True, timeout=60)

        yield call


# one record, 64 clients -------------------------------------------------------------------------------


def _gets(report: Report, made: Node, seconds: float) -> None:
    pid, _ = _start(made)
    worker = P2P.WorkerMetadata(agent_name="w", nixl_metadata=bytes(64 << 10))
    worker.tensor_source.tensors.extend(
        P2P.TensorDescriptor(
            name=f"model.layers.{n // 256}.mlp.experts.{n % 256}.down_proj.weight",
            addr=(127 << 40) + n * 4096,
            size=4096,
            dtype="torch.bfloat16",
        )
        for n in range(1270)
    )
    request = P2P.PublishMetadataRequest(identity=identity_message(BASE), worker=worker, worker_id="w0")
    with _channel(made) as call:
        answer = call("PublishMetadata", request)
        assert answer.success, answer.message
        source = str(answer.mx_source_id)
        size = call("GetMetadata", P2P.GetMetadataRequest(mx_source_id=source, worker_id="w0")).ByteSize()
    report.section(f"GetMetadata of {size >> 10} KiB on the Unix socket, {PROCESSES} client processes")
    _floor(report, made.base / "floor.sock", size, seconds)
    for title, clients, pause in LOADS:
        before = (*_handled(made), cpu_seconds(pid))
        times = _clients(_socket(made), clients, seconds, pause, source)
        after = (*_handled(made), cpu_seconds(pid))
        count, spent, cpu = (now - then for now, then in zip(after, before, strict=True))
        name = f"GetMetadata, {title}"
        report.add(name, "s", times)
        report.add(f"{name}: p99", "s", [percentile(times, 0.99)], "< 0.002", GET_P99_SECONDS)
        report.add(f"{name}: of it in the handler, mean", "s", [spent / count])
        report.add(f"{name}: CPU of the agent each", "s", [cpu / count])
        if not pause:
            report.add(f"{name}: answers", "1/s", [len(times) / seconds])


def _floor(report: Report, socket: Path, size: int, seconds: float) -> None:
    """Measure a bare gRPC server of as many bytes: below it, no handler in Python can come."""
    command = [sys.executable, "-m", "tests.bench.metadata_floor", str(socket), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            for title, clients, pause in LOADS:
                before = cpu_seconds(server.pid)
                times = _clients(str(socket), clients, seconds, pause, "bare")
                name = f"bare gRPC, {title}"
                report.add(name, "s", times)
                report.add(f"{name}: p99", "s", [percentile(times, 0.99)])
                report.add(f"{name}: CPU each", "s", [(cpu_seconds(server.pid) - before) / len(times)])
        finally:
            server.kill()


def _clients(socket: str, clients: int, seconds: float, pause: float, source: str) -> list[float]:
    """Run clients in processes of their own; seconds of each answer."""
    processes = min(PROCESSES, clients)
    words = [socket, str(clients // processes), str(seconds), str(pause), source, "w0"]
    command = [sys.executable, "-m", "tests.bench.metadata_client", *words]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    try:
        for each in running:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        for each in running:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        return [value for each in running for value in json.loads(each.communicate()[0])]
    finally:
        for each in running:
            each.kill()
            each.wait()


def _handled(made: Node) -> tuple[float, float]:
    """Read how many GetMetadata were handled, and in how many seconds, from the agent's metrics."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{made.port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    name, label = "hibernode_metadata_request_seconds", '{method="GetMetadata"}'
    return tuple(float(values.get(f"{name}_{what}{label}", 0)) for what in ("count", "sum"))  # type: ignore[return-value]


# 10,000 records of 1,000 tensors ----------------------------------------------------------------------


def _identity(number: int) -> SourceIdentity:
    return replace(BASE, model_name=f"org/model-{number}")


def _many(report: Report, made: Node, records: int, tensor_count: int) -> None:
    report.section(f"SQLite, {records} records of {tensor_count} tensors and 4 KiB")
    pid, seconds = _start(made)
    report.add("agent with no records: start to ready", "s", [seconds])
    report.add("agent with no records: memory", "MiB", [rss_mib(pid)])
    made.agents[-1].terminate()
    made.agents[-1].wait()
    _fill(made.state / "metadata" / "records.db", records, tensor_count)
    pid, seconds = _start(made)
    report.add(f"agent with {records}: start to ready", "s", [seconds])
    report.add(f"agent with {records}: memory", "MiB", [rss_mib(pid)])
    with _channel(made) as call:
        for number in range(records // 5):
            ids = {"mx_source_id": mx_source_id(_identity(number // 2)), "worker_id": f"w{number % 2}"}
            found = call("GetMetadata", P2P.GetMetadataRequest(**ids))
            assert len(found.worker.tensors or found.worker.tensor_source.tensors) == tensor_count
        report.add(f"agent with {records}: memory, {records // 5} read", "MiB", [rss_mib(pid)])
        times = _timed(50, lambda turn: call("ListSources", _filtered(turn, records)))
        report.add(f"ListSources of one source in {records}, SQLite", "s", times, "< 0.005", LIST_P50_SECONDS)
        times = _timed(5, lambda _: call("ListSources", P2P.ListSourcesRequest()))
        report.add(f"ListSources of all {records}, SQLite", "s", times)


def _fill(path: Path, records: int, tensor_count: int) -> None:
    """Publish the first worker of each source; its file's row is copied for the others."""

    async def publish() -> None:
        backend = SqliteBackend(path)
        await backend.connect()
        worker = central(blob=bytes(4096), tensors=tensors(tensor_count))
        for number in range(records // WORKERS):
            await backend.publish_metadata(_identity(number), "w0", worker)
        await backend.close()

    asyncio.run(publish())
    with contextlib.closing(sqlite3.connect(path)) as db:
        names = [row[1] for row in db.execute("PRAGMA table_info(records)")]
        own = {"worker_id": "?", "uid": "lower(hex(randomblob(16)))"}
        chosen = ", ".join(own.get(name, name) for name in names)
        for number in range(1, WORKERS):
            db.execute(
                f"INSERT INTO records SELECT {chosen} FROM records WHERE worker_id = 'w0'",
                (f"w{number}",),
            )
        db.commit()


def _filtered(turn: int, records: int) -> Any:
    return P2P.ListSourcesRequest(identity=identity_message(_identity(turn * 7 % (records // WORKERS))))


def _timed(turns: int, work: Any) -> list[float]:
    times = []
    for turn in range(turns):
        began = time.monotonic()
        work(turn)
        times.append(time.monotonic() - began)
    return times


# beside the API server --------------------------------------------------------------------------------


def _beside(report: Report, made: Node, records: int, turns: int) -> None:
    """Measure our lists and the seed's in turns."""
    folder = made.base / "kube"
    folder.mkdir()
    kube = Kube(folder)
    try:
        kube.apply(CRD)
        namespace = kube.namespace("bench")
        asyncio.run(_publish_all(kube, namespace, records))
        made.config |= {
            "METADATA_BACKEND": "kubernetes",
            "METADATA_NAMESPACE": namespace,
            "METADATA_KUBECONFIG": str(kube.admin),
        }
        report.section(f"a real API server with {records} records, our lists and the seed's in turns")
        pid, seconds = _start(made)
        report.add(f"agent, start to the list of {records} from the API server", "s", [seconds])
        report.add(f"agent with {records} of the API server: memory", "MiB", [rss_mib(pid)])
        ours, seeds = asyncio.run(_in_turns(made, kube, namespace, records, turns))
        report.add(f"ListSources of one source in {records}: ours", "s", ours, "< 0.005", LIST_P50_SECONDS)
        report.add(f"ListSources of one source in {records}: a LIST each", "s", seeds)
        report.ratio(f"ListSources of one source in {records}: ours / LIST", ours, seeds, "< 1", 1.0)
    finally:
        kube.close()


async def _publish_all(kube: Kube, namespace: str, records: int) -> None:
    backend = KubernetesBackend(KubeApi(kube.configuration()), namespace)
    numbers = iter(range(records))

    async def some() -> None:
        for number in numbers:
            await backend.publish_metadata(_identity(number // WORKERS), f"w{number % WORKERS}", peer())

    await asyncio.gather(*(some() for _ in range(POPULATING)))
    await backend.close()


async def _in_turns(
    made: Node, kube: Kube, namespace: str, records: int, turns: int
) -> tuple[Sequence[float], Sequence[float]]:
    """Time both ways to one source's workers, each first in every other turn; both answers are whole."""
    ours: list[float] = []
    seeds: list[float] = []
    path = f"/apis/modelexpress.nvidia.com/v1alpha1/namespaces/{namespace}/modelmetadatas"
    method = P2P.services["P2pService"]["ListSources"]
    api = KubeApi(kube.configuration())
    async with grpc.aio.insecure_channel(f"unix:{_socket(made)}") as channel:
        call = channel.unary_unary(method.path, method.request.SerializeToString, method.response.FromString)

        async def our(turn: int) -> None:
            began = time.monotonic()
            found = await call(_filtered(turn, records), wait_for_ready=True)
            ours.append(time.monotonic() - began)
            assert len(found.instances) == WORKERS

        async def seed(turn: int) -> None:
            id_ = mx_source_id(_identity(turn * 7 % (records // WORKERS)))
            began = time.monotonic()
            found = await api.call(
                "GET", path, api.budget(), query={"labelSelector": f"{LABEL_SOURCE}={id_}"}
            )
            seeds.append(time.monotonic() - began)
            assert len(found["items"]) == WORKERS

        for turn in range(turns + 5):
            for each in (our, seed) if turn % 2 else (seed, our):
                await each(turn)
    await api.close()
    return ours[5:], seeds[5:]
