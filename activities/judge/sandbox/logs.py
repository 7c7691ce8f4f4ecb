"""What is kept of a program's output: its end, in characters that no terminal or page can misread."""

from __future__ import annotations


class Tail:
    """The end of a stream, and how much there was."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept = kept_bytes
        self._data = bytearray()
        self.total = 0

    def feed(self, chunk: bytes) -> None:
        self.total += len(chunk)
        self._data += chunk
        if len(self._data) > 2 * self._kept:
            del self._data[: -self._kept]

    def text(self) -> str:
        """The last bytes, as text that no terminal or page can misread."""
        return escape(bytes(self._data[-self._kept :]))


def escape(data: bytes) -> str:
    """Text of printable characters, newlines and tabs; everything else as a backslash sequence."""
    text = data.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
