"""The store: private, strict about what it takes, and whole for whoever looks."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from hibernode.artifact.store import ArtifactState, Store
from hibernode.errors import IntegrityError, NotFoundError, RefusedError, StorageError, UsageError
from tests.unit.artifact_kit import FILES, ID, OTHER, UUID, fill, manifest, put, seal
from tests.unit.hostile import open_descriptors

PAGES = "images/pages-1.img"


@pytest.fixture
def store(tmp_path):
    """Open a store; no descriptor may be left over."""
    before = open_descriptors()
    with Store(tmp_path / "store").open() as store:
        yield store
    assert open_descriptors() == before


def bad(store: Store, **options: bool) -> dict[str, str]:
    verdicts = store.verify(store.get(ID), **{"digests": False, **options})
    return {verdict.path: verdict.problem for verdict in verdicts if not verdict.ok}


def states(store: Store) -> list[tuple[str, str]]:
    return [(info.id, info.state) for info in store.artifacts()]


# opening ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_everything_is_private_whatever_the_umask(tmp_path, umask):
    """Directories are 0700 and files 0600, those that CRIU made with other modes too."""
    before = os.umask(umask)
    try:
        store = Store(tmp_path / "store").open()
        staging = store.stage(ID)
    finally:
        os.umask(before)
    fill(staging)
    os.umask(umask)
    try:
        with store, store.lock(ID), staging:
            store.seal(staging, manifest(uuid=staging.uuid))
            store.publish(staging, ID)
            store.pin(ID)
    finally:
        os.umask(before)
    assert (store.path / ID / PAGES).exists()
    for path in [store.path, *store.path.rglob("*")]:
        mode = path.lstat().st_mode
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
def test_a_store_open_to_others_is_refused(tmp_path, mode):
    """A directory that others may enter or write is no store; the remedy is the command that mends it."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(RefusedError) as caught:
        Store(tmp_path / "store").open()
    assert caught.value.reason == "StoreNotPrivate"
    assert f"{mode:04o}" in caught.value.message
    assert f"chmod 0700 {tmp_path}/store" in caught.value.remedy


def test_a_store_of_somebody_else_is_refused(tmp_path):
    """A directory of another user is no store, private or not."""
    (tmp_path / "store").mkdir(mode=0o700)
    os.chown(tmp_path / "store", 12345, -1)
    with pytest.raises(RefusedError, match="belongs to uid 12345") as caught:
        Store(tmp_path / "store").open()
    assert caught.value.reason == "StoreNotPrivate"


def test_a_link_is_no_store(tmp_path):
    """The store itself is not reached through a link at its end."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "store").symlink_to("elsewhere")
    with pytest.raises(RefusedError):
        Store(tmp_path / "store").open()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_store_that_cannot_be_made_is_a_storage_error(tmp_path):
    """A path that goes through a file is said to be unusable, with the setting's name."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file/store") as caught:
        Store(tmp_path / "file" / "store").open()
    assert "store.path" in caught.value.remedy


# publish and get ----------------------------------------------------------------------------------------


def test_what_is_published_can_be_had(store):
    """An artifact stands under its id, with its files and nothing of the work around it."""
    with store.lock(ID), store.stage(ID) as staging:
        staging.dir.write_atomic("journal.json", b"{}", 0o600)
        seal(store, staging)
        assert not staging.published()
        artifact = store.publish(staging, ID)
        assert staging.published()
        assert (staging.path / "journal.json").exists()
        store.discard(staging)
    assert artifact == store.get(ID)
    assert artifact.path == store.path / ID
    assert artifact.manifest.uuid == staging.uuid
    assert {str(p.relative_to(artifact.path)) for p in artifact.path.rglob("*") if p.is_file()} == {
        "manifest.json",
        *FILES,
    }
    assert bad(store, digests=True) == {}
    assert store.stagings() == []


def test_a_second_one_takes_its_place_and_the_first_stays_reachable(store):
    """The old artifact is found by its uuid or the beginning of it."""
    old, new = put(store), put(store)
    assert store.get(ID).manifest == new.manifest
    assert states(store) == [(ID, "complete"), (ID, "previous")]
    for version in (old.manifest.uuid, old.manifest.uuid[:8]):
        found = store.get(ID, version)
        assert found.manifest == old.manifest
        assert found.path == store.path / ".previous" / ID / old.manifest.uuid
        assert all(verdict.ok for verdict in store.verify(found, digests=True))
    assert store.get(ID, new.manifest.uuid).path == new.path


def test_publish_may_be_repeated(store):
    """A second publish of the same staging finds that it was done."""
    with store.stage(ID) as staging:
        seal(store, staging)
        assert store.publish(staging, ID) == store.publish(staging, ID)
    assert [info.state for info in store.artifacts()] == [ArtifactState.COMPLETE, ArtifactState.PARTIAL]


def test_get_reads_the_manifest_only(store):
    """Looking an artifact up does not touch its files; verify finds that one is gone."""
    (put(store).path / PAGES).unlink()
    assert store.get(ID).manifest.files
    assert bad(store) == {PAGES: "is missing"}


