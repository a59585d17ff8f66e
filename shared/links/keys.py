"""CURVE key pairs for the two ends of a link, derived from one secret seed.

The deployment holds one secret of 32 random bytes (a Kubernetes Secret, or memory that `segue up` shares with its
children). Each process derives its keys from it, so only the seed is distributed and rotated.
Knows no sockets: which key is admitted where is decided in `authenticator`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from shared.errors import ConfigError

SEED_BYTES = 32

LinkRole = Literal["router", "worker"]  # prefill and decode workers use one key


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, 40 characters of Z85 each."""

    public: bytes
    secret: bytes = field(repr=False)


def derive_keys(seed: bytes, role: LinkRole) -> KeyPair:
    """The key pair of one end (HKDF-SHA256, RFC 5869)."""
    info = f"segue link key 1 {role}".encode()
    secret = z85.encode(HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=None, info=info).derive(seed))
    return KeyPair(public=zmq.curve_public(secret), secret=secret)


def read_seed(path: Path) -> bytes:
    """The seed in this file. Raises ConfigError when it is missing, of the wrong size or readable by every user."""
    try:
        mode, seed = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ConfigError(f"link_seed_file {path} cannot be read: {error.strerror}") from None
    if mode & 0o007:
        raise ConfigError(f"link_seed_file {path} is open to every user of this machine; chmod it to 600")
    if len(seed) != SEED_BYTES:
        raise ConfigError(
            f"link_seed_file {path} holds {len(seed)} bytes; expected {SEED_BYTES} random bytes"
        )
    return seed


def open_new_seed() -> int:
    """A descriptor of a new seed in memory, for processes that inherit it: it has no name and does not outlive them."""
    descriptor = os.memfd_create("segue-seed", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, os.urandom(SEED_BYTES))
    return descriptor
