"""OCI seccomp profiles, read strictly.

A profile is the JSON that runc, crun and containerd read (``linux.seccomp`` of the OCI runtime
specification). The numbers are libseccomp's, so that :mod:`hibernode.host.seccomp` can hand them on.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Never

from hibernode.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_PROFILE_BYTES: Final = 1 << 20
"""The profile that Docker ships has 15 KiB."""

BUILTIN_PROFILE: Final = Path(__file__).resolve().parent.parent / "data" / "block-iouring.json"
"""The same file as ``seccomp/block-iouring.json`` of the source tree."""

# libseccomp's seccomp.h.in: SCMP_ACT_*. The low 16 bits of ERRNO carry the error number.
_ACTION_ERRNO: Final = 0x00050000
_ACTIONS: Final = {
    "SCMP_ACT_ALLOW": 0x7FFF0000,
    "SCMP_ACT_ERRNO": _ACTION_ERRNO,
    "SCMP_ACT_KILL": 0x00000000,
    "SCMP_ACT_KILL_THREAD": 0x00000000,
    "SCMP_ACT_KILL_PROCESS": 0x80000000,
    "SCMP_ACT_LOG": 0x7FFC0000,
    "SCMP_ACT_TRAP": 0x00030000,
}
# enum scmp_compare of the same header.
_COMPARISONS: Final = {
    "SCMP_CMP_NE": 1,
    "SCMP_CMP_LT": 2,
    "SCMP_CMP_LE": 3,
    "SCMP_CMP_EQ": 4,
    "SCMP_CMP_GE": 5,
    "SCMP_CMP_GT": 6,
    "SCMP_CMP_MASKED_EQ": 7,
}
# enum scmp_filter_attr of the same header.
_FLAGS: Final = {
    "SECCOMP_FILTER_FLAG_TSYNC": 4,
    "SECCOMP_FILTER_FLAG_LOG": 6,
    "SECCOMP_FILTER_FLAG_SPEC_ALLOW": 7,
}
# config-linux.md of the OCI runtime specification; libseccomp has the same names without the prefix.
_ARCHITECTURES: Final = frozenset(
    f"SCMP_ARCH_{name}"
    for family in (
        ("X86", "X86_64", "X32", "ARM", "AARCH64", "LOONGARCH64", "M68K", "RISCV64", "S390", "S390X"),
        ("MIPS", "MIPS64", "MIPS64N32", "MIPSEL", "MIPSEL64", "MIPSEL64N32"),
        ("PARISC", "PARISC64", "PPC", "PPC64", "PPC64LE", "SH", "SHEB"),
    )
    for name in family
)
_MAX_ERRNO: Final = 4095  # MAX_ERRNO of the kernel: more is not an error to the C library
_MAX_ARGUMENTS: Final = 6
_SYSCALL_NAME: Final = re.compile(r"[a-z0-9_]{1,64}")


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of a syscall's argument; ``op`` is libseccomp's number for it."""

    index: int
    op: int
    value: int
    value_two: int


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to ``names``; ``action`` is the word that libseccomp takes, error number included."""

    names: tuple[str, ...]
    action: int
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile that can be put on; ``flags`` are libseccomp's filter attributes."""

    default_action: int
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    flags: tuple[int, ...] = ()


