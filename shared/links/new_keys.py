"""Makes the link keys of a deployment: for `segue up`, which keeps them in memory, and for tests.

On Kubernetes the chart makes them (templates/links-secret.yaml); docs/operating.md shows openssl's way.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from shared.links.keys import LINK_ROLES, LinkRole, common_name

VALID_DAYS = 36_500  # a pinned key ends when it is no longer listed
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Identity:
    """One generation of a role's key, and its certificate, both PEM."""

    key: bytes = field(repr=False)
    certificate: bytes


def new_identity(role: LinkRole) -> Identity:
    """Draw a key and certify it by itself."""
    private = Ed25519PrivateKey.generate()
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
