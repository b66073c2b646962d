"""Reading Kubernetes objects that may be anything: what is not as it should be counts as absent."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
"""A DNS subdomain (RFC 1123), as most objects' names are."""

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
"""A DNS label (RFC 1123), as the names of namespaces and containers are."""

_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
"""apimachinery's rule for what stands behind a label's key; empty would be one too."""


def is_name(value: object) -> bool:
    """Tell whether this can be an object's name."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def is_short_name(value: object) -> bool:
    """Tell whether this can be the name of a namespace or of a container."""
    return isinstance(value, str) and _LABEL.fullmatch(value) is not None


def is_label_value(value: object) -> bool:
    """Tell whether this can be a label's value, and is not empty."""
    return isinstance(value, str) and _LABEL_VALUE.fullmatch(value) is not None


def part_of(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Take an object out of another; empty where there is none."""
    found = raw.get(name)
    return found if isinstance(found, dict) else {}


def metadata_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take the metadata of an object; empty for one without."""
    return part_of(raw, "metadata")


def status_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take the status of an object; empty for one without."""
    return part_of(raw, "status")


def conditions_of(raw: Mapping[str, Any]) -> Sequence[Any]:
    """List the conditions of an object."""
    found = status_of(raw).get("conditions")
    return found if isinstance(found, list) else []


def stamp(seconds: float) -> str:
    """Write seconds since 1970 as Kubernetes does."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
