"""Settings: defaults, then the file, then the environment, then flags; the later one wins.

Every key has one dotted name (``criu.ghost_limit_bytes``), one environment variable
(``HIBERNODE_CRIU_GHOST_LIMIT_BYTES``) and one flag (``--set criu.ghost_limit_bytes=1GiB``). A key that is
not known is an error wherever it stands. Where it came from is kept for ``hibernode config show``.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from hibernode.errors import UsageError
from hibernode.settings import Settings
from hibernode.text import printable

ENV_PREFIX: Final = "HIBERNODE_"
CONFIG_ENV: Final = "HIBERNODE_CONFIG"
FAULT_ENV: Final = "HIBERNODE_FAULT"
"""Names a fault point, see :mod:`hibernode.faults`; not a setting."""

RESERVED_ENV: Final = frozenset({CONFIG_ENV, FAULT_ENV})
DEFAULT_FILE: Final = Path("/etc/hibernode/config.yaml")
_SERVICE_ENV: Final = re.compile(
    r"HIBERNODE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)",
    re.ASCII,
)
"""What Kubernetes puts into every pod for a Service whose name begins with hibernode; no settings."""

ERA_ENV: Final[Mapping[str, str]] = {
    "NODE_NAME": "node_name",
    "RESTRICTED_NAMESPACE": "kubernetes.namespace",
    "CHECKPOINT_DIR": "store.path",
    "CRIU_GHOST_LIMIT": "criu.ghost_limit_bytes",
    "CRIU_TIMEOUT": "checkpoint.deadline_seconds",
    "SNAPSHOT_LOG_LEVEL": "log.level",
}
"""Names that the eras' own charts set on the agent; weaker than ``HIBERNODE_*``."""

_SHOWN: Final = 100
"""Characters of a bad key or value that an error repeats."""


@dataclass(frozen=True, slots=True)
class Option:
    """One key: its value and where it came from (``default``, ``file PATH``, ``env NAME``, ``flag``)."""

    key: str
    value: object
    source: str
    description: str
    env: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The effective settings and the source of each key that is not a default."""

    settings: Settings
    sources: Mapping[str, str]

    def options(self) -> Iterator[Option]:
        """Yield every key in the order of the models."""
        for key, field, found in _walk(self.settings):
            value = ", ".join(map(str, found)) if isinstance(found, tuple) else found  # as it may be written
            yield Option(key, value, self.sources.get(key, "default"), field.description or "", env_name(key))


def _walk(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field, value


KEYS: Final = tuple(key for key, _, _ in _walk(Settings()))


def env_name(key: str) -> str:
    """Name the environment variable of a dotted key."""
    return ENV_PREFIX + key.replace(".", "_").upper()


SECTIONS: Final = frozenset(key.partition(".")[0] for key in KEYS if "." in key)


def _flatten(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if name in SECTIONS and isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", content) for inner, content in value.items())
        elif name not in SECTIONS or value is not None:  # a section with all its lines commented out
            yield name, value


def _unknown(key: str, where: str, known: Iterable[str] = KEYS) -> UsageError:
    import difflib  # noqa: PLC0415 - only for this sentence

    near = difflib.get_close_matches(key[:_SHOWN], list(known), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return UsageError(
        f"{where}: {_shown(key)} is not a setting", remedy=f"{hint}'hibernode config show' lists all keys"
    )


def _shown(key: str) -> str:
    return printable(key if len(key) <= _SHOWN else f"{key[:_SHOWN]}...", keep="")


def _read_file(path: Path, *, required: bool) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a settings file."""
    if required or os.path.lexists(path):
        from hibernode import config_file  # noqa: PLC0415 - commands that need no file start without it

        yield from _flatten(config_file.read(path))


def _from_env(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    by_name = {env_name(key): key for key in KEYS}
    for name, key in ERA_ENV.items():
        if environ.get(name):
            yield key, environ[name], f"env {name}"
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name in RESERVED_ENV or _SERVICE_ENV.fullmatch(name):
            continue
        if name not in by_name:
            raise _unknown(name, "environment", by_name)
        yield by_name[name], value, f"env {name}"


def load(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Sequence[tuple[str, str]] = (),
) -> Loaded:
    """Gather the settings.

    ``file``: a settings file that must exist; without it ``HIBERNODE_CONFIG``, else
    /etc/hibernode/config.yaml if that exists. ``flags``: (key, text) pairs, the strongest.

    :raises UsageError: unknown key, or a value that its key cannot take; key and source are named.
    """
    environ = os.environ if environ is None else environ
    named = file or (Path(environ[CONFIG_ENV]) if environ.get(CONFIG_ENV) else None)
    path = named or DEFAULT_FILE
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(key: str, value: Any, source: str) -> None:
        if key not in KEYS:
            raise _unknown(key, source)
        values[key], sources[key] = value, source

    for key, value in _read_file(path, required=named is not None):
        if key in sources:
            raise UsageError(f"file {path}: {_shown(key)} stands there twice", remedy="keep one of the lines")
        put(key, value, f"file {path}")
    for key, value, source in _from_env(environ):
        put(key, value, source)
    for key, value in flags:
        put(key, value, "flag")

    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    try:
        settings = Settings.model_validate(nested)
    except ValidationError as error:
        first = error.errors()[0]
        loc = [str(part) for part in first["loc"]]
        key = ".".join(loc if loc[0] not in SECTIONS else loc[:2])
        shown = reprlib.Repr()
        shown.maxstring = shown.maxother = _SHOWN
        shown.maxlevel = 1
        raise UsageError(
            f"{key} = {shown.repr(values.get(key))} ({sources.get(key, 'default')}):"
            f" {first['msg'].removeprefix('Value error, ')}",
            remedy=f"'hibernode config show' tells what {key} is for",
        ) from error
    return Loaded(settings, sources)
