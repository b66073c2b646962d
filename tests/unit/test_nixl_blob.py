"""The header of NIXL blobs: whose they are, and nothing that they claim is believed."""

from __future__ import annotations

import hashlib
import struct
import time
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hibernode.errors import RefusedError
from hibernode.metadata.nixl_blob import MAX_BLOB_BYTES, BlobHeader, Connection, read_header, require_agent


def field(tag: bytes, value: bytes) -> bytes:
    """Make a field as NIXL does."""
    return tag + struct.pack("<Q", len(value)) + value + b"|"


def make_blob(
    agent: bytes = b"mx-auto-worker0-0a1b2c3d",
    backends: Sequence[tuple[bytes, bytes]] = ((b"UCX", b"\x20" + bytes(212)),),
    *,
    count: bytes | None = None,
    memory: bytes = field(b"nixlSecElms", struct.pack("<Q", 0)),
) -> bytes:
    """Make a blob with the given agent, connections and memory section."""
    number = struct.pack("<Q", len(backends)) if count is None else count
    connections = b"".join(field(b"t", name) + field(b"c", info) for name, info in backends)
    head = b"nixlSerDes|" + field(b"Agent", agent) + field(b"Conns", number) + connections
    return head + field(b"", b"MemSection") + memory


BLOB = make_blob()
TWO = make_blob(backends=((b"UCX", b"x" * 99), (b"LIBFABRIC", b"y" * 300)))


def test_a_header_names_agent_backends_sizes_and_digest() -> None:
    """What is read is what was written."""
    header = read_header(TWO)
    assert header.agent == "mx-auto-worker0-0a1b2c3d"
    assert header.connections == (Connection("UCX", 99), Connection("LIBFABRIC", 300))
    assert header.memory_size == len(field(b"nixlSecElms", bytes(8)))
    assert header.size == len(TWO)
    assert header.digest == hashlib.sha256(TWO).hexdigest()


BAD = {
    "empty": b"",
    "another mark": b"nixlSerDes2" + BLOB[11:],
    "no agent": b"nixlSerDes|" + BLOB[BLOB.index(b"Conns") :],
    "empty name": make_blob(b""),
    "long name": make_blob(b"a" * 129),
    "name with a slash": make_blob(b"../a"),
    "name with a line end": make_blob(b"a\n"),
    "name in UTF-8": make_blob("é".encode()),
    "no connections": make_blob(backends=()),
    "count of four bytes": make_blob(count=struct.pack("<I", 1)),
    "count too high": make_blob(count=struct.pack("<Q", 2)),
    "count too low": make_blob(count=struct.pack("<Q", 1), backends=((b"UCX", b""), (b"GDS", b""))),
    "count of all ones": make_blob(count=b"\xff" * 8),
    "33 connections": make_blob(backends=[(b"B%d" % number, b"") for number in range(33)]),
    "backend twice": make_blob(backends=((b"UCX", b"a"), (b"UCX", b"b"))),
    "length beyond the end": BLOB.replace(struct.pack("<Q", 213), struct.pack("<Q", 2130)),
    "length of all ones": BLOB.replace(struct.pack("<Q", 213), b"\xff" * 8),
    "length one short": BLOB.replace(struct.pack("<Q", 213), struct.pack("<Q", 212)),
    "no memory section": make_blob(memory=b""),
    "memory section cut": BLOB[:-1],
    "text that splits frames": make_blob(memory=field(b"x", b"NIXLCOMM:INVL")),
}


@pytest.mark.parametrize("blob", BAD.values(), ids=BAD.keys())
def test_a_bad_blob_is_refused_with_a_sentence(blob: bytes) -> None:
    """The reason is BlobMalformed, and what the sentence shows can be printed."""
    with pytest.raises(RefusedError, match=r"^the NIXL blob cannot be read: ") as caught:
        read_header(blob)
    assert caught.value.reason == "BlobMalformed"
    assert all(line.isprintable() for line in str(caught.value).splitlines())


def test_every_cut_in_the_header_is_refused() -> None:
    """No prefix of a blob passes for one."""
    for end in range(len(BLOB)):
        with pytest.raises(RefusedError):
            read_header(BLOB[:end])


def test_a_blob_over_the_limit_is_refused_unread() -> None:
    """The limit is the caller's, and 100 MB are over the usual one."""
    read_header(BLOB, max_bytes=len(BLOB))
    for blob, most in ((BLOB, len(BLOB) - 1), (bytes(100_000_000), MAX_BLOB_BYTES)):
        with pytest.raises(RefusedError) as caught:
            read_header(blob, max_bytes=most)
        assert caught.value.reason == "BlobTooLarge"
        assert caught.value.fields["size"] == len(blob)


def test_a_blob_of_another_agent_is_refused() -> None:
    """The name in the blob must be the record's; one that only looks like it is not."""
    header = read_header(BLOB)
    require_agent(header, "mx-auto-worker0-0a1b2c3d")
    for other in ("mx-auto-worker1-0a1b2c3d", "", "MX-auto-worker0-0a1b2c3d", "x" * 100_000):
        with pytest.raises(RefusedError) as caught:
            require_agent(header, other)
        assert caught.value.reason == "BlobAgentMismatch"
        assert len(str(caught.value)) < 500


def read(blob: bytes) -> BlobHeader | str:
    """Read a header; the reason if it is refused."""
    try:
        return read_header(blob)
    except RefusedError as error:
        return error.reason


Edit = tuple[int, int, bytes]
edits = st.lists(
    st.tuples(
        st.integers(0, len(TWO)),
        st.integers(0, 16),
        st.one_of(
            st.binary(max_size=16),
            st.integers(0, 2**64 - 1).map(lambda number: struct.pack("<Q", number)),
            st.sampled_from([b"Agent", b"Conns", b"MemSection", b"|", b"t", b"c", b"NIXLCOMM:", BLOB]),
        ),
    ),
    max_size=4,
)


@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.sampled_from([BLOB, TWO]), edits)
def test_no_mutated_blob_gets_past_the_errors_of_ours(blob: bytes, changes: list[Edit]) -> None:
    """10,000 of them: each is refused, or read within its own bounds."""
    for at, cut, insert in changes:
        blob = blob[:at] + insert + blob[at + cut :]
    header = read(blob)
    if isinstance(header, str):
        assert header == "BlobMalformed"
        return
    assert header.size == len(blob)
    assert 1 <= len(header.agent) <= 128
    assert header.agent.isascii()
    assert sum(connection.size for connection in header.connections) + header.memory_size < len(blob)


def test_a_hostile_blob_costs_no_more_than_its_size() -> None:
    """16 MiB of all kinds are read in well under a second each, and without a copy."""
    large = make_blob(backends=((b"UCX", bytes(8 << 20)),), memory=field(b"m", bytes((8 << 20) - 1000)))
    hostile = [
        large,
        large.replace(b"MemSection", b"memSection"),
        make_blob(count=b"\xff" * 8, memory=field(b"t", b"UCX") * 700_000),
        make_blob(memory=b"NIXLCOMM" * ((2 << 20) - 1000)),
        b"nixlSerDes|" * 1_500_000,
    ]
    tracemalloc.start()
    try:
        began = time.process_time()
        results = [read(blob) for blob in hostile]
        assert time.process_time() - began < 10
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert isinstance(results[0], BlobHeader)
    assert results[1:] == ["BlobMalformed"] * 4
