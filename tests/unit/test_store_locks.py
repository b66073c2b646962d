"""Locks on ids and on staging directories: between processes, within one, and after a death."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Self

import pytest

from hibernode.artifact.store import Store
from hibernode.errors import BusyError
from tests.unit.artifact_kit import ID, OTHER, seal
from tests.unit.hostile import open_descriptors


@pytest.fixture
def store(tmp_path):
    """Open a store; no descriptor may be left over."""
    before = open_descriptors()
    with Store(tmp_path / "store").open() as store:
        yield store
    assert open_descriptors() == before


def states(store: Store) -> list[tuple[str, str]]:
    return [(info.id, info.state) for info in store.artifacts()]


HOLDER = """
import subprocess, sys
from pathlib import Path
from hibernode.artifact.store import Store
from hibernode.workload import CheckpointId
store = Store(Path(sys.argv[1])).open()
with store.lock(CheckpointId(sys.argv[2]), shared=sys.argv[3] == "shared"):
    # Whoever is started meanwhile gets no copy of the lock, even when descriptors are passed on.
    child = subprocess.Popen(["sleep", "300"], close_fds=False)
    print("ready", child.pid, flush=True)
    sys.stdin.read()
"""


class Holder:
    """A process that holds the lock on ID until it is killed; a program that it has started lives on."""

    def __init__(self, store: Store, kind: str = "exclusive") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, store.path, ID, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline().split()[1])

    def __enter__(self) -> Self:
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        os.kill(self.child, 9)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def test_a_lock_keeps_other_processes_out_and_says_who_holds_it(store):
    """One process has the id, the other hears its pid; a kill frees it, children do not keep it."""
    with Holder(store) as holder:
        for shared in (False, True):
            with pytest.raises(BusyError) as caught, store.lock(ID, shared=shared):
                pass
            assert caught.value.fields["pid"] == holder.process.pid
            assert f"{ID} is in use by pid {holder.process.pid}" in caught.value.message
        with store.lock(OTHER):
            pass
        holder.kill()
        with store.lock(ID):
            pass


def test_readers_share_and_keep_writers_out(store):
    """Two restores may use one artifact; a publish may not come between."""
    with store.stage(ID) as staging:
        seal(store, staging)
        with Holder(store, "shared"):
            with store.lock(ID, shared=True):
                pass
            with pytest.raises(BusyError):
                store.publish(staging, ID)
        store.publish(staging, ID)


def test_a_lock_can_be_waited_for(store):
    """With ``wait`` the lock comes when the holder has gone."""
    got = threading.Event()

    def wait() -> None:
        with store.lock(ID, wait=True):
            got.set()

    with Holder(store) as holder:
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not got.is_set()
        holder.kill()
        assert got.wait(60)
        waiter.join()


def test_a_lock_also_holds_within_one_process(store):
    """A second user of an id in the same process is told that it is this process."""
    with store.lock(ID), pytest.raises(BusyError, match="by this process"), store.lock(ID):
        pass
    with store.lock(ID):
        pass


def test_a_lock_left_by_the_dead_is_free(store):
    """A lock file with an old pid in it locks nothing, and does not name the dead as the holder."""
    (store.path / ".locks" / ID).write_text(f"{1 << 22} {os.uname().nodename}\n")
    with store.lock(ID, shared=True):
        (store.path / ".locks" / ID).write_text(f"{1 << 22} {os.uname().nodename}\n")
        with pytest.raises(BusyError) as caught, store.lock(ID):
            pass
    assert "pid" not in caught.value.fields


def test_a_staging_has_an_owner_until_it_is_closed(store):
    """The list tells the living owner's from the others; only the latter can be taken over."""
    staging = store.stage(ID)
    (info,) = store.stagings()
    assert (info.id, info.uuid, info.path, info.owner_alive) == (ID, staging.uuid, staging.path, True)
    assert states(store) == [(ID, "in-progress")]
    assert list(store.orphans()) == []
    staging.close()
    assert [info.owner_alive for info in store.stagings()] == [False]
    (orphan,) = store.orphans()
    with orphan:
        assert (orphan.id, orphan.uuid) == (ID, staging.uuid)
        assert list(store.orphans()) == []
        store.discard(orphan)
    assert store.stagings() == []


def test_an_orphan_that_was_sealed_can_be_published(store):
    """Whoever recovers sealed work finishes it."""
    with store.stage(ID) as staging:
        seal(store, staging)
    (orphan,) = store.orphans()
    with orphan:
        assert not orphan.published()
        assert store.publish(orphan, ID).manifest.uuid == staging.uuid
        store.discard(orphan)
    assert states(store) == [(ID, "complete")]
