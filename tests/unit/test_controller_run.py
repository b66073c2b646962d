"""The controller as a process: what it lists before it works, whom it leaves alone, the end of its Lease."""

from __future__ import annotations

import asyncio
import copy
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hibernode.controller.service import LEASE, Controller
from hibernode.health import DegradedError
from hibernode.settings import Settings
from tests.unit.artifact_kit import ID
from tests.unit.cli_kit import HIBERNODE, Machine, machine  # noqa: F401 - a fixture
from tests.unit.controller_kit import START, api_of, make
from tests.unit.kube_fake import CHECKPOINTS, JOBS, LEASES, FakeKube, Fault
from tests.unit.metadata_kit import until


@asynccontextmanager
async def running(fake: FakeKube, *, lease_seconds: float = 30, **ours: Any) -> AsyncIterator[Controller]:
    """Run a controller; ``lease_seconds`` may be less than a setting may."""
    values = {"lease_namespace": "ns", "pvc": "checkpoints", **ours}
    settings = Settings.model_validate({"controller": values})
    hasty = settings.controller.model_copy(update={"lease_seconds": lease_seconds})
    api = api_of(fake)
    controller = Controller(settings.model_copy(update={"controller": hasty}), api)
    task = asyncio.create_task(controller.run())
    try:
        yield controller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()


def phase(fake: FakeKube, name: str = "llama", namespace: str = "ns") -> str:
    """Tell how far an object is."""
    return str(fake.get(CHECKPOINTS, name, namespace).get("status", {}).get("phase", ""))


def changes(fake: FakeKube, since: int = 0) -> list[tuple[str, str]]:
    """List the requests that are no reads, without those of the Lease."""
    return [(verb, path) for verb, path in fake.calls[since:] if verb != "GET" and "/leases" not in path]


async def test_objects_of_excluded_namespaces_are_left_alone() -> None:
    """They and their Jobs are another's; they do not count, and a resync does not reach them."""
    async with FakeKube() as fake:
        make(fake, namespace="theirs")
        async with running(fake, excluded_namespaces=["theirs"], resync_seconds=0.01) as controller:
            make(fake)
            await until(lambda: phase(fake) == "Creating")
            make(fake, "more", namespace="theirs")
            job = copy.deepcopy(fake.get(JOBS, "checkpoint-llama"))
            job["status"] = {"succeeded": 1}
            fake.put(JOBS, job)
            await until(lambda: phase(fake) == "Ready")
            assert [path for _, path in changes(fake) if "/namespaces/theirs/" in path] == []
            assert not any("/namespaces/theirs/" in path for _, path in fake.calls)
            counted = controller.reading()["hibernode_controller_objects"]
            assert isinstance(counted, dict)
            assert sum(counted.values()) == 1


async def test_nothing_is_done_before_all_is_listed() -> None:
    """The younger of two comes first in the list, and the elder, on another page, is to go first."""
    async with FakeKube() as fake:
        for name, created in (("a-younger", START + 1), ("b-elder", START)):
            raw = make(fake, name, created=created)
            fake.put(CHECKPOINTS, {**raw, "status": {"phase": "Pending", "identityHash": str(ID)}})
        fake.page_limit = 1
        lists = [0]

        def slow(method: str, path: str) -> Fault | None:
            if method == "GET" and path.endswith(f"/{CHECKPOINTS}"):
                lists[0] += 1
                if 2 <= lists[0] <= 4:
                    return Fault(503)
            return None

        fake.faults.append(slow)
        async with running(fake):
            await until(lambda: phase(fake, "b-elder") == "Creating")
            assert fake.names(JOBS) == ["checkpoint-b-elder"]
            await until(lambda: "waits for b-elder" in str(fake.get(CHECKPOINTS, "a-younger").get("status")))


