"""The id of a source: a hash of what makes two sources the same, as the ModelExpress server computes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Final

from hibernode.metadata.ids import SourceId
from hibernode.metadata.records import SourceIdentity

OPTIONAL: Final = frozenset(
    {
        "backend_framework_version",
        "torch_version",
        "cuda_version",
        "triton_version",
        "gpu_arch",
        "compile_config_digest",
    }
)
"""Fields that came later: they are in the hash only where they are filled, so that older ids stay."""


def mx_source_id(identity: SourceIdentity) -> SourceId:
    """Compute the id that the server gives: the text is hashed as UTF-8."""
    return _hash(canonical(identity))


def ids_of(identity: SourceIdentity) -> tuple[SourceId, ...]:
    r"""List the ids that a source goes by, the server's first.

    The Python client hashes text with every character beyond ASCII written as ``\uXXXX``, so for such an
    identity it computes another id than the server.
    """
    server = mx_source_id(identity)
    client = _hash(canonical(identity, ascii_only=True))
    return (server,) if client == server else (server, client)


def alias_of(identity: SourceIdentity | None) -> str:
    """Compute the other id that a source goes by; empty if there is none."""
    return next(iter(ids_of(identity)[1:]), "") if identity else ""


def identity_text(identity: SourceIdentity) -> str:
    """Write an identity as it is kept beside a record: JSON of the fields that are filled, case and all."""
    values = {key: value for key, value in asdict(identity).items() if value}
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def identity_from(text: str, source_id: str) -> SourceIdentity | None:
    """Read what :func:`identity_text` wrote; None for anything that does not have this id."""
    try:
        identity, blank = SourceIdentity(**json.loads(text)), SourceIdentity()
        if any(type(getattr(identity, f.name)) is not type(getattr(blank, f.name)) for f in fields(blank)):
            return None
        return identity if mx_source_id(identity) == source_id else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def canonical(identity: SourceIdentity, *, ascii_only: bool = False) -> str:
    """Write the text that is hashed: compact JSON with sorted keys, all strings in lower case."""
    values: dict[str, Any] = {}
    for field in fields(identity):
        value = getattr(identity, field.name)
        if isinstance(value, str):
            if value or field.name not in OPTIONAL:
                values[field.name] = value.lower()
        elif isinstance(value, Mapping):
            # The smallest original key wins where two are the same in lower case.
            lowered: dict[str, str] = {}
            for key in sorted(value):
                lowered.setdefault(key.lower(), value[key].lower())
            values[field.name] = lowered
        else:
            values[field.name] = int(value)
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=ascii_only)


def _hash(text: str) -> SourceId:
    return SourceId(hashlib.sha256(text.encode()).hexdigest()[:16])
