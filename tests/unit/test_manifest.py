"""The manifest: what it holds comes back as it was, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from hibernode.artifact.manifest import MAX_MANIFEST_BYTES, manifest_bytes, parse_manifest
from hibernode.errors import IntegrityError
from tests.unit.artifact_kit import FILES, ID, PROCESS, fields, files_of, forged, manifest, with_digest


def test_a_manifest_comes_back_as_it_was():
    """What is written is read back equal, and writes the same bytes again."""
    written = manifest()
    data = manifest_bytes(written)
    assert parse_manifest(data) == written
    assert manifest_bytes(parse_manifest(data)) == data


def test_its_file_is_plain_json():
    """Other programs can read it: one JSON object with the fields as documented."""
    data = json.loads(manifest_bytes(manifest()))
    assert data["api_version"] == "hibernode.io/v1"
    assert data["id"] == ID
    assert data["files"] == files_of(FILES)


def test_a_manifest_cannot_be_changed():
    """A manifest in memory is frozen, lists included."""
    one = manifest()
    with pytest.raises(ValidationError):
        one.node = "other"  # type: ignore[misc] # that it is refused is the point
    assert isinstance(one.files, tuple)
    assert isinstance(one.process.cmdline, tuple)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        pytest.param("2026-12-01T04:00:00Z", "2026-12-01T04:00:00.000000Z", id="whole seconds"),
        pytest.param("2026-12-01T04:00:00.123Z", "2026-12-01T04:00:00.123000Z", id="milliseconds"),
        pytest.param("2026-12-01T04:00:00+00:00", "2026-12-01T04:00:00.000000Z", id="an offset of zero"),
    ],
)
def test_times_are_kept_in_one_form(text, kept):
    """Creation times of any precision are kept so that their texts sort by time."""
    assert manifest(created_at=text).created_at == kept


def test_names_that_are_not_utf8_are_kept_readable():
    """A process may have any bytes in its command line; they must not break sealing."""
    odd = manifest(process={**PROCESS, "cmdline": ["a\udcff"]})
    assert odd.process.cmdline == ("a\\xff",)
    assert parse_manifest(manifest_bytes(odd)) == odd


def file(path: str, **changes: object) -> list[dict[str, object]]:
    return [{"path": path, "size": 0, "digest": "0" * 64, **changes}]


LONE_FILE = {"total_bytes": 0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"files": file("../../etc/passwd")}, "files.0.path", id="a path out of the artifact"),
        pytest.param({"files": file("images/../../x")}, "files.0.path", id="a path out by a detour"),
        pytest.param({"files": file("/etc/passwd")}, "files.0.path", id="an absolute path"),
        pytest.param({"files": file("")}, "files.0.path", id="an empty path"),
        pytest.param({"files": file("images//x")}, "files.0.path", id="an empty name in a path"),
        pytest.param({"files": file("images/.hidden")}, "files.0.path", id="a hidden file"),
        pytest.param({"files": file("x\0y")}, "files.0.path", id="a NUL in a path"),
        pytest.param({"files": file("x\ny")}, "files.0.path", id="a line feed in a path"),
        pytest.param({"files": file("x" * 256)}, "files.0.path", id="a name that is too long"),
        pytest.param({"files": file("x/" * 2000 + "x")}, "files.0.path", id="a path that is too deep"),
        pytest.param({"files": file("manifest.json")}, "files.0.path", id="the manifest itself"),
        pytest.param({"files": file("x") * 2, **LONE_FILE}, "'x' twice", id="a path twice"),
        pytest.param({"files": file("x", size=-1)}, "files.0.size", id="a negative size"),
        pytest.param({"files": file("x", size=1 << 63)}, "files.0.size", id="a size that no file can have"),
        pytest.param({"files": file("x", size=1.0)}, "files.0.size", id="a size that is no integer"),
        pytest.param({"files": file("x", size=True)}, "files.0.size", id="a size that is a truth value"),
        pytest.param({"files": file("x", digest="0" * 63)}, "files.0.digest", id="a short digest"),
        pytest.param(
            {"files": file("x", digest="G" * 64)}, "files.0.digest", id="a digest that is no number"
        ),
        pytest.param({"files": file("x", mode=0)}, "files.0.mode", id="an unknown field in a file"),
        pytest.param({"files": [], **LONE_FILE}, "files", id="no files"),
        pytest.param({"total_bytes": 1}, "total_bytes", id="a sum that is wrong"),
        pytest.param({"unknown": 1}, "unknown", id="an unknown field"),
        pytest.param({"id": "../x"}, "id", id="an id that is none"),
        pytest.param({"id": "96429b272576\n"}, "id", id="an id and a line feed"),
        pytest.param({"uuid": "x"}, "uuid", id="a uuid that is none"),
        pytest.param({"uuid": None}, "uuid", id="no uuid"),
        pytest.param({"created_at": "yesterday"}, "created_at", id="a time that is none"),
        pytest.param({"created_at": "2026-12-01T04:00:00"}, "created_at", id="a time of no zone"),
        pytest.param({"tcp": "maybe"}, "tcp", id="an unknown word"),
        pytest.param({"process": {**PROCESS, "uids": [0]}}, "process.uids", id="too few ids"),
        pytest.param({"process": {**PROCESS, "pid": "1"}}, "process.pid", id="a number as text"),
        pytest.param({"tree": []}, "tree", id="no process"),
        pytest.param({"phases": {"dump": float("nan")}}, "phases.dump", id="a time that is no number"),
        pytest.param({"namespaces": []}, "namespaces", id="a list for a mapping"),
    ],
)
def test_a_wrong_field_is_refused_and_named(changes, named):
    """A forged manifest, its digest in order, is refused for the first field that is wrong."""
    with pytest.raises(IntegrityError) as caught:
        parse_manifest(forged(**changes), source="/store/x/manifest.json")
    assert named in caught.value.message
    assert caught.value.message.startswith("/store/x/manifest.json: ")
    assert len(caught.value.message) < 500


def test_an_unknown_version_is_said_to_be_one():
    """A manifest of a later release is not called damaged: the remedy is another release."""
    with pytest.raises(IntegrityError) as caught:
        parse_manifest(with_digest(json.dumps({**fields(), "api_version": "hibernode.io/v2"})))
    assert caught.value.reason == "UnknownVersion"
    assert "hibernode.io/v2" in caught.value.message
    assert "hibernode.io/v1" in caught.value.remedy


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{}", id="an empty object"),
        pytest.param(b"\0" * 1000, id="zeros, as a power loss leaves them"),
        pytest.param(json.dumps(fields()).encode(), id="a manifest without digest"),
        pytest.param(manifest_bytes(manifest())[:-1], id="cut by a byte"),
        pytest.param(manifest_bytes(manifest())[:50], id="cut inside the digest"),
        pytest.param(manifest_bytes(manifest()) + b" ", id="a byte more"),
        pytest.param(b" " * (17 << 20), id="17 MiB"),
        pytest.param(with_digest('{"id":' + "[" * 1_000_000), id="nested a million deep"),
        pytest.param(with_digest('{"phases":' + '{"a":' * 100_000), id="mappings nested deep"),
        pytest.param(with_digest('{"id":"\\ud800"}'), id="half a surrogate"),
        pytest.param(with_digest('{"id":' + "9" * 100_000 + "}"), id="a number of 100,000 digits"),
        pytest.param(with_digest("[]"), id="a list"),
        pytest.param(with_digest('{"' + "x" * 1_000_000 + '":1}'), id="a field's name of a megabyte"),
        pytest.param(with_digest('{"\x1b[2J":1}'), id="a field's name that steers the terminal"),
    ],
)
def test_what_is_no_manifest_is_refused(data):
    """Bytes of any kind are refused with one short printable sentence, quickly."""
    with pytest.raises(IntegrityError) as caught:
        parse_manifest(data)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 500
    assert caught.value.remedy


def test_the_limit_is_16_mib():
    """The bound that readers use is the documented one."""
    assert MAX_MANIFEST_BYTES == 16 << 20


def test_every_flipped_bit_is_seen():
    """A bit flipped anywhere, in a pid or in a name too, makes the manifest refused."""
    data = manifest_bytes(manifest())
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(IntegrityError):
            parse_manifest(bytes(flipped))
