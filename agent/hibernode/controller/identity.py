"""The identity of a checkpoint, and the hash that names it, byte for byte as Dynamo's operator makes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from hibernode.errors import RefusedError
from hibernode.workload import CheckpointId

Length = Literal[12, 16]
"""Hexadecimal digits of a hash: 12 in eras A0 and early A1, 16 later."""

_GO_ESCAPES: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
"""What Go's JSON escapes and Python's does not."""

_VERSIONS: Final = ("frameworkVersion", "dynamoVersion")
"""The early and the late name of one field; each is hashed under its own name, in this place."""

_MAX_INT: Final = (1 << 31) - 1


def canonical(identity: Any) -> bytes:
    """Write an identity down as it is hashed: fields in the order of the operator's structure, no blanks.

    :raises RefusedError: a field is missing or has a value that it cannot have, reason ``InvalidIdentity``.
    """
    if not isinstance(identity, Mapping):
        raise _refused("spec.identity", identity, "an object with model and backendFramework")
    fields: dict[str, Any] = {}
    for name in ("model", "backendFramework"):
        if not _text(identity, name):
            raise _refused(f"spec.identity.{name}", identity.get(name), "a text that is not empty")
        fields[name] = identity[name]
    fields |= {name: identity[name] for name in _VERSIONS if _text(identity, name)}
    for name in ("tensorParallelSize", "pipelineParallelSize"):
        fields[name] = _number(identity, name) or 1
    if _text(identity, "dtype"):
        fields["dtype"] = identity["dtype"]
    if _number(identity, "maxModelLen"):
        fields["maxModelLen"] = identity["maxModelLen"]
    extra = identity.get("extraParameters") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(v, str) for pair in extra.items() for v in pair):
        raise _refused("spec.identity.extraParameters", extra, "texts by name")
    if extra:
        # Go sorts keys by their bytes.
        fields["extraParameters"] = dict(sorted(extra.items(), key=lambda pair: pair[0].encode()))
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_GO_ESCAPES).encode()


def identity_hash(identity: Any, length: Length = 12) -> CheckpointId:
    """Name an identity: the first digits of the SHA-256 of its canonical form.

    :raises RefusedError: it is no identity, reason ``InvalidIdentity``.
    """
    return CheckpointId(hashlib.sha256(canonical(identity)).hexdigest()[:length])


def _text(identity: Mapping[str, Any], name: str) -> str:
    found = identity.get(name)
    if found is None:
        return ""
    if not isinstance(found, str) or any(0xD800 <= ord(char) <= 0xDFFF for char in found):  # noqa: PLR2004
        raise _refused(f"spec.identity.{name}", found, "a text")
    return found


def _number(identity: Mapping[str, Any], name: str) -> int:
    found = identity.get(name)
    if found is None:
        return 0
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= _MAX_INT:
        raise _refused(f"spec.identity.{name}", found, "a whole number")
    return found


def _refused(field: str, found: Any, wanted: str) -> RefusedError:
    return RefusedError(
        f"{field} is {str(found)[:100]!r}", remedy=f"it must be {wanted}", reason="InvalidIdentity"
    )
