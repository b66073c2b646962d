"""Fixtures for tests against a real API server."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kube import Kube

_SAID = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def kube(request: pytest.FixtureRequest) -> Iterator[Kube]:
    """Give one API server for all tests of the run; each works in a namespace of its own."""
    base = Path(tempfile.mkdtemp(prefix="hibernode-kube-"))
    try:
        kube = Kube(base)
        try:
            yield kube
            request.config.stash[_SAID] = (
                f"etcd and kube-apiserver: ready in {kube.start_seconds:.1f} s, "
                f"{kube.resident() / 2**20:.0f} MiB at the end"
            )
        finally:
            kube.close()
    finally:
        shutil.rmtree(base)


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
def _server_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """Show what the server wrote during a test that fails."""
    if "kube" not in request.fixturenames:
        yield
        return
    kube: Kube = request.getfixturevalue("kube")
    sizes = {program: program.size() for program in (kube.etcd, kube.api, kube.controllers)}
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        for program, size in sizes.items():
            print(f"--- {program.log.name} during this test\n{program.tail(since=size)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how long the server took to start and how much memory it had."""
    if said := config.stash.get(_SAID, None):
        terminalreporter.write_line(said)
