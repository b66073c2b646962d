"""The command on directories of a test's own: as a program, and in this process for long tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hibernode.artifact.store import Store
from hibernode.cli.main import main
from tests.unit.artifact_kit import put

HIBERNODE = Path(sys.executable).with_name("hibernode")
ABSENT = "fedcba9876543210"
ESCAPE = "\x1b"
BAD_LOG = "(00.1) Error (criu/sk-inet.c:1): Connected TCP socket, consider using --tcp-established option.\n"


class Machine:
    """Directories of a test's own, and the command run on them."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.store, self.state, self.signals = base / "store", base / "state", base / "signals"
        self.socket = base / "run" / "agent.sock"

    def env(self, **more: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HIBERNODE_")}
        own = {
            "HIBERNODE_STORE_PATH": str(self.store),
            "HIBERNODE_STATE_DIR": str(self.state),
            "HIBERNODE_SIGNALS_PATH": str(self.signals),
            "HIBERNODE_SERVER_SOCKET": str(self.socket),
        }
        return {**clean, **own, "PATH": f"{HIBERNODE.parent}:{clean['PATH']}", **more}

    def run(self, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [HIBERNODE, *args],
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def ok(self, *args: str | Path, **env: str) -> str:
        result = self.run(*args, **env)
        assert (result.returncode, result.stderr) == (0, ""), result
        return result.stdout

    def refused(self, code: int, *args: str | Path, **env: str) -> str:
        """Run what must fail: ``code``, a sentence, what to do, and nothing else; returns both lines."""
        result = self.run(*args, **env)
        assert (result.returncode, result.stdout) == (code, ""), result
        return sentence(result.stderr)


def sentence(text: str) -> str:
    """See that this is one line with what is wrong and one with what to do."""
    lines = text.splitlines()
    assert len(lines) == 2, text
    assert lines[0].startswith("hibernode: ")
    assert lines[1].startswith("  ")
    assert all(line.isprintable() for line in lines)
    return text


@pytest.fixture
def here(machine, monkeypatch, capsys):
    """Run the entry point in this process, for long tables; gives (exit code, output, errors)."""
    for name, value in machine.env().items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def full(machine: Machine) -> Machine:
    """Make a machine with one artifact."""
    with Store(machine.store).open() as store:
        put(store)
    return machine
