"""What has run into a deadline of a pipeline, and what only says so: a store that has timed out itself."""

from __future__ import annotations

import asyncio
import errno
import os
import time

import pytest

from hibernode.answers import Request, RestoreRequest, Trigger
from hibernode.checkpoint import Checkpointer
from hibernode.discovery.locate import contract_of
from hibernode.host.procfs import Process
from hibernode.journal import Step
from hibernode.restore import Restorer
from hibernode.settings import CheckpointSettings, RestoreSettings, Settings, StoreSettings
from hibernode.workload import ERA_A1, CheckpointId
from tests.unit.artifact_kit import ID
from tests.unit.test_recover import Node, node

__all__ = ["node"]  # a fixture

SETTINGS = Settings(
    store=StoreSettings(min_free_bytes=0),
    checkpoint=CheckpointSettings(deadline_seconds=60),
    restore=RestoreSettings(deadline_seconds=60),
)


def time_out(_id: CheckpointId, _step: Step) -> None:
    """Fail as a file does whose server is away: the kernel's error is a TimeoutError to Python."""
    raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), "/store")


@pytest.mark.parametrize("pipeline", ["dump", "restore"])
def test_a_store_that_times_out_is_a_storage_failure(node: Node, pipeline: str) -> None:
    """And not the deadline of the pipeline, which has a minute left."""
    began = time.monotonic()
    parts = (SETTINGS, node.store, node.state, None, time_out)
    with Process.open(node.worker.pid) as process:
        id_ = CheckpointId(ID)
        if pipeline == "dump":
            request = Request(id_, process, contract_of({}, ERA_A1), Trigger.COMMAND, announce=False)
            outcome = asyncio.run(Checkpointer(*parts).run(request))
            found = (outcome.success, outcome.reason, outcome.message)
        else:
            restored = asyncio.run(Restorer(*parts).run(RestoreRequest(id_, announce=False)))
            found = (restored.success, restored.reason, restored.message)
    assert found == (False, "StorageFailed", "/store: Connection timed out")
    assert time.monotonic() - began < SETTINGS.restore.deadline_seconds
