"""Reading Kubernetes objects that may be anything: what is not as it should be counts as absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def metadata_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take the metadata of an object; empty for one without."""
    found = raw.get("metadata")
    return found if isinstance(found, dict) else {}


def conditions_of(raw: Mapping[str, Any]) -> Sequence[Any]:
    """List the conditions of an object."""
    status = raw.get("status")
    found = status.get("conditions") if isinstance(status, dict) else None
    return found if isinstance(found, list) else []
