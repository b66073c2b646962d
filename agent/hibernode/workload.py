"""The nouns everyone shares: checkpoint ids, eras and their names, processes.

Pure data. Nothing here touches the system.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from hibernode.errors import UsageError

ID_PATTERN: Final = re.compile(r"[0-9a-f]{12}|[0-9a-f]{16}", re.ASCII)
"""Eras A0 and early A1 cut the identity's SHA-256 to 12 hexadecimal digits, later ones to 16."""


class CheckpointId(str):
    """A checkpoint id that has passed the gate. Nothing else may touch a path, a label or a URL.

    It is a plain string of 12 or 16 lower-case hexadecimal digits, so it can hold no separator, no dot
    and no look-alike.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Let ``text`` through the gate.

        :raises UsageError: it is not 12 or 16 lower-case hexadecimal digits.
        """
        if not isinstance(text, str) or ID_PATTERN.fullmatch(text) is None:
            shown = repr(text) if len(str(text)) <= 40 else repr(str(text)[:40]) + "..."  # noqa: PLR2004
            raise UsageError(
                f"{shown} is not a checkpoint id",
                remedy="an id is 12 or 16 lower-case hexadecimal digits, such as 96429b272576",
                reason="InvalidCheckpointId",
            )
        return super().__new__(cls, text)


@dataclass(frozen=True, slots=True)
class Era:
    """The names of one era of the contract (the era table: one place for each constant).

    ``later_*``: what the eras after it call the worker's own ready file, or the directory that it is in; a
    worker that is told of both may follow either.
    """

    name: str
    env_hash: str
    env_signal_file: str
    env_ready_file: str
    env_restore_marker: str
    ready_file: str
    restore_marker: str
    signal_dir: str
    checkpoint_base: str
    ready_suffix: str = ".ready"
    done_suffix: str = ".done"
    restore_suffix: str = ".restore"
    restored_suffix: str = ".restored"
    done_in_artifact: str = "checkpoint.done"
    later_env_ready_file: str = "DYN_READY_FOR_CHECKPOINT_FILE"
    later_env_control_dir: str = "DYN_SNAPSHOT_CONTROL_DIR"
    later_ready_name: str = "ready-for-checkpoint"


ERA_A1: Final = Era(
    name="A1",
    env_hash="DYN_CHECKPOINT_HASH",
    env_signal_file="DYN_CHECKPOINT_SIGNAL_FILE",
    env_ready_file="DYN_CHECKPOINT_READY_FILE",
    env_restore_marker="DYN_RESTORE_MARKER_FILE",
    ready_file="/tmp/checkpoint-ready",  # noqa: S108 - the contract's path inside the worker's root
    restore_marker="/tmp/dynamo-restored",  # noqa: S108 - likewise
    signal_dir="/var/lib/dynamo-checkpoint/signals",
    checkpoint_base="/checkpoints",
)
"""Dynamo's signal-file era; the default."""


class Verdict(StrEnum):
    """What a check says."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of a preflight, a compatibility gate or ``doctor``.

    ``check`` is a stable dotted name such as ``tree.io_uring``; ``expected`` and ``found`` hold both
    values; ``remedy`` is filled when the verdict is fail or warn; ``reason`` is the CamelCase word that
    an event would carry.
    """

    check: str
    verdict: Verdict
    expected: str = ""
    found: str = ""
    remedy: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """A process as the kernel knows it since boot: a pid alone can be reused.

    ``start_ticks`` is field 22 of /proc/PID/stat, in clock ticks since boot.
    """

    pid: int
    start_ticks: int
