"""The suite of all backends, on SQLite and on Kubernetes (an API server in this process)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.kube_fake import FakeKube
from tests.unit.metadata_kit import Store, kube_store, sqlite_store

pytest.register_assert_rewrite("tests.unit.metadata_suite")

from tests.unit.metadata_suite import *  # noqa: E402, F403


@pytest.fixture(params=["sqlite", "kubernetes"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Open an empty store."""
    if request.param == "sqlite":
        async with sqlite_store(tmp_path) as opened:
            yield opened
    else:
        async with FakeKube() as fake, kube_store(fake) as opened:
            yield opened
