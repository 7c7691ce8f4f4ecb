"""HTTP/1.1 messages as bytes: read one whole, keep it as it came. Knows no S3, no sockets but a buffered stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

_LONGEST_LINE = 64 << 10


class Broken(OSError):
    """The other side went away in the middle of a message, or does not speak HTTP/1.1."""


@dataclass(frozen=True)
class Wire:
    """One message, in its own bytes."""

    head: bytes
    """First line, headers and the empty line."""
    body: bytes
    """As it was sent: chunk sizes are part of it."""

    @property
    def first_line(self) -> list[str]:
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)

    def header(self, name: str) -> str | None:
        """The first header of that name, whatever its case."""
        return _header(self.head, name)

    @property
    def whole(self) -> bytes:
        return self.head + self.body

    @property
    def closes(self) -> bool:
        """Whether its sender means to end the connection after it."""
        return (self.header("connection") or "").lower() == "close"


def read_head(stream: BinaryIO) -> bytes | None:
    """Read up to the empty line; None when the other side has nothing more to say.

    Raises:
        Broken: it went away in the middle.
    """
    lines: list[bytes] = []
    while True:
        line = stream.readline(_LONGEST_LINE)
        if not line and not lines:
            return None
        if not line.endswith(b"\n"):
            raise Broken("a message ends in the middle of its head")
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)


def read_request_body(stream: BinaryIO, head: bytes) -> bytes:
    """Raises: Broken."""
    if (_header(head, "transfer-encoding") or "").lower() == "chunked":
        return _read_chunks(stream)
    return _read_exactly(stream, int(_header(head, "content-length") or 0))


def read_response(stream: BinaryIO, method: str) -> Wire:
    """Read one final answer; interim ones (100 Continue) are left out.

    Raises:
        Broken: the server went away before the answer was whole.
    """
    while True:
        head = read_head(stream)
        if head is None:
            raise Broken("the server closed the connection without an answer")
        status = int(head.split(b" ", 2)[1])
        if status >= 200:
            break
    if method == "HEAD" or status in (204, 304):
        return Wire(head, b"")
    if (_header(head, "transfer-encoding") or "").lower() == "chunked":
        return Wire(head, _read_chunks(stream))
    length = _header(head, "content-length")
    return Wire(head, stream.read() if length is None else _read_exactly(stream, int(length)))


def _header(head: bytes, name: str) -> str | None:
    wanted = name.lower().encode()
    for line in head.split(b"\r\n")[1:]:
        found, _, value = line.partition(b":")
        if found.strip().lower() == wanted:
            return value.strip().decode("latin-1")
    return None


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise Broken(f"a message ends after {len(data)} of {count} bytes of its body")
    return data


def _read_chunks(stream: BinaryIO) -> bytes:
    parts: list[bytes] = []
    while True:
        size_line = stream.readline(_LONGEST_LINE)
        parts.append(size_line)
        try:
            size = int(size_line.split(b";", 1)[0], 16)
        except ValueError:
            raise Broken(f"no chunk size: {size_line[:40]!r}") from None
        if size == 0:
            break
        parts.append(_read_exactly(stream, size + 2))
    while True:  # trailers
        line = stream.readline(_LONGEST_LINE)
        parts.append(line)
        if line == b"\r\n":
            return b"".join(parts)
        if not line.endswith(b"\n"):
            raise Broken("a message ends in the middle of its trailers")
