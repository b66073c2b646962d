"""Retention: the rules as a table, then what they do to a real store."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hibernode.artifact.gc import collect
from hibernode.artifact.layout import ArtifactInfo, ArtifactState, moment
from hibernode.artifact.store import Store
from hibernode.errors import IntegrityError, NotFoundError, RefusedError
from hibernode.settings import GcSettings
from hibernode.workload import CheckpointId
from tests.unit.artifact_kit import FILES, ID, OTHER, fill, put
from tests.unit.hostile import open_descriptors

NOW = 1_800_000_000.0
HUGE = 1 << 60
A, B, C = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"
COMPLETE, PREVIOUS, PARTIAL, CORRUPT, IN_PROGRESS = (
    ArtifactState.COMPLETE,
    ArtifactState.PREVIOUS,
    ArtifactState.PARTIAL,
    ArtifactState.CORRUPT,
    ArtifactState.IN_PROGRESS,
)


def info(id_: str, age: float, state: ArtifactState = COMPLETE, *, size: int = 10, pinned: bool = False):
    """Describe an artifact made ``age`` seconds ago; its uuid says ``id age``."""
    name = f"{id_[0]}{age:g}"
    return ArtifactInfo(
        CheckpointId(id_), name, state, Path("/store") / name, size, moment(NOW - age), pinned, "why"
    )


def removed(infos, *, free: int = 100, busy: frozenset[str] = frozenset(), **policy) -> list[str]:
    settings = GcSettings(**{"keep_per_id": 0, **policy})
    items = collect(infos, settings, free_bytes=free, now=NOW, remove=lambda info: info.uuid not in busy)
    return [item.uuid for item in items]


def versions(*ages: float) -> list[ArtifactInfo]:
    """Make the versions of A; the last one is the current."""
    *older, current = ages
    return [*(info(A, age, PREVIOUS) for age in older), info(A, current)]


EVERY_STATE = [
    info(A, 1, IN_PROGRESS),
    info(A, 2, PARTIAL),
    info(A, 3, CORRUPT),
    info(A, 4),
    info(A, 5, PREVIOUS),
]
PINNED = [dataclasses.replace(one, pinned=True) for one in versions(30, 20, 10)]


@pytest.mark.parametrize(
    ("infos", "policy", "expected"),
    [
        pytest.param([], {}, [], id="an empty store"),
        pytest.param(EVERY_STATE, {}, ["a2"], id="without rules only the partial goes"),
        pytest.param(versions(30, 20, 10), {}, [], id="without rules versions stay"),
        pytest.param(versions(30, 20, 10), {"keep_per_id": 2}, ["a30"], id="the oldest beyond the count"),
        pytest.param(versions(30, 20, 10), {"keep_per_id": 1}, ["a30", "a20"], id="all but the current"),
        pytest.param(
            versions(10, 30), {"keep_per_id": 1}, ["a10"], id="the current stays though its clock was behind"
        ),
        pytest.param([info(A, 10), info(B, 20)], {"keep_per_id": 1}, [], id="the count is for each id"),
        pytest.param(
            [info(A, 10), info(A, 20, CORRUPT), info(A, 30, PREVIOUS)],
            {"keep_per_id": 2},
            [],
            id="the corrupt does not count as a version",
        ),
        pytest.param(versions(30, 20, 10), {"max_age_seconds": 15}, ["a30", "a20"], id="older than the age"),
        pytest.param([info(A, 15)], {"max_age_seconds": 15}, [], id="just as old as the age"),
        pytest.param([info(A, -100)], {"max_age_seconds": 15}, [], id="made in the future"),
        pytest.param([info(A, 20, CORRUPT)], {"max_age_seconds": 15}, ["a20"], id="the corrupt ages too"),
        pytest.param(
            [info(A, 20, IN_PROGRESS)], {"max_age_seconds": 15}, [], id="work under way does not age"
        ),
        pytest.param(
            [info(A, 30), info(B, 20), info(C, 10)],
            {"max_total_bytes": 20},
            ["a30"],
            id="the oldest for space",
        ),
        pytest.param(
            [info(A, 30), info(B, 20), info(C, 10)], {"max_total_bytes": 30}, [], id="just large enough"
        ),
        pytest.param(
            [info(A, 30), info(B, 20, PREVIOUS), info(C, 10)],
            {"max_total_bytes": 20},
            ["b20"],
            id="the superseded goes before what a restore would take",
        ),
        pytest.param(
            [info(A, 30), info(B, 20, CORRUPT)], {"max_total_bytes": 10}, ["b20"], id="so does the corrupt"
        ),
        pytest.param(
            [info(A, 30), info(B, 20, IN_PROGRESS, size=1000)],
            {"max_total_bytes": 10},
            ["a30"],
            id="work under way counts but stays",
        ),
        pytest.param([info(A, 30), info(B, 20)], {"min_free_bytes": 100}, [], id="just enough is free"),
        pytest.param(
            [info(A, 30), info(B, 20)], {"min_free_bytes": 101}, ["a30"], id="a byte too little free"
        ),
        pytest.param(
            [info(A, 30), info(B, 20)], {"min_free_bytes": 111}, ["a30", "b20"], id="much too little"
        ),
        pytest.param(
            [info(A, 30, PARTIAL), info(B, 20)],
            {"min_free_bytes": 110},
            ["a30"],
            id="what an earlier rule freed counts",
        ),
        pytest.param(
            PINNED,
            {"keep_per_id": 1, "max_age_seconds": 1, "max_total_bytes": 1, "min_free_bytes": HUGE},
            [],
            id="the pinned stays under every rule",
        ),
    ],
)
def test_the_rules(infos, policy, expected):
    """Each rule removes what it says, in order, and no more."""
    assert removed(infos, **policy) == expected


def test_in_the_place_of_one_in_use_the_next_goes():
    """One that cannot be removed stays, and the space is found elsewhere."""
    infos = [info(A, 30), info(B, 20), info(C, 10)]
    assert removed(infos, max_total_bytes=20, busy=frozenset({"a30"})) == ["b20"]


def test_an_item_says_why():
    """Each item names the rule, by its setting, and what it frees."""
    rules = GcSettings(keep_per_id=1)
    (item,) = collect(versions(20, 10), rules, free_bytes=0, now=NOW, remove=lambda _: True)
    assert "gc.keep_per_id=1" in item.why
    assert item.bytes == 10


# on a real store ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    """Open a store; no descriptor may be left over."""
    before = open_descriptors()
    with Store(tmp_path / "store").open() as store:
        yield store
    assert open_descriptors() == before


def states(store: Store) -> list[tuple[str, str]]:
    return [(info.id, info.state) for info in store.artifacts()]


NO_RULES = GcSettings(keep_per_id=0)


def kill_while(store: Store, code: str) -> None:
    """Run ``code`` in a process that has staged ID and kill it with SIGKILL when it is through."""
    program = f"""
