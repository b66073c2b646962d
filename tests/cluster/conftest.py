"""Fixtures for tests against a real API server."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kube import Kube
from tests.cluster.node import Cluster, one_node

_SAID = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def kube(request: pytest.FixtureRequest) -> Iterator[Kube]:
    """Give one API server for all tests of the run; each works in a namespace of its own."""
    base = Path(tempfile.mkdtemp(prefix="hibernode-kube-"))
    try:
        kube = Kube(base)
        try:
            yield kube
            _say(request, "etcd and kube-apiserver", kube.start_seconds, kube.resident())
        finally:
            kube.close()
    finally:
        shutil.rmtree(base)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Give one cluster of one node for all tests of the run."""
    with one_node() as cluster:
        yield cluster
        _say(request, "one-node cluster", cluster.start_seconds, cluster.resident())


def _say(request: pytest.FixtureRequest, what: str, seconds: float, resident: int) -> None:
    """Keep what is told at the end of the run."""
    line = f"{what}: ready in {seconds:.1f} s, {resident / 2**20:.0f} MiB at the end"
    request.config.stash.setdefault(_SAID, []).append(line)


@pytest.fixture
def namespace(kube: Kube) -> str:
    """Give a new namespace; without a controller manager none can be deleted, so it goes with the server."""
    return kube.namespace(f"test-{secrets.token_hex(4)}")


@pytest.fixture
def controllers(kube: Kube) -> Iterator[None]:
    """Let a controller manager run during the test."""
    kube.start_controllers()
    yield
    kube.controllers.stop()


@pytest.fixture(autouse=True)
def _logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Show what the servers wrote during a test that fails."""
    servers: list[Kube | Cluster] = [
        request.getfixturevalue(name) for name in ("kube", "cluster") if name in request.fixturenames
    ]
    sizes = {program: program.size() for server in servers for program in server.programs()}
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        for program, size in sizes.items():
            print(f"--- {program.log.name} during this test\n{program.tail(since=size)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how long the servers took to start and how much memory they had."""
    for line in config.stash.get(_SAID, []):
        terminalreporter.write_line(line)
