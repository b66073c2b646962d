"""A worker for the demo: slow to warm up, then answers over HTTP from what it holds in memory.

It follows the contract of the signal directory, as a worker of era A1 does:

1. an answer left over from an earlier run is removed;
2. once warm, the ready file is written: its own, where it has one, else ``<id>.ready``;
3. it polls: the restore marker means that this is the restored copy, which goes on serving; the signal
   file says how the checkpoint went, and ends the worker.

Environment: DYN_CHECKPOINT_HASH, DYN_CHECKPOINT_SIGNAL_FILE, DYN_CHECKPOINT_READY_FILE (if it has one),
DYN_RESTORE_MARKER_FILE.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

BLOCK = 64 << 10
POLL_SECONDS = 0.05


class Model:
    """Blocks of pseudo-random bytes and an index over them: all of it must be computed, none is on disk."""

    def __init__(self, mib: int) -> None:
        count = (mib << 20) // BLOCK
        self.blocks = [hashlib.shake_256(b"hibernode %d" % number).digest(BLOCK) for number in range(count)]
        self.index = {
            block[at : at + 8]: number for number, block in enumerate(self.blocks) for at in (0, 64, 128)
        }

    def answer(self, number: int) -> str:
        """Follow the index through the blocks; the same number gives the same text, in any process."""
        digest = hashlib.sha256()
        at = number % len(self.blocks)
        for _ in range(256):
            block = self.blocks[at]
            digest.update(block)
            at = (self.index[block[64:72]] + int.from_bytes(block[:4], "big")) % len(self.blocks)
        return digest.hexdigest()


def serve(model: Model, host: str, port: int) -> None:
    """Answer GET /?q=NUMBER from the model, in threads."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            body = json.dumps({"answer": model.answer(int(query["q"][0])), "pid": os.getpid()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Say nothing."""

    server = ThreadingHTTPServer((host, port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> int:
    """Warm up, say that we are ready, wait for what comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    signal_file = Path(os.environ["DYN_CHECKPOINT_SIGNAL_FILE"])
    marker = Path(os.environ["DYN_RESTORE_MARKER_FILE"])
    signal_file.unlink(missing_ok=True)

    serve(Model(args.mib), args.host, args.port)
    Path(os.environ.get("DYN_CHECKPOINT_READY_FILE") or signal_file.with_suffix(".ready")).touch()
    print(f"worker {os.getpid()}: warm", flush=True)
    restored = False
    while True:
        if not restored and marker.exists():
            restored = True
            print(f"worker {os.getpid()}: restored, serving", flush=True)
        if not restored and signal_file.exists():
            answer = json.loads(signal_file.read_text())
            print(f"worker {os.getpid()}: checkpoint success={answer['success']}", flush=True)
            return 0 if answer["success"] else 1
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