import os, sys
from pathlib import Path
from hibernode.artifact.store import Store
from tests.unit.artifact_kit import *
store = Store(Path(sys.argv[1])).open()
staging = store.stage(ID)
{code}
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, store.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent.parent,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert [info.state for info in store.artifacts()].count(IN_PROGRESS) == 1
        assert store.gc(NO_RULES, dry_run=False, now=time.time()) == []  # never that of a live owner
        child.send_signal(signal.SIGKILL)


def test_fc04_half_a_dump_is_never_an_artifact(store):
    """FC-04: images without a manifest are listed as partial, cannot be had, and gc removes them."""
    kill_while(store, 'fill(staging, {"images/pages-1.img": b"half", "images/pstree.img": b""})')
    assert states(store) == [(ID, PARTIAL)]
    assert not (store.path / ID).exists()
    with pytest.raises(NotFoundError):
        store.get(ID)
    (item,) = store.gc(NO_RULES, dry_run=True, now=time.time())
    assert (item.id, item.bytes, item.why) == (
        ID,
        4 + lock_bytes(item.path),
        "partial: whoever worked on it is gone",
    )
    assert states(store) == [(ID, PARTIAL)]
    assert store.gc(NO_RULES, dry_run=False, now=time.time()) == [item]
    assert store.artifacts() == []
    assert list((store.path / ".staging").iterdir()) == []


def lock_bytes(staging: Path) -> int:
    return (staging / "lock").stat().st_size


def test_fc04_half_an_artifact_under_a_final_name_is_refused_and_removed(store):
    """FC-04: should somebody else put half an image directory there, it is partial, refused and removed."""
    (store.path / ID / "images").mkdir(parents=True)
    (store.path / ID / "images" / "pstree.img").write_bytes(b"")
    assert states(store) == [(ID, PARTIAL)]
    with pytest.raises(IntegrityError) as caught:
        store.get(ID)
    assert caught.value.reason == "ArtifactPartial"
    assert [item.id for item in store.gc(NO_RULES, dry_run=False, now=time.time())] == [ID]
    assert not (store.path / ID).exists()


def test_a_sealed_orphan_is_removed_too(store):
    """What was sealed but not published before its owner died is partial like the rest."""
    kill_while(store, "seal(store, staging)")
    assert len(store.gc(NO_RULES, dry_run=False, now=time.time())) == 1
    assert store.artifacts() == []


def ids(count: int) -> list[CheckpointId]:
    return [CheckpointId(f"{number:012x}") for number in range(count)]


