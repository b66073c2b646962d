"""A small worker that speaks the contract, for tests: it counts, and answers on a Unix socket what it counts.

Arguments: ``--mib N`` memory to hold, ``--io-uring`` open a ring first, ``--children N`` processes below it,
``--exit-code N`` how the restored copy ends when it is told to (``quit`` on the control file), ``--no-ready``
write no ready file, ``--pid-in-ready`` write the pid into it, ``--own-ready`` use its own ready file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path

NR_IO_URING_SETUP = 425
STATE_BYTES = 4096


def io_uring() -> str:
    """Open a ring by the raw system call; its descriptor, or the error's name."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(256)
    fd = libc.syscall(NR_IO_URING_SETUP, 8, params)
    return f"fd {fd}" if fd >= 0 else os.strerror(ctypes.get_errno())


def child() -> None:
    """Sleep until the parent goes."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)


def main() -> int:
    """Warm up, say ready, poll, count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--children", type=int, default=0)
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument("--io-uring", action="store_true")
    parser.add_argument("--no-ready", action="store_true")
    parser.add_argument("--pid-in-ready", action="store_true")
    parser.add_argument("--own-ready", action="store_true")
    args = parser.parse_args()
    done = Path(os.environ["DYN_CHECKPOINT_SIGNAL_FILE"])
    marker = Path(os.environ["DYN_RESTORE_MARKER_FILE"])
    done.unlink(missing_ok=True)
    held = [os.urandom(1 << 20) for _ in range(args.mib)]
    ring = io_uring() if args.io_uring else ""
    for _ in range(args.children):
        if os.fork() == 0:
            child()

    def save(**more: object) -> None:
        # Always the same name and size: a dump may fall between open and close, and the restored copy has
        # to find the file as it was.
        text = json.dumps({"pid": os.getpid(), "count": count, "ring": ring, "held": len(held), **more})
        fd = os.open(args.state, os.O_WRONLY)
        os.pwrite(fd, text.encode().ljust(STATE_BYTES), 0)
        os.close(fd)

    count = 0
    empty = args.state.with_suffix(".new")
    empty.write_text("{}".ljust(STATE_BYTES))
    empty.rename(args.state)
    save(restored=False)
    if args.own_ready:
        Path(os.environ["DYN_CHECKPOINT_READY_FILE"]).touch()
    elif not args.no_ready:
        ready = done.with_suffix(".ready")
        temporary = ready.with_name(f".{ready.name}.new")
        temporary.write_text(json.dumps({"pid": os.getpid()}) if args.pid_in_ready else "")
        temporary.rename(ready)
    restored = False
    while True:
        count += 1
        restored = restored or marker.exists()
        save(restored=restored)
        if not restored and done.exists():
            answer = json.loads(done.read_text())
            save(restored=False, answer=answer)
            return 0 if answer["success"] else 3
        if restored and args.state.with_suffix(".quit").exists():
            return int(args.exit_code)
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
