"""Fault points by name, so that each moment of a pipeline can be made to fail in a test.

``HIBERNODE_FAULT`` holds ``ACTION@POINT``: ``kill`` ends this process at once as SIGKILL would, ``fail``
raises the error that a broken disk would, ``hang`` waits for ever. A point is passed when the step it
names has been written to the journal and before the step itself begins. Without the variable a point
costs one dictionary look-up.
"""

from __future__ import annotations

import asyncio
import os
import signal

from hibernode.config import FAULT_ENV
from hibernode.errors import StorageError


async def point(name: str) -> None:
    """Pass the fault point ``name``, such as ``checkpoint.seal``."""
    wanted = os.environ.get(FAULT_ENV)
    if wanted is None:
        return
    action, _, where = wanted.partition("@")
    if where != name:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "fail":
        raise StorageError(f"fault point {name}: input/output error", reason="FaultInjected")
    elif action == "hang":
        await asyncio.Event().wait()
