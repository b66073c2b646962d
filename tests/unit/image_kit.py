"""CRIU images made by hand: protobuf fields, records and directories of images."""

from __future__ import annotations

import contextlib
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hibernode.criu.images import COMMON_MAGIC
from hibernode.host.safefs import Dir


def varint(value: int) -> bytes:
    """Write a number as protobuf does."""
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    """Write a number field."""
    return varint(field << 3) + varint(value)


def data(field: int, value: bytes) -> bytes:
    """Write a field of bytes."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def image(magic: int, *messages: bytes) -> bytes:
    """Write an image."""
    body = b"".join(struct.pack("<I", len(message)) + message for message in messages)
    return struct.pack("<II", COMMON_MAGIC, magic) + body


@contextlib.contextmanager
def images(**files: bytes) -> Iterator[Dir]:
    """Put files ``<name>.img`` into a directory; underscores stand for dashes."""
    with tempfile.TemporaryDirectory() as name:
        for file, content in files.items():
            (Path(name) / f"{file.replace('_', '-')}.img").write_bytes(content)
        with Dir.open(Path(name)) as directory:
            yield directory
