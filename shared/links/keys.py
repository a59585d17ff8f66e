"""CURVE keys of a process at one end of a link: its own secret, and the public keys of those it talks to.

Routers have one key pair, workers (prefill and decode) another. A process is given one file of its role, in PEM:

    one Ed25519 private key (PKCS #8)     its own, and nobody else's
    certificates of routers and workers   whose keys are admitted; common names: segue-router, segue-worker

A certificate is only a public key with a name here: it is pinned, so issuer and dates mean nothing. Several of a role
may be listed, so that keys can be replaced while both generations are admitted. The keys are Ed25519 because Helm,
openssl and TLS make and read those; links need X25519, and the standard conversion (as libsodium's
crypto_sign_ed25519_*_to_curve25519) gives it.

Knows no sockets: which key is admitted where is decided in `authenticator`. Such files are made below.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import zmq
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID
from zmq.utils import z85

from shared.primitives.errors import ConfigError

LinkRole = Literal["router", "worker"]  # prefill and decode workers use one key
LINK_ROLES: tuple[LinkRole, ...] = ("router", "worker")
OTHER_ROLE: dict[LinkRole, LinkRole] = {"router": "worker", "worker": "router"}

_PRIVATE_KEY = re.compile(rb"-----BEGIN PRIVATE KEY-----.+?-----END PRIVATE KEY-----", re.DOTALL)
_INHERITED = re.compile(r"/dev/fd/(\d+)")
_FIELD_PRIME = 2**255 - 19


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, 40 characters of Z85 each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """What one process has: public keys are 40 characters of Z85, in the order of its file."""

    own: KeyPair
    peers: tuple[bytes, ...]  # of the other role, with which it has links
    siblings: tuple[bytes, ...]  # of its own role, its own key among them: workers read each other's KV
    own_pem: bytes = field(repr=False)  # the private key and its certificate, for TLS
    siblings_pem: bytes = field(repr=False)  # the certificates of the siblings, for TLS


def common_name(role: LinkRole) -> str:
    """The common name of the role's certificates."""
    return f"segue-{role}"


def read_keys(path: str, role: LinkRole) -> LinkKeys:
    """The keys in this file, which is closed if it was inherited as /dev/fd/N.

    Raises ConfigError where it cannot be read, is open to every user, or does not hold what a process of `role` needs.
    """
    if not path:
        raise ConfigError("--link-keys-file is required: links are never unencrypted")
    try:
        mode, content = os.stat(path).st_mode, Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"link_keys_file {path} cannot be read: {error.strerror}") from None
    if inherited := _INHERITED.fullmatch(path):
        os.close(int(inherited[1]))
    if mode & 0o007:
        raise ConfigError(f"link_keys_file {path} is open to every user of this machine; chmod it to 600")
    try:
        return parse_keys(content, role)
    except ValueError as error:
        raise ConfigError(f"link_keys_file {path} {error}") from None


def parse_keys(content: bytes, role: LinkRole) -> LinkKeys:
    """The keys in a file's content. Raises ValueError, a sentence without its subject, which is the file."""
    private, key_pem = _read_private_key(content)
    own = _key_pair(private)
    certificates = _read_certificates(content)
    listed = {
        each: tuple(_curve_public(each_key) for each_key, _ in certificates[each]) for each in LINK_ROLES
    }
    siblings, peers = listed[role], listed[OTHER_ROLE[role]]
    if own.public not in siblings:
        raise ValueError(
            f"holds a private key without its certificate: expected one of {common_name(role)} for this {role}"
        )
    if not peers:
        raise ValueError(f"holds no certificate of {common_name(OTHER_ROLE[role])}: nobody could be linked")
    if set(siblings) & set(peers):
        raise ValueError("names one key for routers and for workers: each role needs its own")
    own_certificate = next(pem for key, pem in certificates[role] if _curve_public(key) == own.public)
    return LinkKeys(
        own,
        peers,
        siblings,
        own_pem=key_pem + b"\n" + own_certificate,
        siblings_pem=b"".join(pem for _, pem in certificates[role]),
    )