@pytest.mark.parametrize(
    ("version", "error"),
    [
        pytest.param("0" * 32, NotFoundError, id="another uuid"),
        pytest.param("0" * 8, NotFoundError, id="the beginning of another"),
        pytest.param("0" * 7, UsageError, id="too short a beginning"),
        pytest.param("0" * 33, UsageError, id="too long"),
        pytest.param("../../../etc", UsageError, id="a path"),
        pytest.param("0" * 8 + "\n", UsageError, id="a line feed"),
    ],
)
def test_a_version_that_is_not_there_is_not_found(store, version, error):
    """A version must be there, and be a version, before it becomes part of a path."""
    put(store)
    put(store)
    with pytest.raises(error):
        store.get(ID, version)


@pytest.mark.parametrize(
    "id_",
    [
        "../x",
        "a/b",
        "",
        "a" * 300,
        "\0",
        ".",
        "..",
        ".staging",
        "\uff19\uff16429b272576",
        "96429B272576",
        "96429b272576\n",
    ],
)
def test_fc37_ids_pass_the_gate(store, id_):
    """FC-37: no text that is not an id becomes a path, whichever method it is given to."""
    staging = store.stage(ID)
    with staging:
        for call in (store.get, store.stage, store.pin, store.unpin, lambda i: store.publish(staging, i)):
            with pytest.raises(UsageError):
                call(id_)
        with pytest.raises(UsageError), store.lock(id_):
            pass
    assert {path.name for path in store.path.iterdir()} == {".staging", ".previous", ".locks", ".pins"}
    assert list(store.path.parent.iterdir()) == [store.path]


def test_only_what_was_staged_for_an_id_is_published_under_it(store):
    """A staging directory cannot be published under another id."""
    with store.stage(ID) as staging:
        seal(store, staging)
        with pytest.raises(UsageError):
            store.publish(staging, OTHER)


@pytest.mark.parametrize("changes", [{"id": OTHER}, {"uuid": UUID}])
def test_a_manifest_of_other_work_is_not_sealed(store, changes):
    """The manifest must be of the id and the uuid that were staged."""
    with store.stage(ID) as staging:
        fill(staging)
        with pytest.raises(IntegrityError):
            store.seal(staging, manifest(**{"uuid": staging.uuid, **changes}))
        assert not (staging.artifact_path / "manifest.json").exists()


def test_a_hard_link_is_not_sealed(store, tmp_path):
    """A staged file that has a name elsewhere is refused: its modes would change there too."""
    (tmp_path / "outside").write_bytes(b"")
    (tmp_path / "outside").chmod(0o644)
    with store.stage(ID) as staging:
        fill(staging)
        os.link(tmp_path / "outside", staging.images / "x")
        with pytest.raises(RefusedError, match="hard link"):
            store.seal(staging, manifest(uuid=staging.uuid))
    assert stat.S_IMODE((tmp_path / "outside").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(lambda top: (top / "manifest.json").unlink(), "manifest.json", id="not sealed"),
        pytest.param(lambda top: (top / PAGES).unlink(), PAGES, id="a file gone"),
        pytest.param(lambda top: os.truncate(top / PAGES, 1), PAGES, id="a file cut"),
        pytest.param(lambda top: (top / "images" / "x").touch(), "images/x", id="a file more"),
        pytest.param(lambda top: (top / "x").symlink_to("/"), "x", id="a link"),
    ],
)
def test_what_is_not_whole_is_not_published(store, spoil, named):
    """What changed after the seal never gets a final name; the file is named, the old artifact stays."""
    old = put(store)
    with store.stage(ID) as staging:
        seal(store, staging)
        spoil(staging.artifact_path)
        with pytest.raises(IntegrityError) as caught:
            store.publish(staging, ID)
        assert named in caught.value.message
        store.discard(staging)
    assert store.get(ID) == old
    assert states(store) == [(ID, "complete")]


def test_a_reader_always_finds_a_whole_artifact(store):
    """While one version after the other is published, whoever looks gets one of them."""
    put(store)
    stop = threading.Event()
    seen: set[str] = set()

    def look() -> None:
        while not stop.is_set():
            seen.add(store.get(ID).manifest.uuid)

    reader = threading.Thread(target=look)
    reader.start()
    published = {put(store).manifest.uuid for _ in range(30)}
    stop.set()
    reader.join()
    assert seen & published, "the reader saw nothing"
    assert reader.is_alive() is False
    assert states(store) == [(ID, "complete"), *[(ID, "previous")] * 30]


# pins ---------------------------------------------------------------------------------------------------


def test_a_pin_shows_and_can_be_taken_back(store):
    """Pinning twice or unpinning what is not pinned is fine; pinning what is not there is not."""
    with pytest.raises(NotFoundError):
        store.pin(ID)
    put(store)
    store.unpin(ID)
    for _ in range(2):
        store.pin(ID)
    assert store.get(ID).pinned
    assert store.artifacts()[0].pinned
    store.unpin(ID)
    assert not store.get(ID).pinned