class _Reader:
    """Reads one profile; whatever is not exactly as expected is a UsageError that names the field."""

    def __init__(self, source: str) -> None:
        self._source = source

    def fail(self, field: str, what: str) -> Never:
        raise UsageError(
            f"{self._source}: {field or 'the profile'}: {what}",
            remedy="'hibernode seccomp show' prints a profile that is right",
            reason="SeccompProfile",
            field=field,
        )

    def entry(self, value: object, field: str, keys: str) -> Mapping[str, object]:
        if not isinstance(value, dict):
            self.fail(field, "expected an object")
        for key in value:
            if key not in keys.split():
                self.fail(f"{field}.{key:.80}".lstrip("."), f"unknown field, not one of {keys}")
        return value

    def array(self, value: object, field: str) -> list[object]:
        if value is None:  # absent, or null as Go writes an empty list
            return []
        if not isinstance(value, list):
            self.fail(field, "expected a list")
        return value

    def word(self, value: object, field: str, known: Mapping[str, int]) -> int:
        if not isinstance(value, str) or value not in known:
            self.fail(field, f"{value!r:.80} is not one of {', '.join(known)}")
        return known[value]

    def number(self, value: object, field: str, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            self.fail(field, f"{value!r:.80} is not a whole number from 0 to {most}")
        return value

    def action(self, holder: Mapping[str, object], field: str, action: str, error: str) -> int:
        """Read an action and the error number beside it (EPERM if there is none, as in runc)."""
        code = self.word(holder.get(action), f"{field}{action}", _ACTIONS)
        if error not in holder:
            return code | errno.EPERM if code == _ACTION_ERRNO else code
        if code != _ACTION_ERRNO:
            self.fail(f"{field}{error}", "only SCMP_ACT_ERRNO takes an error number")
        return code | self.number(holder[error], f"{field}{error}", _MAX_ERRNO)

    def rule(self, value: object, field: str) -> Rule:
        entry = self.entry(value, field, "names action errnoRet args")
        names = self.array(entry.get("names"), f"{field}.names")
        if not names:
            self.fail(f"{field}.names", "names no syscall")
        for number, name in enumerate(names):
            if not isinstance(name, str) or not _SYSCALL_NAME.fullmatch(name):
                self.fail(f"{field}.names[{number}]", f"{name!r:.80} is not a syscall's name")
        arguments = self.array(entry.get("args"), f"{field}.args")
        return Rule(
            names=tuple(str(name) for name in names),
            action=self.action(entry, f"{field}.", "action", "errnoRet"),
            conditions=tuple(self.condition(item, f"{field}.args[{i}]") for i, item in enumerate(arguments)),
        )

    def condition(self, value: object, field: str) -> Condition:
        entry = self.entry(value, field, "index value valueTwo op")
        return Condition(
            index=self.number(entry.get("index"), f"{field}.index", _MAX_ARGUMENTS - 1),
            op=self.word(entry.get("op"), f"{field}.op", _COMPARISONS),
            value=self.number(entry.get("value"), f"{field}.value", (1 << 64) - 1),
            value_two=self.number(entry.get("valueTwo", 0), f"{field}.valueTwo", (1 << 64) - 1),
        )

    def profile(self, value: object) -> Profile:
        top = self.entry(value, "", "defaultAction defaultErrnoRet architectures flags syscalls")
        architectures = self.array(top.get("architectures"), "architectures")
        for number, name in enumerate(architectures):
            if not isinstance(name, str) or name not in _ARCHITECTURES:
                self.fail(f"architectures[{number}]", f"{name!r:.80} is not an architecture")
        flags = self.array(top.get("flags"), "flags")
        rules = self.array(top.get("syscalls"), "syscalls")
        return Profile(
            default_action=self.action(top, "", "defaultAction", "defaultErrnoRet"),
            architectures=tuple(str(name) for name in architectures),
            rules=tuple(self.rule(item, f"syscalls[{i}]") for i, item in enumerate(rules)),
            flags=tuple(self.word(item, f"flags[{i}]", _FLAGS) for i, item in enumerate(flags)),
        )


def parse_profile(data: bytes, *, source: str = "profile") -> Profile:
    """Read an OCI seccomp profile; ``source`` stands in front of what is wrong with it.

    Actions that need a tracer or a listener (SCMP_ACT_TRACE, SCMP_ACT_NOTIFY) are refused, and so is
    every field that is not known: a rule that is silently dropped is a hole.

    :raises UsageError: naming the field.
    """
    reader = _Reader(source)

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                reader.fail(f"{key:.80}", "stands twice in one object")
            found[key] = value
        return found

    if len(data) > MAX_PROFILE_BYTES:
        reader.fail("", f"larger than {MAX_PROFILE_BYTES} bytes")
    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reader.fail("", f"is not JSON ({str(error)[:200]})")
    return reader.profile(value)


def load_profile(path: Path) -> Profile:
    """Read a profile that the user names; links are followed, since a ConfigMap volume is made of them.

    :raises UsageError: it cannot be read, is no regular file, is too large, or is not a profile.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not wait for its other end.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(
                    f"{path}: not a regular file", remedy="give the path of a seccomp profile in JSON"
                )
            data = file.read(MAX_PROFILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", remedy="give the path of a seccomp profile in JSON"
        ) from error
    return parse_profile(data, source=str(path))
