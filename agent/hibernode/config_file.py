"""The settings file: YAML of plain values, read without trust in what the path names."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Final

import yaml

from hibernode.errors import UsageError
from hibernode.text import printable

MAX_BYTES: Final = 1 << 20
"""All keys with their comments take a hundredth of that."""

_SHOWN: Final = 200
"""Characters of the parser's complaint that an error repeats."""


class _Loader(yaml.SafeLoader):
    """Plain YAML.

    Aliases are refused, so that a small file cannot grow large, and names that stand twice, since YAML
    itself would silently take the last.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds an alias")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):
                if name.value in seen:
                    raise yaml.YAMLError(f"{name.value} stands twice")
                seen.add(name.value)
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict[str, Any]:
    """Read the file into sections and values; a link is followed, as a ConfigMap's files are links.

    :raises UsageError: it is absent, no regular file, larger than :data:`MAX_BYTES`, or no such YAML.
    """
    try:
        data = _read(path)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such settings file", remedy="--config and HIBERNODE_CONFIG name an existing file"
        ) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path}: cannot read the settings: {why}", remedy="is it readable for this user?"
        ) from error
    settings = _parse(path, data)
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise UsageError(
            f"{path}: settings must be a mapping of names", remedy="write lines such as 'node_name: a'"
        )
    return settings


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UsageError(
                f"{path}: the settings are not a regular file", remedy="name a YAML file with --config"
            )
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{path}: larger than {MAX_BYTES} bytes", remedy="is this the settings file of hibernode?"
        )
    return data


def _parse(path: Path, data: bytes) -> Any:
    try:
        return yaml.load(data.decode("utf-8"), _Loader)  # noqa: S506 - a safe loader
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is no UTF-8"
    except RecursionError:
        why = "nested too deeply"
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        why = " ".join(str(error).split())[:_SHOWN]
    raise UsageError(
        f"{path}: not YAML of plain values: {printable(why)}",
        remedy="anchors, tags and names that stand twice are not taken",
    )
