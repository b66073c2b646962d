"""The server over real sockets: who may ask, what is answered, and what a hostile peer gets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hibernode.client import AgentClient
from hibernode.errors import (
    AgentUnreachableError,
    BusyError,
    HibernodeError,
    NotFoundError,
    RefusedError,
    StorageError,
    UsageError,
)
from hibernode.health import Check, DegradedError, Health, in_thread
from hibernode.listen import SocketLock
from hibernode.metrics import Metrics
from hibernode.server import Limits, Server
from hibernode.settings import ServerSettings, Settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

ID = "96429b272576"
NOBODY = 65534
T = TypeVar("T")


class Agent:
    """The API's other side."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def _note(self, *call: Any) -> None:
        self.asked.append(call)
        if self.error is not None:
            raise self.error

    def status(self) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        self._note("status")
        return {"version": "1", "pid": os.getpid()}

    def events(self, limit: int) -> list[dict[str, Any]]:
        self._note("events", limit)
        return [{"reason": "R"}]

    def jobs(self) -> list[dict[str, Any]]:
        self._note("jobs")
        return []

    def gpu(self) -> dict[str, Any]:
        self._note("gpu")
        return {"gpus": []}

    async def records(self, verb: str, query: Mapping[str, str]) -> dict[str, Any]:
        self._note("records", verb, dict(query))
        return {"items": []}

    def gc(self, dry_run: bool) -> list[dict[str, Any]]:
        self._note("gc", dry_run)
        return [{"id": ID}]

    def retry(self, id_: str) -> dict[str, Any]:
        self._note("retry", id_)
        return {"id": id_}

    async def absent(self, pid: int, asker: int) -> dict[str, Any]:
        self._note("absent", pid, asker)
        return {"pid": pid}


def settings(directory: Path, listen: str = "127.0.0.1:0") -> Settings:
    return Settings(
        node_name="node-1", server=ServerSettings(listen=listen, socket=directory / "run" / "agent.sock")
    )


@asynccontextmanager
async def running(directory, *, agent=None, health=None, metrics=None, limits=None):
    server = Server(settings(directory), agent or Agent(), metrics or Metrics(), health or Health(), limits)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def send(server: Server, data: bytes) -> bytes:
    """Send raw bytes to the TCP site and read until it closes."""
    reader, writer = await asyncio.open_connection(*server.addresses[0])
    try:
        writer.write(data)
        with suppress(ConnectionError):
            await writer.drain()
            return await asyncio.wait_for(reader.read(), 60)
        return b""
    finally:
        writer.close()


