"""Certificates that vouch for themselves, for servers on 127.0.0.1 and localhost."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID


def pem_pair(name: str = "a router", rsa_bits: int = 0) -> tuple[bytes, bytes]:
    """A new certificate and its key, in PEM; the key is of ECDSA P-256, or RSA of so many bits."""
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
    key = rsa.generate_private_key(65537, rsa_bits) if rsa_bits else ec.generate_private_key(ec.SECP256R1())
    called = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(called)
        .issuer_name(called)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return certificate.public_bytes(pem), key.private_bytes(pem, *private)


def write_pair(folder: Path, cert: bytes, key: bytes) -> None:
    """Put both in place by cert-manager's names, each at once."""
    for name, content in (("tls.crt", cert), ("tls.key", key)):
        new = folder / f"{name}.new"
        new.write_bytes(content)
        new.replace(folder / name)
