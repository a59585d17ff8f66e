"""The file with the link keys of a process, and what a process cannot make of it."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shared.links.keys import (
    LinkKeys,
    LinkRole,
    certified,
    key_file,
    new_identity,
    new_key_files,
    open_in_memory,
    parse_keys,
    read_keys,
)
from shared.primitives.errors import ConfigError
from tests.link_keys import new_keys

ROUTER, WORKER = new_identity("router"), new_identity("worker")
SHARED = Ed25519PrivateKey.generate()
NEXT_ROUTER, NEXT_WORKER = new_identity("router"), new_identity("worker")


def test_each_side_lists_the_key_that_the_other_has() -> None:
    keys = new_keys()
    assert keys["router"].peers == keys["worker"].siblings == (keys["worker"].own.public,)
    assert keys["worker"].peers == keys["router"].siblings == (keys["router"].own.public,)


def test_the_public_half_of_a_converted_key_is_what_its_certificate_converts_to() -> None:
    for role, keys in new_keys().items():
        assert zmq.curve_public(keys.own.secret) == keys.own.public == keys.siblings[0], role


def test_no_secret_of_the_other_role_is_in_a_processs_file() -> None:
    """What a worker is given contains the router's public key; the router's secret cannot be computed from that."""
    files = new_key_files()
    for role, other in (("router", "worker"), ("worker", "router")):
        private = files[other].partition(b"-----BEGIN CERTIFICATE")[0]  # type: ignore[index]
        assert private.count(b"PRIVATE KEY") == 2
        assert private.splitlines()[1] not in files[role]  # type: ignore[index]


def test_two_generations_are_listed_in_the_order_of_the_file() -> None:
    listed = (NEXT_ROUTER, ROUTER, NEXT_WORKER, WORKER)
    worker = parse_keys(key_file(WORKER, *listed), "worker")
    router = parse_keys(key_file(NEXT_ROUTER, *listed), "router")
    assert worker.peers == router.siblings
    assert router.peers == worker.siblings
    assert (
        router.siblings.index(router.own.public),
        worker.siblings.index(worker.own.public),
    ) == (0, 1)
    assert len(set(router.peers)) == len(set(worker.peers)) == 2


def test_tls_is_given_the_same_keys() -> None:
    keys = parse_keys(key_file(WORKER, ROUTER, NEXT_WORKER, WORKER), "worker")
    assert keys.own_pem.split() == (WORKER.key + WORKER.certificate).split()
    assert keys.siblings_pem == NEXT_WORKER.certificate + WORKER.certificate


def test_a_secret_is_not_shown() -> None:
    keys = new_keys()["worker"]
    assert keys.own.secret.decode() not in repr(keys)
    assert "PRIVATE KEY" not in repr(keys)
    assert "PRIVATE KEY" not in repr(WORKER)


def test_a_file_in_memory_is_read_by_each_that_inherits_it_changed_by_nobody_and_closed_after_reading() -> (
    None
):
    content = key_file(WORKER, ROUTER, WORKER)
    parent = open_in_memory(content)
    assert (os.fstat(parent).st_mode & 0o777, os.fstat(parent).st_nlink) == (0o600, 0)
    assert fcntl.fcntl(parent, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    with pytest.raises(PermissionError):
        os.write(parent, b"x")
    for _ in range(2):  # a process that starts again reads it again
        child = os.dup(parent)
        assert read_keys(f"/dev/fd/{child}", "worker") == parse_keys(content, "worker")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(child)
    os.close(parent)


def test_keys_made_with_openssl_are_read(tmp_path: Path) -> None:
    """The commands of docs/operating.md."""
    script = """
    for role in router worker; do
      openssl req -x509 -newkey ed25519 -nodes -days 36500 -subj /CN=segue-$role -keyout $role.key -out $role.crt
    done
    for role in router worker; do (umask 077; cat $role.key router.crt worker.crt > $role.pem); done
    """
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True, capture_output=True)
    keys: dict[LinkRole, LinkKeys] = {
        "router": read_keys(str(tmp_path / "router.pem"), "router"),
        "worker": read_keys(str(tmp_path / "worker.pem"), "worker"),
    }
    assert keys["router"].peers == (keys["worker"].own.public,)


RSA = """
openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=segue-worker -keyout /dev/stdout -out /dev/stdout 2>/dev/null
"""


def made_with_rsa() -> bytes:
    return subprocess.run(["bash", "-ec", RSA], check=True, capture_output=True).stdout


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        pytest.param(b"s" * 32, 0o600, "0 private keys", id="no PEM"),
        pytest.param(ROUTER.certificate + WORKER.certificate, 0o600, "0 private keys", id="no key"),
        pytest.param(
            WORKER.key + key_file(ROUTER, ROUTER, WORKER), 0o600, "2 private keys", id="both roles' keys"
        ),
        pytest.param(WORKER.key, 0o600, "no certificate that can be read", id="no certificates"),
        pytest.param(key_file(WORKER, WORKER), 0o600, "no certificate of segue-router", id="no peers"),
        pytest.param(key_file(WORKER, ROUTER), 0o600, "without its certificate", id="own is not listed"),
        pytest.param(
            key_file(ROUTER, ROUTER, WORKER), 0o600, "expected one of segue-worker", id="other role's"
        ),
        pytest.param(
            key_file(*[certified(SHARED, role) for role in ("worker", "worker", "router")]),
            0o600,
            "one key for routers and for workers",
            id="one key",
        ),
        pytest.param(made_with_rsa(), 0o600, "another kind: expected Ed25519", id="RSA"),
        pytest.param(WORKER.key.replace(b"M", b"-", 1), 0o600, "cannot be read", id="a spoilt key"),
        pytest.param(key_file(WORKER, ROUTER, WORKER), 0o644, "open to every user", id="world-readable"),
        pytest.param(None, 0o600, "cannot be read", id="missing"),
    ],
)
def test_a_bad_file_is_one_clear_sentence(
    tmp_path: Path, content: bytes | None, mode: int, complaint: str
) -> None:
    path = tmp_path / "keys.pem"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=complaint) as error:
        read_keys(str(path), "worker")
    assert WORKER.key.splitlines()[1].decode() not in str(error.value)
