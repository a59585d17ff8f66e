"""Clients' API keys as an operator keeps them: a file with a line a key, which holds hashes and no key.

    # name     SHA-256 of the key, in hexadecimal                                        limits, as far as there are any
    webshop    5f0c…                                                                     rpm=600 tpm=200000 concurrent=8
    batch      91ab…                                                                     priority=-1 models=smollm2,qwen

A name may stand in several lines with different keys, which is how a key is replaced: both count as one client until
the old line is deleted. A plain SHA-256 is enough, for keys are drawn with 256 bits: nobody can try them out.

This file knows neither HTTP nor routers. Its messages name lines and fields, and repeat nothing of the file: where a
hash should stand, somebody may have put the key.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

KEY_PREFIX = "sk-segue-"
KEY_BYTES = 32
KEYS_FILE_BYTES_MAX = 1 << 20  # what a Kubernetes Secret can hold: about 10,000 lines
PRIORITY_LIMIT = 1000

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")  # it becomes the label of metrics
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SECONDS = re.compile(r"[0-9]{1,5}(\.[0-9]{1,3})?")
_NUMBER = re.compile(r"[1-9][0-9]{0,11}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One line: whose key it is, and what its holder may do. 0 of a limit, and no models: no limit."""

    name: str
    digest: bytes  # SHA-256 of the key
    rpm: int = 0  # requests a minute
    tpm: int = 0  # tokens a minute, of prompts and outputs
    concurrent: int = 0  # requests at a time
    priority: int = 0  # higher goes first
    models: tuple[str, ...] = ()
    ttft_target: float = 0.0  # seconds within which its requests are to have their first token; 0.0: none

    def may_use(self, model: str) -> bool:
        """Whether the key is for this model."""
        return not self.models or model in self.models


def new_key() -> str:
    """A key that nobody can guess: 256 bits."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: bytes) -> bytes:
    """What stands for a key in the file."""
    return hashlib.sha256(key).digest()


def key_line(name: str, key: str, settings: str = "") -> str:
    """The line of a key. Raises ValueError, one sentence, where the file could not hold it."""
    _check_name(name)
    line = " ".join([name, digest_of(key.encode()).hex(), *settings.split()])
    parse_line(line)
    return line


def parse_keys(content: bytes) -> dict[bytes, ApiKey]:
    """The keys of a file, by digest. Raises ValueError, a sentence without its subject, which is the file."""
    if len(content) > KEYS_FILE_BYTES_MAX:
        raise ValueError(f"has {len(content)} bytes, which is more than {KEYS_FILE_BYTES_MAX}")
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    keys: dict[bytes, ApiKey] = {}
    first: dict[str, tuple[int, ApiKey]] = {}  # where a name stands first
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = parse_line(line)
        except ValueError as error:
            raise ValueError(f"is wrong in line {number}: {error}") from None
        if key.digest in keys:
            raise ValueError(f"is wrong in line {number}: another line has the same hash")
        at, other = first.setdefault(key.name, (number, key))
        if replace(key, digest=other.digest) != other:
            raise ValueError(
                f"is wrong in line {number}: line {at} has the same name and other limits; "
                "keys of one name share one set of limits, so write the same in both"
            )
        keys[key.digest] = key
    return keys


def parse_line(line: str) -> ApiKey:
    """One key. Raises ValueError, a sentence about the line."""
    words = line.split()
    if len(words) < 2:
        raise ValueError(
            "it must have a name and the SHA-256 hash of a key: `segue keys new NAME` writes both"
        )
    name, digest, *settings = words
    _check_name(name)
    if not _DIGEST.fullmatch(digest):
        hint = "; this is a key, and whoever reads the file has it" if digest.startswith("sk-") else ""
        raise ValueError(f"the second word must be a SHA-256 hash of 64 hexadecimal digits{hint}")
    fields: dict[str, Any] = {}
    for setting in settings:
        field, _, value = setting.partition("=")
        if field not in _FIELDS:
            raise ValueError(  # unquoted: it may be a key
                f"after the hash come {', '.join(f'{known}=' for known in _FIELDS)} and no others"
            )
        if field in fields:
            raise ValueError(f"{field} stands there twice")
        fields[field] = _FIELDS[field](field, value)
    return ApiKey(name, bytes.fromhex(digest), **fields)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            "the name must be a letter and up to 62 letters, digits, dots, dashes and underscores"
        )


def _count(field: str, value: str) -> int:
    if not _NUMBER.fullmatch(value):
        raise ValueError(f"{field} must be a whole number from 1 on; without a limit it is left out")
    return int(value)


def _priority(field: str, value: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,4}", value) or abs(int(value)) > PRIORITY_LIMIT:
        raise ValueError(f"{field} must be a whole number from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}")
    return int(value)


def _seconds(field: str, value: str) -> float:
    if not _SECONDS.fullmatch(value) or not float(value):
        raise ValueError(
            f"{field} must be seconds above 0, such as 2 or 0.5; without a target it is left out"
        )
    return float(value)


def _models(field: str, value: str) -> tuple[str, ...]:
    models = tuple(value.split(","))
    if not all(models):
        raise ValueError(f"{field} must be names of models with commas between them")
    return models


_FIELDS: Mapping[str, Callable[[str, str], object]] = {
    "rpm": _count,
    "tpm": _count,
    "concurrent": _count,
    "priority": _priority,
    "models": _models,
    "ttft_target": _seconds,
}
