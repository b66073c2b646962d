"""The table of known causes: what a line of CRIU's log means, and what to do about it.

Lines are CRIU 4.2.1's; from one version to another they hardly change. The first row that fits a line wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hibernode.criu.causes_dump import DUMP
from hibernode.criu.causes_restore import RESTORE
from hibernode.criu.known import Known, Operation, row

BOTH: Final = (
    row(
        "NoSpace",
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "make room ('hibernode gc'), or move the store to a larger disk",
    ),
    row(
        "NoMemory",
        r"Cannot allocate memory|Not enough memory|Out of memory",
        "there is not enough memory",
        "free memory, or raise the limit of the container that CRIU runs in",
    ),
    row(
        "ActionScript",
        r"Script (?P<script>.+) exited with",
        "the action script {script} failed",
        "what it printed stands above this line in CRIU's log",
    ),
    row(
        "PluginDirectory",
        r"plugin\.c:\d+\): Unable to open directory (?P<path>.*)",
        "CRIU's plugin directory cannot be opened: {path}",
        "/proc must be mounted where CRIU runs",
    ),
    row(
        "ImagesMissing",
        r"Can't open dir (?P<path>.+): (?P<error>.+)",
        "the directory of images {path} cannot be opened: {error}",
        "is the store mounted? 'hibernode doctor' checks it",
    ),
    row(
        "LogUnwritable",
        r"Can't create log file (?P<path>.+): (?P<error>.+)",
        "CRIU cannot write its log {path}: {error}",
        "make the store writable for root",
    ),
    row(
        "NotPermitted",
        r"CRIU needs to have the CAP_SYS_ADMIN",
        "CRIU lacks the rights it needs",
        "run the agent as root with all capabilities (privileged: true in a pod)",
    ),
    row(
        "KernelTooOld",
        r"Could not initialize kernel features detection",
        "this kernel lacks what CRIU needs, or CRIU may not try it here",
        "'criu check' names it; a tracer (strace) on CRIU has the same effect",
    ),
    row(
        "OptionUnknown",
        r"(?:unrecognized|invalid) option|requires an argument",
        "this CRIU does not know an option that hibernode gives it",
        "make setup installs a CRIU that does",
    ),
    row(
        "CriuBroken",
        r"error while loading shared libraries: (?P<what>.+)",
        "criu does not start: {what}",
        "make setup installs it again; nothing may stand in /etc/ld.so.preload",
    ),
)
"""The machine and the command: they come first, for they say more than what could not be done."""

KNOWN: Final[Mapping[Operation, tuple[Known, ...]]] = {"dump": BOTH + DUMP, "restore": BOTH + RESTORE}
