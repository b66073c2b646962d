"""``hibernode metadata`` against a real service over SQLite, and what hostile records get."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import stat
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from hibernode.cli.agent import _metadata
from hibernode.client import AgentClient
from hibernode.health import Health
from hibernode.metadata.nixl_check import BlobCheck, Verdict
from hibernode.metadata.part import MetadataPart
from hibernode.metrics import Metrics
from hibernode.server import Server
from hibernode.settings import ServerSettings, Settings
from tests.unit.cli_kit import ESCAPE, HIBERNODE, here, machine, sentence
from tests.unit.service_kit import Client, Running, serving
from tests.unit.test_nixl_blob import BLOB

__all__ = ["here", "machine"]  # fixtures

NAME = "mx-auto-worker0-0a1b2c3d"


@dataclass
class Agent:
    """An agent's server and metadata service in a thread of their own; ``do`` talks to the service there."""

    running: Running
    loop: asyncio.AbstractEventLoop

    def do(self, work: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
        """Let ``work`` have a client."""

        async def run() -> Any:
            async with self.running.client() as client:
                return await work(client)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    async def records(self, verb: str, query: Any) -> dict[str, Any]:
        """Answer as the agent does."""
        return await self.running.part.view(verb, query)


@asynccontextmanager
async def _serve(socket: Any, loop: asyncio.AbstractEventLoop) -> Any:
    async with serving() as running:
        agent = Agent(running, loop)
        settings = Settings(server=ServerSettings(listen="127.0.0.1:0", socket=socket))
        server = Server(settings, agent, Metrics(), Health())  # type: ignore[arg-type]
        await server.start()
        try:
            yield agent
        finally:
            await server.stop()


@pytest.fixture
def agent(machine) -> Iterator[Agent]:
    """Run an agent that has metadata and nothing else."""
    ready, stop, made = threading.Event(), asyncio.Event(), list[Agent]()

    async def run() -> None:
        async with _serve(machine.socket, asyncio.get_running_loop()) as agent:
            made.append(agent)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(60)
    yield made[0]
    made[0].loop.call_soon_threadsafe(stop.set)
    thread.join(60)


def publish(agent: Agent, *workers: str, **fields: Any) -> str:
    """Publish workers of one source, rank by rank, and return its id."""

    async def work(client: Client) -> str:
        ids = [await client.publish(name, rank, **fields) for rank, name in enumerate(workers)]
        return ids[0]

    return str(agent.do(work))


# lists ------------------------------------------------------------------------------------------------


def test_sources_are_listed_with_their_counts(agent, here):
    """Model, workers and statuses, for people and for machines."""
    id_ = publish(agent, "w0", "w1")
    agent.do(lambda client: client.status(id_, "w1", 1, 3))
    code, out, err = here("metadata", "sources")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[:4] == [id_, "org/model", "weights", "2"]
    assert "1 ready, 1 stale" in out
    (item,) = json.loads(here("metadata", "sources", "-o", "json")[1])["items"]
    assert (item["sourceId"], item["status"], item["local"]) == (id_, {"ready": 1, "stale": 1}, 2)
    (row,) = csv.DictReader(io.StringIO(here("metadata", "sources", "-o", "csv")[1]))
    assert row["status"] == "1 ready, 1 stale"


def test_workers_are_listed_by_a_part_of_the_id(agent, here):
    """Of one source only; of all without one."""
    id_ = publish(agent, "w0", "w1", worker_grpc_endpoint="10.0.0.9:6555")
    publish(agent, "w2", model="org/other")
    assert len(json.loads(here("metadata", "workers", "-o", "json")[1])["items"]) == 3
    items = json.loads(here("metadata", "workers", id_[:6], "-o", "json")[1])["items"]
    assert {item["workerId"] for item in items} == {"w0", "w1"}
    assert {item["node"] for item in items} == {"here"}
    assert "10.0.0.9:6555" in here("metadata", "workers", id_)[1]
    rows = list(csv.DictReader(io.StringIO(here("metadata", "workers", id_, "-o", "csv")[1])))
    assert {row["workerId"]: row["rank"] for row in rows} == {"w0": "0", "w1": "1"}


def test_ids_are_completed(agent, machine):
    """From the agent; without one, or with hostile ids, nothing is said."""
    id_ = publish(agent, "w0", "w1")
    for words, found in ((f"hibernode metadata workers {id_[:3]}", id_), ("hibernode metadata get w", "w0")):
        env = {"_HIBERNODE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "3"}
        assert f"plain,{found}\n" in machine.ok(**env)
    env["HIBERNODE_SERVER_SOCKET"] = "/nowhere/agent.sock"
    assert not machine.ok(**env).strip()


def test_nothing_published_is_said(agent, here):
    """No table without rows."""
    assert here("metadata", "sources")[1] == "no records\n"
    assert here("metadata", "workers")[1] == "no records\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("workers", "ffff"), 1, "no source is or begins with 'ffff'"),
        (("get", "nobody"), 1, "no worker is or begins with 'nobody'"),
        (("get", "w"), 2, "2 workers begin with 'w'"),
        (("get", "w" * 2000), 2, "no id has more than 63"),
        (("get", "x\x1b[31m"), 1, "begins with"),
        (("get", "w0", "--tensors", "--blob", "f"), 2, "two questions"),
        (("get", "w0", "--blob", "f"), 1, "there is no NIXL blob"),
        (("check", "w0"), 1, "there is no NIXL blob"),
        (("rm",), 2, "name a worker or a source"),
        (("rm", "w0"), 2, "this would remove the record of worker w0"),
        (("rm", "--source", "ffff", "--yes"), 1, "no source"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_done_is_said(agent, here, words, code, said):
    """A sentence and a remedy, and nothing is removed."""
    publish(agent, "w0", "w1")
    got, out, err = here("metadata", *words)
    assert (got, out) == (code, "")
    assert said in sentence(err)
    assert len(json.loads(here("metadata", "workers", "-o", "json")[1])["items"]) == 2


def test_a_worker_of_two_sources_wants_the_source(agent, here):
    """The error names both."""
    one, other = publish(agent, "w0"), publish(agent, "w0", model="org/other")
    code, _, err = here("metadata", "get", "w0")
    assert code == 2
    assert one in err
    assert other in err
    found = json.loads(here("metadata", "get", "w0", "--source", other, "-o", "json")[1])
    assert found["model"] == "org/other"


@pytest.mark.parametrize("words", [("sources",), ("workers",), ("get", "w"), ("check", "w"), ("watch",)])
def test_without_an_agent_it_is_said(here, words):
    """Exit 3."""
    code, out, err = here("metadata", *words)
    assert (code, out) == (3, "")
    assert "no agent" in sentence(err)


def test_the_numbers_of_the_service_are_in_a_scrape_and_in_the_docs(agent):
    """Every one of them, by its whole name."""
    publish(agent, "w0")
    metrics = Metrics()
    metrics.add_collector("metadata", agent.running.part.reading)
    scraped = asyncio.run(metrics.render()).decode()
    assert 'hibernode_metadata_records{status="ready"} 1.0' in scraped
    documented = (
        (Path(__file__).parents[2] / "docs/metadata-service.md").read_text().partition("## Metrics")[2]
    )
    for name, value in agent.running.part.reading().items():
        assert f"\n{name}" in scraped or value == {}  # nobody was refused, for one
        assert f"`{name.removeprefix('hibernode_metadata_')}`" in documented


def test_the_status_is_whole_before_the_service_runs():
    """An agent that has just begun is shown like any other."""
    part = MetadataPart(Settings(), CollectorRegistry())
    assert part.status()["ready"] is False
    assert _metadata(part.status())[0].endswith("not ready")


# one worker -------------------------------------------------------------------------------------------


def test_a_worker_is_shown_whole(agent, here):
    """Tensors are summed, and listed if that is wanted."""
    publish(agent, "w0", agent_name=NAME, nixl_metadata=BLOB, topology={"rack": "r1"})
    out = here("metadata", "get", "w0")[1]
    assert "tensors     2, 8.0 KiB: 2 torch.bfloat16, devices [0]" in out
    assert "rack=r1" in out
    assert NAME in out
    found = json.loads(here("metadata", "get", "w0", "--tensors", "-o", "json")[1])
    assert [tensor["name"] for tensor in found["tensorList"]] == ["layers.0.weight", "layers.1.weight"]
    assert found["tensors"]["bytes"] == 8192
    assert found["blobBytes"] == len(BLOB)
    assert "blob" not in found
    assert "layers.1.weight" in here("metadata", "get", "w0", "--tensors")[1]


def test_a_blob_is_written_for_root_alone_and_over_nothing(agent, here, tmp_path):
    """With --force it replaces a file, and a link rather than what the link names."""
    publish(agent, "w0", agent_name=NAME, nixl_metadata=BLOB)
    file, target = tmp_path / "blob", tmp_path / "target"
    assert here("metadata", "get", "w0", "--blob", str(file))[0] == 0
    assert file.read_bytes() == BLOB
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    target.write_text("mine")
    file.unlink()
    file.symlink_to(target)
    code, _, err = here("metadata", "get", "w0", "--blob", str(file))
    assert code == 4
    assert "is there already" in sentence(err)
    assert here("metadata", "get", "w0", "--blob", str(file), "--force")[0] == 0
    assert target.read_text() == "mine"
    assert file.read_bytes() == BLOB
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.fixture
def child(monkeypatch) -> list[BlobCheck]:
    """Answer in the place of the child that loads blobs."""
    answers: list[BlobCheck] = []

    async def answer(blob: bytes) -> BlobCheck:
        assert blob == BLOB
        return answers[-1]

    monkeypatch.setattr("hibernode.metadata.nixl_check.check_blob", answer)
    return answers


VERDICTS = [
    (BlobCheck(Verdict.LOADED, agent=NAME, version="1.5.1"), 0, "equal"),
    (BlobCheck(Verdict.LOADED, agent="somebody"), 5, "NOT equal"),
    (BlobCheck(Verdict.CRASHED, detail="SIGABRT"), 5, "crashed: SIGABRT"),
    (BlobCheck(Verdict.REFUSED, detail=f"no {ESCAPE}[31m"), 5, r"refused: no \x1b[31m"),
]


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda each: each[2])
def test_a_blob_is_tried_and_the_verdict_is_the_exit_code(agent, here, child, verdict):
    """The child's answer decides; tests/real tries the child itself."""
    result, code, said = verdict
    publish(agent, "w0", agent_name=NAME, nixl_metadata=BLOB)
    child.append(result)
    got, out, err = here("metadata", "check", "w0")
    assert (got, err) == (code, "")
    assert said in out
    assert json.loads(here("metadata", "check", "w0", "-o", "json")[1])["ok"] is (code == 0)


def test_a_blob_is_not_tried_without_nixl(agent, here, child):
    """That is no verdict on the blob."""
    publish(agent, "w0", agent_name=NAME, nixl_metadata=BLOB)
    child.append(BlobCheck(Verdict.NOT_INSTALLED, detail="No module"))
    code, out, err = here("metadata", "check", "w0")
    assert (code, out) == (1, "")
    assert "NIXL is not installed" in sentence(err)


# removal ----------------------------------------------------------------------------------------------


def test_a_worker_is_removed(agent, here):
    """The other one stays."""
    publish(agent, "w0", "w1")
    code, out, err = here("metadata", "rm", "w0", "--yes")
    assert (code, err) == (0, "")
    assert out.startswith("removed 1: the record of worker w0")
    items = json.loads(here("metadata", "workers", "-o", "json")[1])["items"]
    assert [item["workerId"] for item in items] == ["w1"]


def test_a_source_is_removed(agent, here):
    """All of its workers, and none of another source."""
    id_ = publish(agent, "w0", "w1")
    publish(agent, "w2", model="org/other")
    assert json.loads(here("metadata", "rm", "--source", id_[:8], "-y", "-o", "json")[1])["removed"] == 2
    items = json.loads(here("metadata", "workers", "-o", "json")[1])["items"]
    assert [item["workerId"] for item in items] == ["w2"]


def test_a_removal_wants_whole_ids_of_the_agent(agent, machine):
    """The socket takes no beginning of an id, and no path."""
    id_ = publish(agent, "w0")
    client = AgentClient(machine.socket)
    for query in ({"source": id_[:8]}, {"source": id_, "worker": "../w0"}, {"source": ""}, {}):
        with pytest.raises(Exception, match="is not a"):
            client.post("/v1/metadata/remove", **query)
    assert client.get("/v1/metadata/workers")["items"]


# changes ----------------------------------------------------------------------------------------------


def test_changes_are_followed(agent, machine):
    """First what there is, then what happens, a line of JSON each; Ctrl-C ends it."""
    id_ = publish(agent, "w0")
    words = [str(HIBERNODE), "metadata", "watch", id_[:8], "-o", "json"]
    process = subprocess.Popen(
        words, env=machine.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert (first["change"], first["workerId"], first["status"]) == ("put", "w0", "ready")
        assert json.loads(process.stdout.readline()) == {"change": "synced"}
        agent.do(lambda client: client.status(id_, "w0", 0, 3))
        assert json.loads(process.stdout.readline())["status"] == "stale"
        process.send_signal(2)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()


# hostile ----------------------------------------------------------------------------------------------

EVIL = f"org/{ESCAPE}]0;evil\x07\r\nFAKE ROW\u202e\x9b31m"


@pytest.mark.parametrize(
    "words", [("sources",), ("workers",), ("get", "w0"), ("get", "w0", "--tensors"), ("rm", "w0", "--yes")]
)
@pytest.mark.parametrize("form", ["table", "csv", "json", "yaml"])
def test_hostile_words_steer_no_terminal(agent, here, words, form):
    """Names that a worker chose are shown as escapes, and make no rows."""
    if form == "csv" and words[0] in ("get", "rm"):
        form = "table"
    publish(agent, "w0", model=EVIL, topology={EVIL: EVIL, "host": EVIL}, accelerator=EVIL)
    code, out, err = here("metadata", *words, "-o", form)
    assert (code, err) == (0, "")
    assert out.isascii() or form in ("table", "csv")
    assert all(line.isprintable() for line in out.splitlines())
    assert not any(line.startswith("FAKE ROW") for line in out.splitlines())


def test_a_long_word_takes_no_column_away(agent, here):
    """A table cuts it; JSON and a record alone have all of it."""
    long = "m" * 4000
    publish(agent, "w0", model=long, topology={"host": long}, worker_grpc_endpoint=long)
    for verb in ("sources", "workers"):
        _, out, _ = here("metadata", verb)
        assert max(map(len, out.splitlines())) < 400
    assert long in here("metadata", "get", "w0")[1]
    assert long in here("metadata", "sources", "-o", "json")[1]


def test_only_root_asks(agent, machine):
    """Blobs are secrets: the socket is for root, whoever may see the directory."""
    publish(agent, "w0", agent_name=NAME, nixl_metadata=BLOB)
    machine.socket.parent.chmod(0o755)
    machine.socket.chmod(0o666)
    machine.base.chmod(0o755)
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            AgentClient(machine.socket).get("/v1/metadata/worker", worker="w0", **{"with": "blob"})
        except BaseException:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
