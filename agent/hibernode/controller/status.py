"""The status of a DynamoCheckpoint: its phases, and its conditions as Kubernetes keeps them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from hibernode.kube.objects import conditions_of, metadata_of
from hibernode.text import printable

MAX_MESSAGE: Final = 4096
"""Characters; an API server's own complaint can be longer, and repeats itself."""


class Phase(StrEnum):
    """How far a checkpoint is."""

    PENDING = "Pending"
    CREATING = "Creating"
    READY = "Ready"
    FAILED = "Failed"


JOB_CREATED: Final = "JobCreated"
JOB_COMPLETED: Final = "JobCompleted"
TAR_AVAILABLE: Final = "TarAvailable"
"""Condition types, as Dynamo's controller names them."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition to be set."""

    type: str
    holds: bool
    reason: str
    message: str


def text_of(status: Mapping[str, Any], key: str) -> str:
    """Take a text out of a status; empty if there is none."""
    found = status.get(key)
    return found if isinstance(found, str) else ""


def number_of(status: Mapping[str, Any], key: str) -> int:
    """Take a number out of a status; 0 if there is none."""
    found = status.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def condition(raw: Mapping[str, Any], type_: str) -> Mapping[str, Any]:
    """Find a condition of an object; empty if it has none of that type."""
    found = (one for one in conditions_of(raw) if isinstance(one, dict) and one.get("type") == type_)
    return next(found, {})


def holds(raw: Mapping[str, Any], type_: str) -> bool:
    """Tell whether a condition of an object is True."""
    return condition(raw, type_).get("status") == "True"


def with_conditions(
    raw: Mapping[str, Any], new: Iterable[Condition], now: str, *, without: str = ""
) -> list[dict[str, Any]]:
    """Give the object's conditions with ``new`` set; the time of one changes only with its status.

    ``without`` names a type that is left out.
    """
    kept = [one for one in conditions_of(raw) if isinstance(one, dict) and one.get("type") != without]
    for one in new:
        old = condition(raw, one.type)
        status = str(one.holds)
        entry = {
            "type": one.type,
            "status": status,
            "reason": one.reason,
            "message": bounded(one.message),
            "lastTransitionTime": old.get("lastTransitionTime") if old.get("status") == status else now,
        }
        generation = metadata_of(raw).get("generation")
        if isinstance(generation, int):
            entry["observedGeneration"] = generation
        places = [index for index, other in enumerate(kept) if other.get("type") == one.type]
        if places:
            kept[places[0]] = entry
        else:
            kept.append(entry)
    return kept


def bounded(message: str) -> str:
    """Cut a message, and show what has no glyph as escapes."""
    message = printable(message)
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} [truncated]"


def moment(text: Any) -> float:
    """Read a time of Kubernetes as seconds since 1970; 0 for what is none."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else 0.0
    except (ValueError, OverflowError):
        return 0.0
