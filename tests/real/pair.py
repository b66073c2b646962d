"""Two processes and a TCP connection between them, for tests: numbers go one way and are checked one by one.

Arguments: where to write how far the reader is, and a port. With a third argument ``serve``, a listener only,
which answers each byte with one, and counts there the connections that it has lost. With ``fill``, both send
until neither can, and read only when there is a file of that name and ``.go``.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

WIDTH = 32


def write(out: Path, text: str) -> None:
    """Replace what the file says, in place: a name that goes would be missed at a restore, a new size too."""
    line = text.ljust(WIDTH).encode()
    if out.exists():
        with out.open("r+b") as file:
            file.write(line)
    else:
        temporary = out.with_name(f"{out.name}.new")
        temporary.write_bytes(line)
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
        write(out, f"{closed}")
        connection, _ = listener.accept()
        try:
            while byte := connection.recv(1):
                connection.sendall(byte)
        except OSError:
            pass
        closed += 1


def fill(connection: socket.socket, out: Path) -> None:
    """Send until the kernel takes no more; later the rest of a block, and read the other's to its end."""
    block, sent = bytes(range(251)) * 100_000, 0
    connection.setblocking(False)
    try:
        while True:
            sent += connection.send(block[sent:])
            time.sleep(0.001)
    except BlockingIOError:
        pass
    write(out, str(sent))
    while not out.with_suffix(".go").exists():
        time.sleep(0.01)
    connection.setblocking(True)
    threading.Thread(target=connection.sendall, args=(block[sent:],)).start()
    with connection.makefile("rb") as file:
        write(out, "whole" if file.read(len(block)) == block else "damaged")
    time.sleep(1000)


def main() -> None:
    """Begin."""
    out = Path(sys.argv[1])
    ballast = os.urandom(64 << 20)
    listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
    mode = sys.argv[3] if len(sys.argv) > 3 else ""
    if mode == "serve":
        serve(listener, out)
    if os.fork() == 0:
        address = listener.getsockname()
        listener.close()
        if mode == "fill":
            fill(socket.create_connection(address), out.with_suffix(".child"))
        send(address)
    connection = listener.accept()[0]
    if mode == "fill":
        fill(connection, out)
    read(connection, out)
    assert ballast


main()
