"""Standard output and logs on regular files: let them go on by appending.

A worker that is left running goes on writing to its log after the dump. CRIU notes the log's size and
refuses to restore when it differs; and if it did not, the restored worker would write over the lines that
came after the dump. CRIU itself leaves files alone that were opened for appending. So, in a fresh image and
before it is sealed, two kinds of files are marked as opened for appending, and their noted size is dropped:
those that descriptors 0 to 2 write to, and those that are open for writing only and stand at their end,
which is what a log does. A file that is written in the middle, or read too, keeps its size and its checks.
Nothing else in the image changes.

Formats: criu/images/fdinfo.proto, regfile.proto; magic numbers: criu/include/magic.h.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Final

from hibernode.errors import IntegrityError, RefusedError
from hibernode.host.safefs import Dir

IMG_COMMON_MAGIC: Final = 0x54564319
FDINFO_MAGIC: Final = 0x56213732
FILES_MAGIC: Final = 0x56303138
FD_TYPE_REG: Final = 1
MAX_IMAGE_BYTES: Final = 256 << 20
"""files.img has one entry of some 100 bytes for each open file."""

STDIO: Final = frozenset({0, 1, 2})

# Field numbers of the messages.
FDINFO_ID, FDINFO_TYPE, FDINFO_FD = 1, 3, 4
FILE_TYPE, FILE_ID, FILE_REG = 1, 2, 3
REG_FLAGS, REG_POS, REG_NAME, REG_SIZE, REG_BUILD_ID = 2, 3, 6, 8, 11
REG_CHECKSUM, REG_CHECKSUM_CONFIG, REG_CHECKSUM_PARAMETER = 12, 13, 14
VALIDATION: Final = frozenset(
    {REG_SIZE, REG_BUILD_ID, REG_CHECKSUM, REG_CHECKSUM_CONFIG, REG_CHECKSUM_PARAMETER}
)

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

Field = tuple[int, int, int | bytes]
"""(number, wire type, value)."""


def append_stdio(images: Dir) -> list[int]:
    """Mark the regular files that stdio and logs write to as appending; returns the changed files' ids.

    :raises IntegrityError: an image is not what CRIU writes.
    """
    wanted = {
        _number(fields, FDINFO_ID)
        for name in images.names()
        if name.startswith("fdinfo-") and name.endswith(".img")
        for fields in _messages(images, name, FDINFO_MAGIC)
        if _number(fields, FDINFO_FD) in STDIO and _number(fields, FDINFO_TYPE) == FD_TYPE_REG
    }
    changed: list[int] = []
    out = [struct.pack("<II", IMG_COMMON_MAGIC, FILES_MAGIC)]
    for fields in _messages(images, "files.img", FILES_MAGIC):
        entry = fields
        if _number(fields, FILE_TYPE) == FD_TYPE_REG:
            stdio = _number(fields, FILE_ID) in wanted
            entry = [_appending(field, stdio=stdio) if field[0] == FILE_REG else field for field in fields]
            if entry != fields:
                changed.append(_number(fields, FILE_ID))
        message = _encode(entry)
        out.append(struct.pack("<I", len(message)) + message)
    if changed:
        images.write_atomic("files.img", b"".join(out), 0o600, sync=False)
    return changed


def unchecked_paths(images: Dir) -> frozenset[str]:
    """List the regular files whose size CRIU will not compare at restore, by absolute path.

    :raises IntegrityError: files.img is not what CRIU writes.
    """
    found: set[str] = set()
    for fields in _messages(images, "files.img", FILES_MAGIC):
        for number, _, value in fields:
            if number == FILE_REG and isinstance(value, bytes):
                entry = _decode(value, "files.img")
                name = next((item[2] for item in entry if item[0] == REG_NAME), b"")
                if isinstance(name, bytes) and not any(item[0] == REG_SIZE for item in entry):
                    found.add("/" + os.fsdecode(name).lstrip("/"))
    return frozenset(found)


def _appending(field: Field, *, stdio: bool) -> Field:
    number, wire, value = field
    if not isinstance(value, bytes):
        raise IntegrityError("files.img: a regular file's entry is a number")
    fields = _decode(value, "files.img")
    flags = _number(fields, REG_FLAGS)
    access = flags & os.O_ACCMODE
    sized = any(item[0] == REG_SIZE for item in fields)
    log = access == os.O_WRONLY and sized and _number(fields, REG_POS) == _number(fields, REG_SIZE)
    if not (log or (stdio and access != os.O_RDONLY)):
        return field
    # CRIU looks past the size of a file only if it is write-only and appending; dropping it does the rest.
    kept = [item for item in fields if item[0] not in VALIDATION]
    return (
        number,
        wire,
        _encode(
            [
                (REG_FLAGS, VARINT, flags | os.O_APPEND) if item[:2] == (REG_FLAGS, VARINT) else item
                for item in kept
            ]
        ),
    )


def _messages(images: Dir, name: str, magic: int) -> Iterator[list[Field]]:
    try:
        data = images.read(name, MAX_IMAGE_BYTES).data
    except FileNotFoundError:
        raise IntegrityError(f"{images.path / name} is missing", remedy="the dump is not whole") from None
    except RefusedError as error:
        raise IntegrityError(error.message, remedy=error.remedy) from None
    if data[:8] != struct.pack("<II", IMG_COMMON_MAGIC, magic):
        raise IntegrityError(f"{images.path / name} does not start as a CRIU image of its kind")
    at = 8
    while at < len(data):
        if at + 4 > len(data):
            raise IntegrityError(f"{images.path / name} is cut off")
        (size,) = struct.unpack_from("<I", data, at)
        at += 4
        if at + size > len(data):
            raise IntegrityError(f"{images.path / name} is cut off")
        yield _decode(data[at : at + size], name)
        at += size


def _decode(data: bytes, name: str) -> list[Field]:
    fields: list[Field] = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at, name)
        wire = key & 7
        value: int | bytes
        if wire == VARINT:
            value, at = _varint(data, at, name)
        else:
            if wire == BYTES:
                size, at = _varint(data, at, name)
            elif wire in (FIXED32, FIXED64):
                size = 4 if wire == FIXED32 else 8
            else:
                raise IntegrityError(f"{name}: wire type {wire} is not used by CRIU")
            if at + size > len(data):
                raise IntegrityError(f"{name}: a message is cut off")
            value = data[at : at + size]
            at += size
        fields.append((key >> 3, wire, value))
    return fields


def _varint(data: bytes, at: int, name: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the continuation bit
            return value, at
    raise IntegrityError(f"{name}: a number is cut off")


def _encode(fields: list[Field]) -> bytes:
    out = bytearray()
    for number, wire, value in fields:
        out += _encode_varint(number << 3 | wire)
        if isinstance(value, int):
            out += _encode_varint(value)
        else:
            if wire == BYTES:
                out += _encode_varint(len(value))
            out += value
    return bytes(out)


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits a byte
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(fields: list[Field], number: int) -> int:
    for field, _, value in fields:
        if field == number and isinstance(value, int):
            return value
    return 0
