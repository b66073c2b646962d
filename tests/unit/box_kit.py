"""A process that lives as in a container: a root, mounts, and namespaces of its own; no runtime is needed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hibernode.host import linux

BOX = """
import ctypes, json, os, signal, subprocess, sys
libc = ctypes.CDLL(None)
spec = json.loads(sys.argv[1])
assert libc.unshare(spec["kinds"]) == 0
pid = os.fork()
if pid:
    os.write(1, b"%d\\n" % pid)  # whole: the other one writes too, and print may come in pieces
    sys.stdin.read()
    os.kill(pid, signal.SIGKILL)
    os._exit(0)
libc.prctl(1, signal.SIGKILL, 0, 0, 0)
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "box", spec["root"]], check=True)
os.chdir(spec["root"])
for directory in ("proc", "tmp", "dev", "data"):
    os.mkdir(directory)
subprocess.run(["mount", "-t", "proc", "proc", "proc"], check=True)
subprocess.run(["bash", "-euc", spec["script"]], check=True, stdout=sys.stderr)
os.mkdir("old")
subprocess.run(["pivot_root", ".", "old"], check=True)
os.chdir("/")
assert libc.umount2(b"/old", 2) == 0
os.rmdir("/old")
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""

SLEEPS = (
    "/bin/busybox sleep {} <&- >&- 2>&- & "
    'until read -r name <proc/$!/comm && [ "$name" = busybox ]; do :; done'
)
"""A script's words that start a process beside the init; it is what it will be before the root changes."""

KINDS = linux.CLONE_NEWNS | linux.CLONE_NEWPID


@contextlib.contextmanager
def box(root: Path, script: str = "", *, kinds: int = KINDS, more: Sequence[str] = ()) -> Iterator[int]:
    """Start it; yields the pid of its init, which has a tmpfs on ``root`` for its root and its own /proc.

    ``script`` is run by bash in the new root before it becomes the root; ``kinds``: ``CLONE_NEW*``.
    """
    spec = json.dumps({"root": str(root), "script": script or ":", "kinds": kinds})
    with subprocess.Popen(
        [sys.executable, "-c", BOX, spec, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        # Either of the two processes may be the first to write.
        pid, word = sorted(process.stdout.readline() for _ in range(2))
        try:
            assert word == b"ready\n", (pid, word, process.poll())
            yield int(pid)
        finally:
            process.communicate()
