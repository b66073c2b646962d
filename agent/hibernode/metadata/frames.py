"""What of an HTTP/2 connection is under way: the bytes of requests that have not ended.

gRPC keeps a request until all of it is there, each up to its limit, and has no limit for all of them. So the
door reads the frames' headers, which have nine bytes each (RFC 9113, section 4.1), and counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_HEADER: Final = 9
_DATA: Final = 0
_HEADERS: Final = 1
_RST_STREAM: Final = 3
_END_STREAM: Final = 1


class Unfinished:
    """Counts ``bytes`` of the requests of one connection that have neither ended nor been given up."""

    def __init__(self) -> None:
        self.bytes = 0
        self._streams: dict[int, int] = {}
        self._asked, self._answered = _Frames(), _Frames()

    def asked(self, data: bytes) -> None:
        """Take in what the client sent, behind the preface."""
        for kind, flags, stream, length, whole in self._asked.feed(data):
            if whole:
                self._end(kind, flags, stream)
            elif kind == _DATA:
                self._streams[stream] = self._streams.get(stream, 0) + length
                self.bytes += length

    def answered(self, data: bytes) -> None:
        """Take in what the server sent: it may end a request before the client does."""
        for kind, flags, stream, _, whole in self._answered.feed(data):
            if whole:
                self._end(kind, flags, stream)

    def _end(self, kind: int, flags: int, stream: int) -> None:
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self.bytes -= self._streams.pop(stream, 0)


class _Frames:
    """Finds the frames in what comes in pieces."""

    def __init__(self) -> None:
        self._head, self._left = b"", 0
        self._kind = self._flags = self._stream = self._length = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, int, bool]]:
        """Yield type, flags, stream and length of each frame twice: when it begins, and when it is whole."""
        at = 0
        while at < len(data):
            if len(self._head) < _HEADER:
                piece = data[at : at + _HEADER - len(self._head)]
                self._head += piece
                at += len(piece)
                if len(self._head) < _HEADER:
                    return
                head = self._head
                self._length = self._left = int.from_bytes(head[:3])
                self._kind, self._flags = head[3], head[4]
                self._stream = int.from_bytes(head[5:]) & 0x7FFFFFFF
                yield self._kind, self._flags, self._stream, self._length, False
            step = min(self._left, len(data) - at)
            self._left -= step
            at += step
            if not self._left:
                yield self._kind, self._flags, self._stream, self._length, True
                self._head = b""
