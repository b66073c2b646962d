"""A worker's tensors as they are stored: ``tensors.json`` as the Rust server reads it, packed if large."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hibernode.errors import IntegrityError, TooLargeError
from hibernode.metadata.records import U32_MAX, U64_MAX, TensorDescriptor

PLAIN_KEY: Final = "tensors.json"
PACKED_KEY: Final = "tensors.json.zlib"
"""A reader that knows only the plain key finds none, and refuses; it never sees a part."""

PLAIN_MAX: Final = (1 << 20) - 4096
"""A ConfigMap's values may have 1 MiB (k8s.io/api/core: MaxSecretSize); a little room stays."""

UNPACKED_MAX: Final = 64 << 20
"""Bytes of JSON: ``gate.TENSORS_MAX`` tensors with names as real ones have."""

DIGEST: Final = 16
"""Hexadecimal digits of the SHA-256 that goes into a name."""

_DECIMAL: Final = re.compile(r"[0-9]{1,20}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The bytes that are kept, under which key, and the digest of the bytes."""

    key: str
    data: bytes
    digest: str


def store(tensors: Sequence[TensorDescriptor], *, plain_max: int = PLAIN_MAX) -> StoredTensors:
    """Encode tensors: compact JSON, and packed where that has more than ``plain_max`` bytes.

    :raises TooLargeError: nobody would read that much back.
    """
    rows = [
        {"name": t.name, "addr": str(t.addr), "size": str(t.size), "device_id": t.device_id, "dtype": t.dtype}
        for t in tensors
    ]
    data = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
    if len(data) > UNPACKED_MAX:
        raise TooLargeError(f"the tensors need {len(data)} bytes, more than {UNPACKED_MAX}")
    key = PLAIN_KEY
    if len(data) > plain_max:
        key, data = PACKED_KEY, zlib.compress(data, 6)
    return StoredTensors(key, data, digest_of(data))


def load(stored: StoredTensors, *, count: int, where: str) -> tuple[TensorDescriptor, ...]:
    """Decode what :func:`store` or the Rust server made; any white space and unknown keys are fine.

    ``stored.digest`` is the one that the bytes must have, empty if none is known; ``count`` the number of
    tensors that the record tells of; ``where`` names the place in an error.

    :raises IntegrityError: another digest or count, or no list of tensors.
    """
    if stored.digest and digest_of(stored.data) != stored.digest:
        raise corrupt(where, f"the digest of its bytes is {digest_of(stored.data)}, not {stored.digest}")
    data = stored.data
    if stored.key == PACKED_KEY:
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(data, UNPACKED_MAX)
        except zlib.error as error:
            raise corrupt(where, f"it cannot be unpacked: {error}") from None
        if not unpacker.eof:
            raise corrupt(where, f"it is cut, or unpacks to more than {UNPACKED_MAX} bytes")
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"it is not JSON: {str(error)[:200]}") from None
    if not isinstance(rows, list):
        raise corrupt(where, "it is not a list of tensors")
    tensors = tuple(_tensor(row, where) for row in rows)
    if len(tensors) != count:
        raise corrupt(where, f"it has {len(tensors)} tensors, and the record says {count}")
    return tensors


def digest_of(data: bytes) -> str:
    """Compute the short digest that names content."""
    return hashlib.sha256(data).hexdigest()[:DIGEST]


def corrupt(where: str, what: str) -> IntegrityError:
    """Make the error for a record that is not whole."""
    return IntegrityError(
        f"{where}: {what}", remedy="the worker has to publish again", reason="RecordCorrupt"
    )


def _tensor(row: Any, where: str) -> TensorDescriptor:
    if isinstance(row, dict):
        name, dtype, device = row.get("name"), row.get("dtype"), row.get("device_id")
        addr, size = _u64(row.get("addr")), _u64(row.get("size"))
        if (
            isinstance(name, str)
            and isinstance(dtype, str)
            and type(device) is int
            and 0 <= device <= U32_MAX
            and addr is not None
            and size is not None
        ):
            return TensorDescriptor(name, addr, size, device, dtype)
    raise corrupt(where, f"no tensor: {row!r:.200}")


def _u64(value: Any) -> int | None:
    """Read a decimal text; numbers are refused, as the Rust server does: JSON's have but 53 bits for many."""
    if not isinstance(value, str) or _DECIMAL.fullmatch(value) is None:
        return None
    number = int(value)
    return number if number <= U64_MAX else None