async def get(server: Server, target: str, method: str = "GET") -> tuple[int, str]:
    answer = (await send(server, f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).decode()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


def client(directory: Path) -> AgentClient:
    return AgentClient(directory / "run" / "agent.sock")


# TCP --------------------------------------------------------------------------------------------------


async def test_the_tcp_site_answers_its_five_paths(tmp_path):
    """Health, the era's health and the metrics are there for everybody, each connection for one request."""
    async with running(tmp_path) as server:
        assert await get(server, "/livez") == (200, "ok\n")
        assert await get(server, "/readyz") == (200, "ok\n")
        assert await get(server, "/healthz") == (200, "ok\n")
        code, body = await get(server, "/health")
        assert (code, json.loads(body)) == (200, {"status": "healthy", "node_name": "node-1"})
        code, body = await get(server, "/metrics")
        assert code == 200
        assert "hibernode_build_info" in {family.name for family in text_string_to_metric_families(body)}
        head = await send(server, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"Connection: close" in head
        assert b"aiohttp" not in head


@pytest.mark.parametrize(
    ("method", "target", "code"),
    [
        ("POST", "/livez", 405),
        ("HEAD", "/livez", 405),
        ("DELETE", "/metrics", 405),
        ("GET", "/", 404),
        ("GET", "/v1/status", 404),
        ("POST", "/v1/gc", 404),
        ("GET", "/livez/", 404),
        ("GET", "/%6civez/../metrics", 404),
        ("GET", "/../../etc/passwd", 404),
        ("OPTIONS", "*", 404),
    ],
)
async def test_nothing_else_is_answered_on_tcp(tmp_path, method, target, code):
    """Other methods and other paths, the private ones too, are refused."""
    async with running(tmp_path) as server:
        assert (await get(server, target, method))[0] == code


async def test_checks_decide_readiness_and_are_listed(tmp_path):
    """A failure makes the agent not ready, degraded does not, and verbose lists all with their reasons."""
    outcomes: dict[str, Exception | None] = {"criu": None, "store": None}
    health = Health()

    def check(name: str) -> Check:
        async def run() -> str:
            error = outcomes[name]
            if error is not None:
                raise error
            return "fine"

        return Check(name, run)

    for name in outcomes:
        health.add(check(name))
    async with running(tmp_path, health=health) as server:
        assert await get(server, "/healthz?verbose") == (
            200,
            "ok\nok        criu: fine\nok        store: fine\n",
        )
    outcomes["criu"] = DegradedError("old\x1b[2J")
    health = Health()
    for name in outcomes:
        health.add(check(name))
    async with running(tmp_path, health=health) as server:
        assert await get(server, "/readyz") == (200, "degraded\ndegraded  criu: old\ufffd[2J\n")
    outcomes["store"] = StorageError("read-only", remedy="mount it rw")
    health = Health()
    for name in outcomes:
        health.add(check(name))
    async with running(tmp_path, health=health) as server:
        code, body = await get(server, "/readyz")
        assert (code, body.splitlines()[0], body.splitlines()[2]) == (
            503,
            "fail",
            "fail      store: read-only   mount it rw",
        )
        assert (await get(server, "/livez"))[0] == 200
        assert (await get(server, "/health"))[0] == 200


async def test_a_hung_check_does_not_hang_the_answer(tmp_path):
    """The probe is told within the check's deadline, again and again, and liveness is not touched."""
    release = threading.Event()

    def hang() -> str:
        release.wait(60)
        return ""

    health = Health()
    health.add(Check("nfs", in_thread(hang), deadline=0.05))
    try:
        async with running(tmp_path, health=health) as server:
            for _ in range(3):
                code, body = await get(server, "/readyz")
                assert code == 503
                assert "nfs: no answer for" in body
                assert (await get(server, "/livez"))[0] == 200
    finally:
        release.set()


async def test_two_hundred_probes_at_once_cost_one_look(tmp_path):
    """All are answered, and the check runs once while its answer is fresh."""
    runs: list[int] = []

    async def count() -> str:
        runs.append(1)
        return ""

    health = Health()
    health.add(Check("counted", count))
    async with running(tmp_path, health=health) as server:
        answers = await asyncio.gather(*(get(server, "/readyz") for _ in range(200)))
    assert {code for code, _ in answers} == {200}
    assert len(runs) < 200


JUNK = [
    pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, id="a TLS hello"),
    pytest.param(b"\x00" * 100_000, id="zeros"),
    pytest.param(b"GET\r\n\r\n", id="no target"),
    pytest.param(b"GET /livez HTTP/9.9\r\n\r\n", id="a version from the future"),
    pytest.param(b"GET /livez HTTP/1.1\r\nno colon\r\n\r\n", id="a header without a colon"),
    pytest.param(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", id="an endless target"),
    pytest.param(b"GET /livez HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", id="an endless header"),
    pytest.param(b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n", id="ten thousand headers"),
    pytest.param(b"GET /livez HTTP/1.1\r\nContent-Length: 9\r\nContent-Length: 8\r\n\r\n", id="two lengths"),
    pytest.param(b"GET /livez HTTP/1.1\r\nContent-Length: -1\r\n\r\n", id="a negative length"),
    pytest.param(
        b"GET /livez HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + b"a" * 9999, id="a huge body"
    ),
    pytest.param(
        b"GET /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n", id="chunks"
    ),
    pytest.param(b"GET /livez\0 HTTP/1.1\r\n\r\n", id="a NUL"),
    pytest.param(b"GET http://[::1 HTTP/1.1\r\n\r\n", id="a broken URL"),
]


@pytest.mark.parametrize("data", JUNK)
async def test_junk_is_refused_and_the_next_peer_is_served(tmp_path, data, caplog):
    """Malformed or oversized requests get a 4xx or a closed connection, and no line in the log."""
    async with running(tmp_path) as server:
        answer = await send(server, data)
        assert answer == b"" or answer.split()[1].startswith(b"4")
        assert (await get(server, "/livez"))[0] == 200
    assert not caplog.records


async def test_peers_that_leave_early_leave_nothing_behind(tmp_path):
    """A thousand connections that end after three bytes cost no descriptor (FC-34)."""
    async with running(tmp_path) as server:
        await get(server, "/livez")
        before = open_descriptors()
        for _ in range(1000):
            with socket.create_connection(server.addresses[0]) as sock:
                sock.sendall(b"GET")
            await asyncio.sleep(0)
        assert (await get(server, "/livez"))[0] == 200
        async with asyncio.timeout(60):
            while open_descriptors() > before:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"", id="says nothing"),
        pytest.param(b"GET /livez HTTP/1.1\r\nX-Slow: ", id="stops in a header"),
        pytest.param(b"GET /li", id="stops in the first line"),
    ],
)
async def test_a_peer_that_never_ends_its_request_is_cut_off(tmp_path, first):
    """Idle and slow connections are closed, and others are served meanwhile."""
    async with running(tmp_path, limits=Limits(request_seconds=0.1)) as server:
        reader, writer = await asyncio.open_connection(*server.addresses[0])
        writer.write(first)
        assert (await get(server, "/livez"))[0] == 200
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_a_peer_that_feeds_byte_by_byte_is_cut_off(tmp_path):
    """Each byte is not a new lease: the whole connection has a deadline."""
    limits = Limits(request_seconds=60, connection_seconds=0.2)
    async with running(tmp_path, limits=limits) as server:
        reader, writer = await asyncio.open_connection(*server.addresses[0])
        with suppress(ConnectionError):
            async with asyncio.timeout(60):
                while not reader.at_eof():
                    writer.write(b"G")
                    await writer.drain()
                    await asyncio.sleep(0.01)
                    if reader.exception() is not None:
                        break
        writer.close()
        assert (await get(server, "/livez"))[0] == 200


