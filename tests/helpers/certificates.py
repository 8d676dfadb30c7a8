"""Certificates for tests, good for an hour: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

__all__ = ["Authority", "Pair"]


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM files of a certificate and its private key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates for localhost and 127.0.0.1. Its own certificate is the file `ca`."""

    def __init__(self, directory: Path, name: str = "authority"):
        self._directory = directory
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.ca = self._write(f"{name}.crt", builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def sign(self, name: str) -> Pair:
        """A certificate for both ends of a connection, and its key, in files of that name."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = self._builder(name, key).add_extension(x509.SubjectAlternativeName(names), critical=False)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        signed = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
        return Pair(self._write(f"{name}.crt", signed), self._write(f"{name}.key", private))

    def _builder(self, name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    def _write(self, name: str, pem: bytes) -> Path:
        file = self._directory / name
        file.write_bytes(pem)
        return file


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
