"""The seed file and the keys that every process derives from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.links.keys import derive_keys, open_new_seed, read_seed


def test_every_process_derives_the_same_keys_from_one_seed() -> None:
    assert derive_keys(b"s" * 32, "router") == derive_keys(b"s" * 32, "router")


def test_roles_and_seeds_have_keys_of_their_own() -> None:
    keys = [derive_keys(seed, role) for seed in (b"s" * 32, b"t" * 32) for role in ("router", "worker")]
    assert len({pair.public for pair in keys}) == len({pair.secret for pair in keys}) == 4


def test_the_derivation_is_fixed_for_rolling_upgrades() -> None:
    assert derive_keys(bytes(range(32)), "worker").public == b"1EI@RC*Z5!yxHsT:DL}@V(&@(zR?+f5Q4P^Mi*x0"


def test_a_secret_key_is_not_shown() -> None:
    pair = derive_keys(b"s" * 32, "worker")
    assert pair.secret.decode() not in repr(pair)


def test_a_seed_in_memory_is_readable_to_processes_that_inherit_it_and_has_no_name() -> None:
    seeds = [open_new_seed(), open_new_seed()]
    paths = [Path(f"/dev/fd/{descriptor}") for descriptor in seeds]
    drawn = {read_seed(path) for path in paths}
    assert len(drawn) == 2
    assert {read_seed(path) for path in paths} == drawn, "a process that starts again reads it again"
    assert {(os.fstat(seed).st_mode & 0o777, os.fstat(seed).st_nlink) for seed in seeds} == {(0o600, 0)}
    for descriptor in seeds:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("seed", "mode", "complaint"),
    [
        pytest.param(b"s" * 31, 0o600, "31 bytes", id="too short"),
        pytest.param(b"s" * 33, 0o600, "33 bytes", id="too long"),
        pytest.param(b"s" * 32, 0o644, "open to every user", id="world-readable"),
        pytest.param(None, 0o600, "cannot be read", id="missing"),
    ],
)
def test_a_bad_seed_file_is_one_clear_sentence(
    tmp_path: Path, seed: bytes | None, mode: int, complaint: str
) -> None:
    path = tmp_path / "seed"
    if seed is not None:
        path.write_bytes(seed)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=complaint) as error:
        read_seed(path)
    assert "sss" not in str(error.value)