async def test_connections_are_bounded(tmp_path):
    """One more than the limit is cut off, and there is room again when others go."""
    async with running(tmp_path, limits=Limits(connections=3)) as server:
        held = [await asyncio.open_connection(*server.addresses[0]) for _ in range(3)]
        await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(*server.addresses[0])
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        for _, other in held:
            other.close()
        async with asyncio.timeout(60):
            # The server hears of the ends in its own time.
            while await send(server, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n") == b"":
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("listen", "reason"),
    [
        ("{used}", "AddressInUse"),
        ("127.0.0.1:99999", "ListenFailed"),
        ("192.0.2.1:0", "ListenFailed"),
        ("..:0", "ListenFailed"),
    ],
)
async def test_an_address_that_cannot_be_had_is_an_error_with_a_remedy(tmp_path, listen, reason):
    """The setting is named, the Unix socket is given back, and nothing goes on in the background."""
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = listen.format(used=f"127.0.0.1:{used.getsockname()[1]}")
        server = Server(settings(tmp_path, address), Agent(), Metrics(), Health())
        with pytest.raises(StorageError, match=r"server\.listen") as caught:
            await server.start()
    assert caught.value.reason == reason
    assert "server.listen" in caught.value.remedy
    assert not (tmp_path / "run" / "agent.sock").exists()
    async with running(tmp_path):
        pass


