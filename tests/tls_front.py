"""A TLS front for a server without TLS: terminates mutual TLS and passes the bytes on, as a load balancer before Temporal would."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Authority:
    """A certificate authority for one test, and what it signs."""

    folder: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def certificate_path(self) -> Path:
        return self.folder / "ca.pem"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write("ca", self.key, self._certificate("test authority", self.key, authority=True))

    def issue(self, name: str) -> tuple[Path, Path]:
        """Files of a certificate for 127.0.0.1, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        self._write(name, key, self._certificate(name, key, authority=False))
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def _certificate(self, name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())

    def _write(self, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        (self.folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (self.folder / f"{name}.key").write_bytes(private)


@contextlib.asynccontextmanager
async def tls_front(authority: Authority, target_port: int) -> AsyncIterator[int]:
    """Listen with TLS, ask for a certificate of the same authority, pass on to a local port. Yields the front's port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.certificate_path))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(*authority.issue("front"))
    context.set_alpn_protocols(["h2"])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", target_port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
