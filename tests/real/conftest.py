"""Fixtures for tests that run real processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.boxes import Kit
from tests.real.node import Node


@pytest.fixture
def node() -> Iterator[Node]:
    """Give a node on directories of its own, on a real disk, and end all of it afterwards."""
    base = Path(tempfile.mkdtemp(prefix="hibernode-test-"))
    here = Node(base)
    try:
        yield here
    finally:
        here.close()
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="session")
def kit() -> Iterator[Kit]:
    """Give what makes containers; nothing of it is left behind."""
    kit = Kit()
    try:
        yield kit
    finally:
        kit.close()
    assert kit.leftovers() == []
