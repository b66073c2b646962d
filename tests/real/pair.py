"""Two processes and a TCP connection between them, for tests: numbers go one way and are checked one by one.

Arguments: where to write how far the reader is. With a second argument, a listener only, which tells there
its port and answers each byte with one; ``closed`` counts the connections that it has lost.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from pathlib import Path


def write(out: Path, text: str) -> None:
    """Replace the file."""
    temporary = out.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(out)


def send(address: tuple[str, int]) -> None:
    """Send numbers for ever."""
    client = socket.create_connection(address)
    number = 0
    while True:
        client.sendall(struct.pack(">Q", number))
        number += 1
        if number % 50 == 0:
            time.sleep(0.001)


def read(connection: socket.socket, out: Path) -> None:
    """Check that the numbers come one after the other."""
    expected, data, written = 0, b"", 0.0
    while chunk := connection.recv(1 << 16):
        data += chunk
        whole = len(data) // 8
        for number in struct.unpack(f">{whole}Q", data[: whole * 8]):
            assert number == expected
            expected += 1
        data = data[whole * 8 :]
        if time.monotonic() - written > 0.02:
            written = time.monotonic()
            write(out, str(expected))


def serve(listener: socket.socket, out: Path) -> None:
    """Answer."""
    closed = 0
    while True:
        write(out, f"{listener.getsockname()[1]} {closed}")
        connection, _ = listener.accept()
        try:
            while byte := connection.recv(1):
                connection.sendall(byte)
        except OSError:
            pass
        closed += 1


def main() -> None:
    """Begin."""
    out = Path(sys.argv[1])
    ballast = os.urandom(64 << 20)
    listener = socket.create_server(("127.0.0.1", 0))
    if len(sys.argv) > 2:
        serve(listener, out)
    if os.fork() == 0:
        address = listener.getsockname()
        listener.close()
        send(address)
    read(listener.accept()[0], out)
    assert ballast


main()