def ipv6_forms() -> list[str]:
    """Name an IPv6 address if this machine has one; a container may be without."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return ["[::1]:0"]
    except OSError:
        return []


@pytest.mark.parametrize("listen", [":0", "127.0.0.1:0", "localhost:0", *ipv6_forms()])
async def test_every_form_of_an_address_is_listened_on(tmp_path, listen):
    """An empty host is all addresses; IPv6 stands in brackets."""
    server = Server(settings(tmp_path, listen), Agent(), Metrics(), Health())
    await server.start()
    try:
        assert (await get(server, "/livez"))[0] == 200
    finally:
        await server.stop()


# Unix socket ------------------------------------------------------------------------------------------


async def ask(work: Callable[[], T]) -> T:
    """Run the blocking client beside the loop."""
    return await asyncio.to_thread(work)


async def test_the_api_answers_the_client(tmp_path):
    """Each answer carries version and kind, and parameters reach the agent as what they are."""
    agent = Agent()
    async with running(tmp_path, agent=agent):
        api = client(tmp_path)
        status = await ask(lambda: api.get("/v1/status"))
        assert status == {
            "apiVersion": "hibernode.io/v1",
            "kind": "Status",
            "version": "1",
            "pid": os.getpid(),
        }
        assert (await ask(lambda: api.get("/v1/events", limit=7)))["items"] == [{"reason": "R"}]
        assert (await ask(lambda: api.get("/v1/jobs")))["kind"] == "JobList"
        assert (await ask(lambda: api.get("/v1/gpu")))["kind"] == "Gpus"
        assert (await ask(lambda: api.post("/v1/gc")))["dryRun"] is True
        assert (await ask(lambda: api.post("/v1/gc", dry_run="false")))["items"] == [{"id": ID}]
        assert (await ask(lambda: api.post("/v1/retry", id=ID)))["id"] == ID
        assert (await ask(lambda: api.post("/v1/absent", pid=77)))["kind"] == "Absence"
    assert agent.asked == [
        ("status",),
        ("events", 7),
        ("jobs",),
        ("gpu",),
        ("gc", True),
        ("gc", False),
        ("retry", ID),
        ("absent", 77, os.getpid()),
    ]


async def test_the_status_may_be_a_coroutine(tmp_path):
    """An agent that must look at the disk for its status need not block the loop."""

    class Slow(Agent):
        async def status(self) -> dict[str, Any]:
            await asyncio.sleep(0)
            return {"slow": True}

    async with running(tmp_path, agent=Slow()):
        assert (await ask(lambda: client(tmp_path).get("/v1/status")))["slow"] is True


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("get", "/v1/events", {"limit": "0"}),
        ("get", "/v1/events", {"limit": "1001"}),
        ("get", "/v1/events", {"limit": "-1"}),
        ("get", "/v1/events", {"limit": "9" * 1000}),
        ("get", "/v1/events", {"limit": "00000000199999"}),
        ("get", "/v1/events", {"limit": ""}),
        ("get", "/v1/events", {"limit": "\u0663"}),
        ("get", "/v1/events", {"path": "/etc/passwd"}),
        ("post", "/v1/gc", {"dry_run": "maybe"}),
        ("post", "/v1/gc", {"dryrun": "true"}),
        ("post", "/v1/absent", {}),
        ("post", "/v1/absent", {"pid": "0"}),
        ("post", "/v1/absent", {"pid": "-1"}),
        ("post", "/v1/absent", {"pid": "99999999"}),
        ("post", "/v1/retry", {}),
        ("post", "/v1/retry", {"id": "../x"}),
        ("post", "/v1/retry", {"id": "9" * 300}),
        ("post", "/v1/retry", {"id": "96429b27257\u0661"}),
    ],
)
async def test_odd_parameters_are_usage_errors(tmp_path, method, path, query):
    """What is not known or not well formed never reaches the agent (FC-37 for ids)."""
    agent = Agent()
    async with running(tmp_path, agent=agent):
        with pytest.raises(UsageError):
            await ask(lambda: getattr(client(tmp_path), method)(path, **query))
    assert agent.asked == []


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        pytest.param(NotFoundError("none", remedy="look"), 1, id="not found"),
        pytest.param(RefusedError("no", reason="IoUringInUse"), 4, id="refused"),
        pytest.param(StorageError("full", reason="NoSpace"), 5, id="storage"),
    ],
)
async def test_an_error_keeps_its_words_and_its_exit_code(tmp_path, raised, code):
    """What the agent says is what the command says."""
    agent = Agent()
    agent.error = raised
    async with running(tmp_path, agent=agent):
        with pytest.raises(HibernodeError) as caught:
            await ask(lambda: client(tmp_path).get("/v1/status"))
    told = caught.value
    assert (told.message, told.remedy, told.reason) == (raised.message, raised.remedy, raised.reason)
    assert told.exit_code == code


async def test_a_fault_of_ours_is_logged_and_not_shown(tmp_path, caplog):
    """The peer hears that something failed, the log has the traceback."""
    agent = Agent()
    agent.error = ZeroDivisionError("secret")
    async with running(tmp_path, agent=agent):
        with pytest.raises(HibernodeError, match="unexpected failure") as caught:
            await ask(lambda: client(tmp_path).get("/v1/status"))
    assert caught.value.reason == "InternalError"
    assert "secret" not in str(caught.value)
    assert "ZeroDivisionError" in caplog.text


async def test_the_socket_is_for_root_by_its_modes(tmp_path):
    """The directory is 0750 and the socket 0600, whatever the umask."""
    old = os.umask(0)
    try:
        async with running(tmp_path):
            assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o750
            assert stat.S_IMODE((tmp_path / "run" / "agent.sock").stat().st_mode) == 0o600
    finally:
        os.umask(old)
    assert not (tmp_path / "run" / "agent.sock").exists()


ASK_AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(sys.argv[1])
except PermissionError:
    print("EACCES"); sys.exit()
sock.sendall(b"GET /v1/status HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
data = b""
while chunk := sock.recv(65536):
    data += chunk
print(data.decode())
"""