def test_fc39_fifty_ids_keep_their_newest(store):
    """FC-39: of 50 ids with three versions each the newest two stay, and the newest is the current one."""
    newest = {}
    for number in range(3):
        for id_ in ids(50):
            newest[id_] = put(store, id_, created_at=moment(NOW + number)).manifest.uuid
    gone = store.gc(GcSettings(keep_per_id=2), dry_run=False, now=NOW)
    assert len(gone) == 50
    left = store.artifacts()
    assert len(left) == 100
    assert {info.id: info.uuid for info in left if info.state is COMPLETE} == newest
    assert {info.created_at for info in left} == {moment(NOW + 1), moment(NOW + 2)}


def test_fc39_under_the_floor_new_dumps_are_refused_and_the_unpinned_go(store):
    """FC-39: with too little space free no dump begins, and gc removes all but the pinned."""
    for id_ in ids(50):
        put(store, id_)
    store.pin(ids(50)[7])
    with pytest.raises(RefusedError) as caught:
        store.stage(OTHER, min_free_bytes=HUGE)
    assert caught.value.reason == "NoSpace"
    assert store.stagings() == []
    gone = store.gc(GcSettings(min_free_bytes=HUGE), dry_run=False, now=time.time())
    assert len(gone) == 49
    assert states(store) == [(ids(50)[7], COMPLETE)]


def test_an_artifact_in_use_stays(store):
    """While a restore holds the id, shared or not, gc leaves it alone and a dry run says so."""
    put(store)
    everything = GcSettings(min_free_bytes=HUGE)
    for shared in (True, False):
        with store.lock(ID, shared=shared):
            assert store.gc(everything, dry_run=False, now=time.time()) == []
        with store.lock(ID):
            assert store.gc(everything, dry_run=True, now=time.time()) == []
    assert len(store.gc(everything, dry_run=True, now=time.time())) == 1
    assert len(store.gc(everything, dry_run=False, now=time.time())) == 1


def test_a_dry_run_changes_nothing(store):
    """A dry run says what the real one then does."""
    for _ in range(3):
        put(store)
    put(store, OTHER)
    rules = GcSettings(keep_per_id=1, min_free_bytes=HUGE)
    before = store.artifacts()
    said = store.gc(rules, dry_run=True, now=time.time())
    assert store.artifacts() == before
    assert store.gc(rules, dry_run=False, now=time.time()) == said
    assert store.artifacts() == []
    assert list((store.path / ".previous").iterdir()) == []


def test_gc_follows_nothing(store, tmp_path):
    """A removed artifact's links and odd files go; what they lead to stays."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    path = put(store).path
    (path / "images" / "link").symlink_to(outside)
    os.mkfifo(path / "images" / "fifo")
    assert states(store) == [(ID, CORRUPT)]
    store.gc(GcSettings(min_free_bytes=HUGE), dry_run=False, now=time.time())
    assert not path.exists()
    assert (outside / "kept").read_bytes() == b"kept"


def test_gc_cleans_up_after_a_killed_gc(store):
    """What a gc was removing when it was killed has lost its name already and goes next time."""
    put(store)
    (store.path / ID).rename(store.path / ".staging" / ".trash.0")
    assert store.artifacts() == []
    store.gc(NO_RULES, dry_run=True, now=time.time())
    assert (store.path / ".staging" / ".trash.0").exists()
    store.gc(NO_RULES, dry_run=False, now=time.time())
    assert list((store.path / ".staging").iterdir()) == []


def test_gc_leaves_a_staging_that_is_just_being_made(store):
    """A directory that has no lock yet is left alone until it is old."""
    fresh = store.path / ".staging" / ".new.0"
    fresh.mkdir()
    store.gc(NO_RULES, dry_run=False, now=time.time())
    assert fresh.exists()
    os.utime(fresh, (0, 0))
    store.gc(NO_RULES, dry_run=False, now=time.time())
    assert not fresh.exists()


def test_the_partial_of_a_pinned_id_goes(store):
    """A pin keeps artifacts, not what was never finished."""
    put(store)
    store.pin(ID)
    with store.stage(ID) as staging:
        fill(staging, FILES)
    assert [item.path for item in store.gc(NO_RULES, dry_run=False, now=time.time())] == [staging.path]
    assert states(store) == [(ID, COMPLETE)]


def test_what_has_changed_since_the_list_stays(store):
    """An artifact that was pinned or replaced after gc had listed it is not removed."""
    put(store)
    (listed,) = store.artifacts()
    store.pin(ID)
    assert not store._remove(listed)
    store.unpin(ID)
    put(store)
    assert not store._remove(listed)
    assert states(store) == [(ID, COMPLETE), (ID, PREVIOUS)]


def test_an_artifact_that_waits_in_a_staging_directory_is_not_removed_with_it(store):
    """A publish killed between its renames leaves the old artifact in staging; gc brings it back."""
    old = put(store)
    with store.stage(ID) as staging:
        fill(staging)
        old.path.rename(staging.path / ".replaced")
    assert states(store) == [(ID, PARTIAL)]
    store.gc(NO_RULES, dry_run=False, now=time.time())
    assert store.get(ID) == old
    assert states(store) == [(ID, COMPLETE)]
