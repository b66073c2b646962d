"""A program of the control plane as a child process: its log, its memory, its end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.real.node import until

PROGRAMS = Path(__file__).parents[2] / ".venv" / "libexec" / "cluster"
"""Where scripts/cluster-tools.sh puts them."""
START_SECONDS = 120.0
"""An API server needs 7 s to be ready, several times that on a loaded machine."""


class Program:
    """One program; ``command`` is kept, so that it can be started again as it was."""

    def __init__(self, log: Path, command: list[str | Path], env: dict[str, str] | None = None) -> None:
        self.log = log
        # The kernel ends it with us, even where we are killed.
        self._command = ["setpriv", "--pdeathsig", "KILL", "--", *command]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Tell its pid; it must run."""
        assert self._process, f"{self.log.stem} does not run"
        return self._process.pid

    def start(self, ready: Callable[[], bool]) -> None:
        """Start it and wait until ``ready``; an end before that is an error with the end of its log."""
        assert self._process is None, f"{self.log.stem} runs already"
        with self.log.open("ab") as log:
            # In a group of its own: a terminal's Ctrl-C is for us, who end it in its turn.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                process_group=0,
            )

        def alive_and_ready() -> bool:
            assert self._process
            code = self._process.poll()
            assert code is None, f"{self.log.stem} ended with {code}:\n{self.tail()}"
            return ready()

        try:
            until(self.log.stem, alive_and_ready, START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it, if it runs, and wait until it is gone."""
        if self._process:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def size(self) -> int:
        """Tell how long its log is now, in bytes."""
        return self.log.stat().st_size if self.log.exists() else 0

    def tail(self, since: int = 0, lines: int = 60) -> str:
        """Give the last lines of its log, of what was written after ``since`` bytes."""
        if not self.log.exists():
            return "(never started)"
        with self.log.open("rb") as log:
            log.seek(since)
            return b"\n".join(log.read().splitlines()[-lines:]).decode(errors="replace")

    def resident(self) -> int:
        """Tell its resident memory in bytes, 0 while it does not run."""
        if not self._process:
            return 0
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