@pytest.fixture
def open_directory():
    """Make a directory that everybody can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def test_a_peer_that_is_not_root_is_refused(open_directory):
    """The modes keep it out; and if somebody opens them, its uid does."""
    agent = Agent()
    async with running(open_directory, agent=agent):
        path = open_directory / "run" / "agent.sock"

        def as_nobody() -> str:
            return subprocess.run(
                [sys.executable, "-I", "-S", "-c", ASK_AS_NOBODY, str(path)],
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            ).stdout

        assert await ask(as_nobody) == "EACCES\n"
        path.parent.chmod(0o755)
        path.chmod(0o666)
        answer = await ask(as_nobody)
    assert answer.startswith("HTTP/1.1 403 ")
    assert json.loads(answer.partition("\n\n")[2])["message"] == f"the peer's uid is {NOBODY}"
    assert agent.asked == []


HOLD = """
import sys
from pathlib import Path
from hibernode.listen import SocketLock
lock = SocketLock(Path(sys.argv[1]))
sock = lock.listen()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the socket; its standard input's end lets it go."""
    path = tmp_path / "run" / "agent.sock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


async def test_a_second_agent_is_told_who_runs(tmp_path, other):
    """It refuses to start, names the pid, and leaves the first one's socket alone."""
    path = tmp_path / "run" / "agent.sock"
    for _ in range(2):
        with pytest.raises(BusyError, match=rf"another agent is running \(pid {other.pid}\)"):
            await Server(settings(tmp_path), Agent(), Metrics(), Health()).start()
        assert path.is_socket()
        (tmp_path / "run" / "agent.sock.lock").unlink(missing_ok=True)  # the second time, without its lock