def _read_private_key(content: bytes) -> tuple[Ed25519PrivateKey, bytes]:
    found = _PRIVATE_KEY.findall(content)
    if len(found) != 1:
        raise ValueError(f"holds {len(found)} private keys: expected one, PKCS #8 in PEM, of this process")
    try:
        private = load_pem_private_key(found[0], password=None)
    except Exception:  # cryptography's errors may quote what they read
        raise ValueError(
            "holds a private key that cannot be read: expected Ed25519, PKCS #8 in PEM"
        ) from None
    if not isinstance(private, Ed25519PrivateKey):
        raise ValueError("holds a private key of another kind: expected Ed25519")
    return private, found[0]


def _read_certificates(content: bytes) -> dict[LinkRole, list[tuple[Ed25519PublicKey, bytes]]]:
    """The public key and the PEM of each certificate, by role, in order."""
    try:
        certificates = x509.load_pem_x509_certificates(content)
    except ValueError:
        raise ValueError(
            "holds no certificate that can be read: expected those of routers and workers"
        ) from None
    found: dict[LinkRole, list[tuple[Ed25519PublicKey, bytes]]] = {role: [] for role in LINK_ROLES}
    for certificate in certificates:
        public = certificate.public_key()
        if not isinstance(public, Ed25519PublicKey):
            raise ValueError("holds a certificate of another kind of key: expected Ed25519")
        found[_role_of(certificate)].append((public, certificate.public_bytes(Encoding.PEM)))
    return found


def _role_of(certificate: x509.Certificate) -> LinkRole:
    names = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    for role in LINK_ROLES:
        if names == [common_name(role)]:
            return role
    raise ValueError(f"holds a certificate of {names}: expected the common name segue-router or segue-worker")


def _key_pair(private: Ed25519PrivateKey) -> KeyPair:
    """RFC 8032, 5.1.5: an Ed25519 scalar is half of the hash of its seed; X25519 multiplies with the same scalar."""
    scalar = bytearray(hashlib.sha512(private.private_bytes_raw()).digest()[:32])
    scalar[0] &= 248
    scalar[31] = (scalar[31] & 127) | 64
    secret: bytes = z85.encode(bytes(scalar))
    return KeyPair(public=zmq.curve_public(secret), secret=secret)


def _curve_public(public: Ed25519PublicKey) -> bytes:
    """RFC 7748, 4.1: the point's y on Edwards' curve gives u = (1 + y) / (1 - y) on Montgomery's."""
    y = int.from_bytes(public.public_bytes_raw(), "little") & ((1 << 255) - 1)
    u = (1 + y) * pow(1 - y, -1, _FIELD_PRIME) % _FIELD_PRIME
    encoded: bytes = z85.encode(u.to_bytes(32, "little"))
    return encoded


# ---- the link keys of a deployment are made: for `segue up`, which keeps them in memory, the chart's Job, and tests --
# With keys.from render Helm makes them (templates/links-secret.yaml); docs/gitops.md shows openssl's way.


VALID_DAYS = 36_500  # a pinned key ends when it is no longer listed
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Identity:
    """One generation of a role's key, and its certificate, both PEM."""

    key: bytes = field(repr=False)
    certificate: bytes


def new_identity(role: LinkRole) -> Identity:
    """Draw a key and certify it by itself."""
    return certified(Ed25519PrivateKey.generate(), role)


def certified(private: Ed25519PrivateKey, role: LinkRole) -> Identity:
    """A key and its certificate for this role."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name(role))])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .sign(private, None)
    )
    key = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Identity(key, certificate.public_bytes(Encoding.PEM))


def key_file(own: Identity, *listed: Identity) -> bytes:
    """What a process reads: its own key, and the certificates of all that are listed."""
    return own.key + b"".join(each.certificate for each in listed)


def new_key_files() -> dict[LinkRole, bytes]:
    """The file of each role in a new deployment."""
    identities = {role: new_identity(role) for role in LINK_ROLES}
    return {role: key_file(identities[role], *identities.values()) for role in LINK_ROLES}


def open_in_memory(content: bytes) -> int:
    """A descriptor of a file in memory that a child may inherit: it has no name, nobody can change it, it does not
    outlive its holders."""
    descriptor = os.memfd_create("segue-link-keys", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor
