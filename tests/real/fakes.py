"""Executables that take CRIU's place, and small file systems that fill up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hibernode.criu.runner import find_criu
from tests.real.node import Node

_SCRIPT = """#!/bin/bash
real() {{ exec {criu} "$@"; }}
if [ "$1" != dump ] || [ -e {off} ]; then exec {criu} "$@"; fi
args=("$@")
while [ $# -gt 0 ]; do
  case "$1" in --work-dir) work=$2;; --log-file) log=$2;; --images-dir) images=$2;; --tree) tree=$2;; esac
  shift
done
set -- "${{args[@]}}"
touch {began}
{body}
"""


class FakeCriu:
    """A CRIU whose ``dump`` is a piece of shell, until it is told to be the real one.

    The piece finds the arguments in ``$@``, ``$images``, ``$work``, ``$log`` and ``$tree``, and the real
    program as ``real``. Everything but ``dump`` goes to the real one.
    """

    def __init__(self, node: Node, body: str) -> None:
        self.path, self._off = node.base / "criu-fake", node.base / "criu-fake.off"
        self._began = node.base / "criu-fake.began"
        criu = " ".join(f"'{word}'" for word in find_criu("").argv)
        self.path.write_text(_SCRIPT.format(criu=criu, off=self._off, began=self._began, body=body))
        self.path.chmod(0o700)
        node.config["CRIU_BINARY"] = str(self.path)

    def began(self) -> bool:
        """Whether a dump has begun."""
        return self._began.exists()

    def be_real(self) -> None:
        """From now on dump as CRIU does."""
        self._off.touch()


HANG = "trap '' TERM; while :; do sleep 600; done"
"""Neither works nor listens."""

HANG_FROZEN = """while :; do
    real "$@" &
    until grep -q 'Dumping pages' "$work/$log" 2>/dev/null; do :; done
    pkill -STOP -P $$
    grep -q 'TracerPid:[[:space:]]*0$' "/proc/$tree/status" || break
    pkill -CONT -P $$
    wait
    rm -f "$work/$log"
done
trap '' TERM; while :; do sleep 600; done"""
"""Hangs with the worker frozen: the real CRIU, stopped among the pages; again if it was quicker."""

HALF_DUMP = """head -c 100000 /dev/urandom > "$images/pages-1.img"
head -c 1000 /dev/urandom > "$images/core-$tree.img"
echo '(00.000001) Error (criu/pages.c:1): made up by a test' > "$work/$log"
exit 1"""


@contextmanager
def small_tmpfs(path: Path, size: str, mode: str) -> Iterator[Path]:
    """Mount a tmpfs of ``size`` at ``path``, made for it, for as long as the block lasts."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode={mode}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
