"""Protobuf's encoding of messages: tables in place of generated code, for peers that are not trusted.

A message is a dict. A table gives each field its number and its type: ``int`` (also for booleans and enums,
unsigned), ``str``, or the table of a message; ``[type]`` when it is repeated, which packed numbers are not.
A map is a repeated :data:`PAIR`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

Message: TypeAlias = dict[str, Any]
Table: TypeAlias = dict[str, tuple[int, Any]]

PAIR: Final[Table] = {"key": (1, str), "value": (2, str)}

MAX_FIELDS: Final = 1 << 18
"""Fields of a message and of all in it: what a peer sends may not become many times as large here."""

VARINT: Final = 0
BYTES: Final = 2
FIXED: Final = {1: 8, 5: 4}
"""Wire types of a fixed length, in bytes; no table here has such a field, so they are passed over."""

_WORD: Final = (1 << 64) - 1
_MORE: Final = 0x80
"""The bit of a number's byte that says that another follows."""


def encode(table: Table, message: Message) -> bytes:
    """Encode a message; fields that are absent, zero or empty take no room, as protobuf has it."""
    return b"".join(_fields(table, message))


def _fields(table: Table, message: Message) -> Iterator[bytes]:
    for name, value in message.items():
        number, kind = table[name]
        repeated = isinstance(kind, list)
        what = kind[0] if repeated else kind
        for one in value if repeated else [value]:
            if what is int:
                if one:
                    yield _number(number << 3 | VARINT) + _number(one)
            elif one or repeated or isinstance(what, dict):
                data = str(one).encode() if what is str else encode(what, one)
                yield _number(number << 3 | BYTES) + _number(len(data)) + data


def _number(value: int) -> bytes:
    """Encode a number of up to 64 bits, negative ones as their two's complement."""
    value &= _WORD
    out = bytearray()
    while value >= _MORE:
        out.append(value & 0x7F | _MORE)
        value >>= 7
    return bytes([*out, value])


def decode(table: Table, data: bytes, limit: int = MAX_FIELDS) -> Message:
    """Decode a message; fields that the table does not know are passed over, absent ones get their zero.

    The zero of a message in the message is None.

    :raises ValueError: these bytes are no such message, or it has more than ``limit`` fields.
    """
    return _Reader(data, limit).message(table, 0, len(data))


def pairs(mapping: dict[str, str]) -> list[Message]:
    """Write a mapping as protobuf does."""
    return [{"key": key, "value": value} for key, value in mapping.items()]


class _Reader:
    """Reads one message and all in it."""

    def __init__(self, data: bytes, limit: int) -> None:
        self._data, self._limit, self._left = data, limit, limit

    def message(self, table: Table, at: int, end: int) -> Message:
        """Read what lies between two offsets."""
        names = {number: (name, kind) for name, (number, kind) in table.items()}
        message: Message = {name: _zero(kind) for name, (_, kind) in table.items()}
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise ValueError(f"more than {self._limit} fields")
            key, at = self._number(at, end)
            form, start = key & 7, at
            value = 0
            if form == VARINT:
                value, at = self._number(at, end)
            else:
                start, at = self._bounds(form, at, end)
            if key >> 3 not in names:
                continue
            name, kind = names[key >> 3]
            what = kind[0] if isinstance(kind, list) else kind
            if form != (VARINT if what is int else BYTES):
                raise ValueError(f"{name} has the wire type {form}")
            found = value if what is int else self._inner(what, start, at)
            if isinstance(kind, list):
                message[name].append(found)
            else:
                message[name] = found
        return message

    def _inner(self, kind: Any, start: int, end: int) -> Any:
        if kind is str:
            return self._data[start:end].decode()
        return self.message(kind, start, end)

    def _bounds(self, form: int, at: int, end: int) -> tuple[int, int]:
        """Tell where a field's bytes begin and end."""
        if form == BYTES:
            length, at = self._number(at, end)
        elif form in FIXED:
            length = FIXED[form]
        else:
            raise ValueError(f"wire type {form}")
        if length > end - at:
            raise ValueError(f"{length} bytes where {end - at} are left")
        return at, at + length

    def _number(self, at: int, end: int) -> tuple[int, int]:
        """Read a number; also give where it ends."""
        value = 0
        for shift in range(0, 64, 7):
            if at >= end:
                raise ValueError("it ends in the middle of a number")
            byte = self._data[at]
            value, at = value | (byte & 0x7F) << shift, at + 1
            if byte < _MORE:
                if value > _WORD:
                    break
                return value, at
        raise ValueError("a number of more than 64 bits")


def _zero(kind: Any) -> Any:
    """Give what an absent field stands for."""
    return [] if isinstance(kind, list) else None if isinstance(kind, dict) else kind()
