"""HTTP with a FrontierCS judge: bounded answers, bounded waits, one submission at a time on this host.

Standard library only, so that a judge in a container of its own needs no more packages. Proxies, credentials and redirects are not
followed: where a program goes is decided by the settings alone. Knows no problem and no score.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tasks.judging import JudgeUnavailable

MAXIMUM_ANSWER_BYTES: Final = 64 << 20
"""A result holds the outputs of all cases: some megabytes for honest programs, gigabytes if a program wants it so."""

_REQUEST_SECONDS: Final = 30.0
"""Until something comes; a whole answer may take four times as long."""
_CHUNK_BYTES: Final = 1 << 20
_LOCK_PAUSE_SECONDS: Final = 0.05
_SCHEMES: Final[Mapping[str, type[http.client.HTTPConnection]]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}


class NoAnswer(Exception):
    """Nobody answered, or not in time; the message says how."""


class TooLarge(Exception):
    """An answer passed the limit; the message says so."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


class Connection:
    """Requests to one address. Each raises NoAnswer, or TooLarge for an endless answer.

    Raises:
        JudgeUnavailable: the address is none.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            parts = urlsplit(self._url)
            self._make, self._host, self._port = _SCHEMES[parts.scheme], parts.hostname or "", parts.port
        except (KeyError, ValueError):
            self._host = ""
        if not self._host or any(c.isspace() for c in self._url):
            raise JudgeUnavailable(f"FrontierCS judge: {url!r} is no address; it is like http://127.0.0.1:8081")
        self._path = parts.path

    def get(self, path: str) -> Answer:
        return self._bounded("GET", path, None, {})

    def submit(self, fields: Mapping[str, str], source: str) -> Answer:
        """POST a program, as multipart: the fields, and `code` as a file."""
        code = source.encode("utf-8", "surrogatepass")
        boundary = f"tttd-{hashlib.sha256(code).hexdigest()}"  # nobody can write a text that holds its own digest
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
        ]
        parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="code"; filename="main.cpp"\r\n')
        parts.append("Content-Type: text/plain\r\n\r\n")
        body = "".join(parts).encode() + code + f"\r\n--{boundary}--\r\n".encode()
        return self._bounded("POST", "/submit", body, {"Content-Type": f"multipart/form-data; boundary={boundary}"})

    def _bounded(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        deadline = time.monotonic() + 4 * _REQUEST_SECONDS
        connection = self._make(self._host, self._port, timeout=_REQUEST_SECONDS)
        try:
            connection.request(method, self._path + path, body, dict(headers))
            response = connection.getresponse()
            received = bytearray()
            while chunk := response.read1(_CHUNK_BYTES):
                received += chunk
                if len(received) > MAXIMUM_ANSWER_BYTES:
                    raise TooLarge(f"larger than {MAXIMUM_ANSWER_BYTES >> 20} MiB")
                if time.monotonic() > deadline:
                    raise NoAnswer(f"no whole answer to {method} {path} within {4 * _REQUEST_SECONDS:g} s")
            return Answer(response.status, bytes(received))
        except TimeoutError:
            raise NoAnswer(f"no answer to {method} {path} within {_REQUEST_SECONDS:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"no answer to {method} {path}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()

    @contextmanager
    def alone(self, patience_seconds: float) -> Iterator[None]:
        """Hold the right to submit to this address, among all threads and processes of this user on this host.

        Raises:
            JudgeUnavailable: somebody else held it all the time.
        """
        name = hashlib.sha256(self._url.encode()).hexdigest()[:16]
        path = Path(tempfile.gettempdir()) / f"tttd-frontiercs-{os.getuid()}-{name}.lock"
        deadline = time.monotonic() + patience_seconds
        # Of each opening its own, so that it orders threads as well as processes; released when closed, whatever happens.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            while not _locked(descriptor):
                if time.monotonic() > deadline:
                    raise JudgeUnavailable(f"FrontierCS judge at {self._url}: others held {path} for {patience_seconds:g} s")
                time.sleep(_LOCK_PAUSE_SECONDS)
            yield
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