async def test_a_controller_that_lost_its_lease_changes_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even what it was in the middle of; the one that has it goes on from there."""
    monkeypatch.setattr("hibernode.kube.api.LONGEST_PAUSE", 0.01)
    async with FakeKube() as fake:
        async with running(fake, lease_seconds=0.5, workers=1) as controller:
            await until(lambda: controller.leads and controller._listed.is_set())
            tries = asyncio.Event()

            def busy(method: str, path: str) -> Fault | None:
                if method == "POST" and path.endswith("/jobs"):
                    tries.set()
                    return Fault(503)
                return None

            fake.faults.append(busy)
            make(fake)
            await tries.wait()  # it makes the Job, again and again
            lease = copy.deepcopy(fake.get(LEASES, LEASE))
            lease["spec"] |= {"holderIdentity": "another", "leaseDurationSeconds": 3600}
            fake.put(LEASES, lease)
            await until(lambda: not controller.leads)
            fake.faults.clear()
            since = len(fake.calls)
            make(fake, "later")
            await until(
                lambda: (
                    ("GET", f"/apis/coordination.k8s.io/v1/namespaces/ns/leases/{LEASE}")
                    in fake.calls[since:]
                )
            )
            assert changes(fake, since) == []
            assert (phase(fake), phase(fake, "later"), fake.names(JOBS)) == ("Pending", "", [])
            assert await controller.check() == "waits to lead"
            lease["spec"]["holderIdentity"] = ""
            fake.put(LEASES, lease)
            await until(lambda: phase(fake) == "Creating")
        assert fake.get(LEASES, LEASE)["spec"]["holderIdentity"] == ""


async def test_a_lease_that_cannot_be_renewed_ends_the_work_in_time() -> None:
    """Before it is over for the others, who would take it; it leads again when the API server is back."""
    async with FakeKube() as fake, running(fake, lease_seconds=0.5) as controller:
        await until(lambda: controller.leads)
        fake.faults.append(lambda _, path: Fault(silent=True) if "/leases/" in path else None)
        await until(lambda: not controller.leads)
        assert controller._lease is not None
        assert controller._lease.left() == 0
        fake.faults.clear()
        await fake.down()
        await fake.up()
        await until(lambda: controller.leads)


async def test_a_controller_that_may_not_lead_says_so() -> None:
    """One that waits for another is well; one that cannot ask is not, and nobody would notice."""
    async with FakeKube() as fake:
        fake.faults.append(lambda _, path: Fault(403) if "/leases" in path else None)
        async with running(fake, lease_seconds=0.5) as controller:
            await until(lambda: controller._trouble)
            with pytest.raises(DegradedError, match="forbids"):
                await controller.check()
            fake.faults.clear()
            await until(lambda: controller.leads and controller._listed.is_set())
            assert await controller.check() == "leads"


async def test_the_program_serves_leads_and_gives_its_lease_back(machine: Machine, tmp_path: Path) -> None:  # noqa: F811 - the fixture
    """By `hibernode controller`: ready, with metrics; SIGTERM ends it well, and the next need not wait."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = "{}:{}".format(*free.getsockname())
    async with FakeKube() as fake:
        make(fake)
        config = tmp_path / "kubeconfig"
        config.write_text(json.dumps(kubeconfig(fake.url)))
        env = machine.env(
            HIBERNODE_SERVER_LISTEN=listen,
            HIBERNODE_KUBERNETES_KUBECONFIG=str(config),
            HIBERNODE_CONTROLLER_LEASE_NAMESPACE="ns",
            HIBERNODE_CONTROLLER_NAMESPACE="ns",
        )
        program = await asyncio.create_subprocess_exec(
            HIBERNODE, "controller", env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            await until(lambda: phase(fake) == "Creating" or program.returncode is not None)
            async with aiohttp.ClientSession(f"http://{listen}") as http:
                async with http.get("/readyz") as answer:
                    assert answer.status == 200, await answer.text()
                async with http.get("/metrics") as answer:
                    metrics = await answer.text()
            assert "hibernode_controller_leads 1.0" in metrics
            assert 'hibernode_controller_objects{phase="Creating"}' in metrics
            holder = fake.get(LEASES, LEASE)["spec"]["holderIdentity"]
            assert holder
            program.send_signal(signal.SIGTERM)
            said, _ = await program.communicate()
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
        assert program.returncode == 0, said
        assert b"Traceback" not in said
        assert fake.get(LEASES, LEASE)["spec"]["holderIdentity"] == ""


def kubeconfig(url: str) -> dict[str, Any]:
    """Describe the way to a server that asks nobody who he is."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
