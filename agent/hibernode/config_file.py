"""Files that people write: YAML of plain values, read without trust in what the path names."""

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

SETTINGS: Final = "settings"

_SHOWN: Final = 200
"""Characters of the parser's complaint that an error repeats."""

_PLAIN: Final = tuple(
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map")
)

_DATE: Final = "tag:yaml.org,2002:timestamp"


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


class _ObjectLoader(_Loader):
    """What JSON could say too: dates and times are text, as Kubernetes' own readers have it; no tags."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and (node.tag == _DATE or ":" in node.value):
            node.tag = _PLAIN[0]  # 12:30 would be 750
        if node is not None and node.tag not in _PLAIN:
            raise yaml.YAMLError(f"it holds a tag, {node.tag}")
        return node


def read(path: Path, what: str = SETTINGS) -> dict[str, Any]:
    """Read the file into a mapping of names; a link is followed, as a ConfigMap's files are links.

    ``what`` it should hold; another thing than settings is an object of Kubernetes.

    :raises UsageError: it is absent, no regular file, larger than :data:`MAX_BYTES`, or no such YAML.
    """
    try:
        data = _read(path, what)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such {what} file", remedy=_remedy(what)) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path}: cannot read the {what}: {why}", remedy="is it readable for this user?"
        ) from error
    found = _parse(path, data, _Loader if what == SETTINGS else _ObjectLoader)
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{path}: {what} must be a mapping of names", remedy="write lines such as 'name: a'")
    return found


def _remedy(what: str) -> str:
    return "--config and HIBERNODE_CONFIG name an existing file" if what == SETTINGS else "name a YAML file"


def _read(path: Path, what: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UsageError(f"{path} is not a regular file", remedy=_remedy(what))
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES} bytes", remedy=f"does it hold {what}?")
    return data


def _parse(path: Path, data: bytes, loader: type[_Loader]) -> Any:
    try:
        return yaml.load(data.decode("utf-8"), loader)  # noqa: S506 - a safe loader
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
