"""TCP connections as CRIU's images tell of them, whole and hostile."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hibernode.criu.image_sockets import FILES_MAGIC, bound_addresses, tcp_connections
from hibernode.errors import IntegrityError
from tests.unit.test_images import image, number, varint


def words(address: str) -> list[int]:
    """Give an address as CRIU writes it down."""
    raw = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    return list(struct.unpack(f"={len(raw) // 4}I", raw))


def entry(
    local: str, remote: str, ports: tuple[int, int] = (4000, 5000), protocol: int = 6, family: int = 0
) -> bytes:
    """Encode a file_entry with an inet_sk_entry in it."""
    family = family or (10 if ":" in local else 2)
    numbers = [(1, 7), (2, 8), (3, family), (4, 1), (5, protocol), (6, 1), (7, ports[0]), (8, ports[1])]
    numbers += [(11, word) for word in words(local)] + [(12, word) for word in words(remote)]
    isk = b"".join(number(*pair) for pair in numbers)
    return number(1, 4) + number(2, 7) + varint(4 << 3 | 2) + varint(len(isk)) + isk


def write(directory: Path, *entries: bytes) -> Path:
    """Write files.img."""
    (directory / "files.img").write_bytes(image(*entries, magic=FILES_MAGIC))
    return directory


def test_both_families_are_read_and_mapped_addresses_unwrapped(tmp_path: Path) -> None:
    """Packets between mapped addresses are IPv4."""
    found = tcp_connections(
        write(
            tmp_path,
            entry("10.0.0.1", "10.0.0.2"),
            entry("fd00::1", "fd00::2", (1, 2)),
            entry("::ffff:10.0.0.2", "::ffff:10.0.0.1", (5000, 4000)),
        )
    )
    assert found == [
        (4, bytes([10, 0, 0, 1]), 4000, bytes([10, 0, 0, 2]), 5000),
        (6, socket.inet_pton(socket.AF_INET6, "fd00::1"), 1, socket.inet_pton(socket.AF_INET6, "fd00::2"), 2),
        (4, bytes([10, 0, 0, 2]), 5000, bytes([10, 0, 0, 1]), 4000),
    ]


def test_listeners_and_other_protocols_are_left_out(tmp_path: Path) -> None:
    """Only a connection of TCP has something to hold back."""
    regular = number(1, 1) + number(2, 3) + varint(3 << 3 | 2) + varint(2) + number(1, 5)
    directory = write(
        tmp_path, regular, entry("0.0.0.0", "0.0.0.0", (80, 0)), entry("10.0.0.1", "10.0.0.2", protocol=17)
    )
    assert tcp_connections(directory) == []


NONE = "0.0.0.0"
UDP, PING, RAW = 17, 1, 255


@pytest.mark.parametrize(
    ("found", "named"),
    [
        pytest.param(entry("10.0.0.1", NONE, (80, 0)), ("10.0.0.1",), id="it listens"),
        pytest.param(entry("10.0.0.1", "10.0.0.2"), (), id="a connection"),
        pytest.param(entry("10.0.0.1", NONE, (53, 0), UDP), ("10.0.0.1",), id="bound UDP"),
        pytest.param(entry("10.0.0.1", "10.0.0.2", (40000, 53), UDP), ("10.0.0.1",), id="connected UDP"),
        pytest.param(entry("fd00::1", "::", (53, 0), UDP), ("fd00::1",), id="UDP of IPv6"),
        pytest.param(entry("::ffff:10.0.0.1", "::", (53, 0), UDP), ("10.0.0.1",), id="a mapped address"),
        pytest.param(entry("::ffff:10.0.0.1", "fd00::2", (53, 9), UDP), ("10.0.0.1",), id="two kinds"),
        pytest.param(entry("10.0.0.1", NONE, (6, 0), RAW), ("10.0.0.1",), id="raw"),
        pytest.param(entry("10.0.0.1", NONE, (9, 0), PING), (), id="ping, which CRIU does not bind"),
        pytest.param(entry("10.0.0.1", NONE, (0, 0), UDP), (), id="no port, so not bound"),
        pytest.param(entry(NONE, NONE, (53, 0), UDP), (), id="all of IPv4"),
        pytest.param(entry("::", "::", (80, 0)), (), id="all of IPv6"),
        pytest.param(entry("::ffff:0.0.0.0", "::", (53, 0), UDP), (), id="all of it, mapped"),
        pytest.param(entry("127.8.8.8", NONE, (53, 0), UDP), (), id="loopback"),
        pytest.param(entry("::1", "::", (80, 0)), (), id="loopback of IPv6"),
        pytest.param(entry("1.2.7.127", NONE, (80, 0)), ("1.2.7.127",), id="no loopback"),
        pytest.param(entry("239.1.2.3", NONE, (53, 0), UDP), (), id="multicast"),
        pytest.param(entry("255.255.255.255", NONE, (53, 0), UDP), (), id="broadcast"),
    ],
)
def test_addresses_that_criu_will_bind_are_named(
    tmp_path: Path, found: bytes, named: tuple[str, ...]
) -> None:
    """Those that not every network namespace has, once each."""
    assert bound_addresses(write(tmp_path, found, found)) == named


@pytest.mark.parametrize(
    "bad",
    [
        entry("10.0.0.1", "10.0.0.2", (4000, 70_000)),
        entry("10.0.0.1", "10.0.0.2", family=10),
        entry("10.0.0.1", "10.0.0.2", family=3),
        entry("::ffff:10.0.0.1", "fd00::1"),
        number(4, 1),
        entry("10.0.0.1", "10.0.0.2") + number(4, 1),
    ],
    ids=["port", "short address", "family", "two kinds", "no message", "again as a number"],
)
def test_a_damaged_socket_is_an_integrity_error(tmp_path: Path, bad: bytes) -> None:
    """The file is named; nothing is guessed."""
    with pytest.raises(IntegrityError, match=r"files\.img"):
        tcp_connections(write(tmp_path, bad))


def test_images_without_files_are_an_integrity_error(tmp_path: Path) -> None:
    """A dump always has the file."""
    with pytest.raises(IntegrityError, match="is absent"):
        tcp_connections(tmp_path)


@given(data=st.binary(max_size=200), cut=st.integers(0, 200))
def test_any_bytes_give_connections_or_an_integrity_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int
) -> None:
    """Nothing else can come of a hostile file."""
    directory = tmp_path_factory.mktemp("images")
    good = entry("10.0.0.1", "10.0.0.2")
    write(directory, good[:cut] + data + good[cut:])
    try:
        found = tcp_connections(directory)
        bound_addresses(directory)
    except IntegrityError:
        return
    assert all(version in (4, 6) for version, *_ in found)
