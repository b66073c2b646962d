"""A file system that hangs: a FUSE server that takes every request and answers none but the first.

As a program: ``hung_fs.py PID PATH`` mounts it at PATH in the mount namespace of process PID, says so with a
line, and ends when its input does; then what waits for it fails (ENOTCONN) and all goes on.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INIT = 26
"""linux/fuse.h: FUSE_INIT, the one request without whose answer no other is sent."""

HEADER = struct.Struct("=IIQQIIII")
"""fuse_in_header: len, opcode, unique, nodeid, uid, gid, pid, padding."""

INIT_ANSWER = struct.Struct("=IIIIHHI40x")
"""fuse_init_out: major, minor, max_readahead, flags, max_background, congestion_threshold, max_write."""


@contextmanager
def hung(pid: int, path: str) -> Iterator[subprocess.Popen[bytes]]:
    """Have such a file system at ``path``, as process ``pid`` sees it; what hangs is let go at the end."""
    with subprocess.Popen(
        [sys.executable, __file__, str(pid), path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            assert server.stdout.readline() == b"mounted\n"
            yield server
        finally:
            server.stdin.close()


def _serve(pid: int, path: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    with open(f"/proc/{pid}/ns/mnt", "rb") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"hung", path.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {path}")
    _, opcode, unique, *_ = HEADER.unpack_from(os.read(device, 1 << 17))
    assert opcode == INIT
    body = INIT_ANSWER.pack(7, 31, 0, 0, 1, 1, 4096)
    os.write(device, struct.pack("=IiQ", 16 + len(body), 0, unique) + body)
    print("mounted", flush=True)
    while True:
        readable, _, _ = select.select([device, 0], [], [])
        if 0 in readable:
            break
        os.read(device, 1 << 17)
    libc.umount2(path.encode(), 2)  # MNT_DETACH


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