async def test_the_socket_of_a_dead_agent_is_replaced(tmp_path, other):
    """After kill -9 nothing stands in the way of the next one."""
    other.kill()
    other.wait()
    assert (tmp_path / "run" / "agent.sock").is_socket()
    with pytest.raises(AgentUnreachableError, match="dead agent"):
        client(tmp_path).get("/v1/status")
    async with running(tmp_path):
        assert (await ask(lambda: client(tmp_path).get("/v1/status")))["kind"] == "Status"


def place_file(path):
    path.parent.mkdir(mode=0o750)
    path.write_text("mine")


def place_link(path):
    path.parent.mkdir(mode=0o750)
    path.symlink_to("/dev/null")


def place_in_open_directory(path):
    path.parent.mkdir()
    path.parent.chmod(0o777)


def place_in_foreign_directory(path):
    path.parent.mkdir(mode=0o750)
    os.chown(path.parent, NOBODY, NOBODY)


def place_behind_link(path):
    (path.parent.parent / "elsewhere").mkdir()
    path.parent.symlink_to("elsewhere")


def place_linked_lock(path):
    path.parent.mkdir(mode=0o750)
    Path(f"{path}.lock").symlink_to("/dev/null")


@pytest.mark.parametrize(
    "place",
    [
        place_file,
        place_link,
        place_in_open_directory,
        place_in_foreign_directory,
        place_behind_link,
        place_linked_lock,
    ],
)
async def test_what_is_not_ours_is_not_touched(tmp_path, place):
    """A file, a link or a directory that others can write to is refused with a remedy, and stays."""
    path = tmp_path / "run" / "agent.sock"
    place(path)
    before = sorted(str(found) for found in tmp_path.rglob("*"))
    with pytest.raises(StorageError, match=r"server\.socket") as caught:
        SocketLock(path).listen()
    assert caught.value.remedy
    assert set(before) <= {str(found) for found in tmp_path.rglob("*")}


def test_a_path_that_is_too_long_is_an_error_with_a_remedy(tmp_path):
    """The kernel's limit of 107 bytes is said, not a traceback."""
    with pytest.raises(StorageError, match=r"server\.socket") as caught:
        SocketLock(tmp_path / ("x" * 120) / "agent.sock").listen()
    assert "107 bytes" in caught.value.remedy


async def test_stopping_removes_no_socket_of_another(tmp_path):
    """If somebody has put another socket there, it stays."""
    path = tmp_path / "run" / "agent.sock"
    async with running(tmp_path):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as foreign:
            foreign.bind(str(path))
    assert path.is_socket()


# the client -------------------------------------------------------------------------------------------


def test_without_an_agent_the_client_says_what_to_do(tmp_path):
    """Exit code 3, and a remedy."""
    with pytest.raises(AgentUnreachableError, match="is not there") as caught:
        client(tmp_path).get("/v1/status")
    assert caught.value.exit_code == 3
    assert "hibernode run" in caught.value.remedy


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(b"", "failed", id="it hangs up"),
        pytest.param(b"\x00\x01junk\n", "failed", id="it speaks no HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\nhello", "no JSON object", id="it speaks no JSON"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n[1]", "no JSON object", id="it answers a list"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "no JSON object", id="nested without end"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, "failed", id="an endless header"),
        pytest.param(None, "no answer within", id="it says nothing"),
    ],
)
def test_a_strange_answer_is_an_unreachable_agent(tmp_path, answer, why):
    """Whatever listens there, the client ends with a sentence."""
    path = tmp_path / "agent.sock"
    done = threading.Event()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(65536)
            if answer is None:
                done.wait(60)
            else:
                with suppress(OSError):
                    peer.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(AgentUnreachableError, match=why):
                AgentClient(path, timeout=0.2 if answer is None else 60).get("/v1/status")
        finally:
            done.set()
            thread.join()


def test_the_client_costs_no_server(tmp_path):
    """A command that asks the agent imports neither aiohttp nor the metrics."""
    code = "import sys, hibernode.client; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"aiohttp", "prometheus_client", "asyncio"} & set(loaded)
