"""The documents keep up with the program: its reasons, the gate's rows, its settings, their own links."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hibernode.cli.main import cli
from hibernode.config import KEYS, SECTIONS
from hibernode.container.dump import ROOTFS, SHM
from hibernode.container.mountplan import SKIPPED
from hibernode.errors import HibernodeError
from hibernode.placeholder import INSTALLED_NAME

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "agent" / "hibernode"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = (".md", ".json", ".log", ".yaml", ".done")
REASON = re.compile(r"[A-Z][A-Za-z]+")


def literals(node: ast.AST) -> Iterator[str]:
    """List the reasons that an expression can be."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and REASON.fullmatch(inner.value):
            yield inner.value


def reasons() -> dict[str, str]:
    """Find every reason that stands as such in the agent: ``reason="X"`` and ``default_reason = "X"``."""
    found: dict[str, str] = {}
    for path in sorted(AGENT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            value: ast.AST | None = None
            if isinstance(node, ast.keyword) and node.arg == "reason":
                value = node.value
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == "default_reason" for target in targets):
                    value = node.value
            if value is not None:
                found.update(dict.fromkeys(literals(value), str(path.relative_to(AGENT))))
    return found


def test_every_reason_is_explained() -> None:
    """Who reads one in an event or in a signal file finds it in the document."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    known = set(re.findall(r"`([A-Z][A-Za-z]+)`", text))
    found = reasons()
    assert len(found) > 100
    assert {reason: path for reason, path in found.items() if reason not in known} == {}


def test_every_row_of_the_containers_gate_is_in_the_table() -> None:
    """In the order in which they are printed."""
    rows = re.findall(r'"(restore\.\w+)"', (AGENT / "container" / "gate.py").read_text())
    text = (ROOT / "docs" / "containers.md").read_text()
    assert re.findall(r"^\| `(restore\.\w+)` \|", text, re.MULTILINE) == list(dict.fromkeys(rows))


@pytest.mark.parametrize("word", [ROOTFS, SHM, *SKIPPED, INSTALLED_NAME])
def test_names_that_people_meet_are_in_the_containers_document(word: str) -> None:
    """Files of the artifact, directories that are left out, and the program that pods run."""
    assert word in (ROOT / "docs" / "containers.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_that_documents_name_exist(document: Path) -> None:
    """What looks like ``section.key`` is one."""
    named = {
        word
        for word in re.findall(r"`([a-z_]+\.[a-z_]+)(?:`|: )", document.read_text())
        if word.partition(".")[0] in SECTIONS and Path(word).suffix not in FILES
    }
    rows = set(re.findall(r'"((?:restore|store)\.\w+)"', "".join(map(Path.read_text, AGENT.rglob("*.py")))))
    assert named - set(KEYS) - rows == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    """A link to a file of this repository names one that is there."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_tests_that_the_table_of_defects_names_exist() -> None:
    """Each of the eighteen defects has one."""
    rows = re.findall(r"(?m)^\| (\d+) \|.*", (ROOT / "docs" / "metadata.md").read_text())
    assert rows == [str(number) for number in range(1, 19)]
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "metadata.md").read_text()))
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "unit").glob("*metadata*.py"))
    assert named - set(re.findall(r"def (test_\w+)", sources)) == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_documents_show_exist(document: Path) -> None:
    """Each has its subcommand and its options, in an order in which they can be typed."""
    text = document.read_text()
    lines = re.findall(r"(?m)^    (?:make \w+.*\n    )?hibernode (.*)", text) + re.findall(
        r"`hibernode ([^`]*)`", text
    )
    for line in lines:
        words = shlex.split(re.split(r"[|;]|  ", line)[0], comments=True)
        command: click.Command = cli
        context = click.Context(cli)
        while True:
            try:
                context = command.make_context(None, words, context)
            except click.NoSuchOption as error:
                raise AssertionError(f"hibernode {line}: {error.format_message()}") from None
            except (click.ClickException, HibernodeError):
                break  # a placeholder, or a value that is left out
            if not isinstance(command, click.Group) or not (
                words := [*context._protected_args, *context.args]
            ):
                break
            _, found, words = command.resolve_command(context, words)
            assert found is not None, line
            command = found


def test_the_readme_leads_to_every_document() -> None:
    """Who has found the README finds the rest."""
    readme = (ROOT / "README.md").read_text()
    missing = [path.name for path in DOCUMENTS[1:] if f"](docs/{path.name})" not in readme]
    assert missing == []
