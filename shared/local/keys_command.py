"""`segue keys`: draws API keys for clients, and says whether a file of them is right.

    segue keys new NAME [rpm=N tpm=N concurrent=N priority=N ttft_target=N models=A,B] [--file FILE]
    segue keys check FILE

A new key is shown once and stored nowhere: the file gets its hash. Nothing here talks to a router, which follows its
file by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.primitives.errors import ConfigError
from shared.process.api_keys import ApiKey, key_line, new_key, parse_keys


def new(name: str, limits: Sequence[str], file: Path | None) -> None:
    """Draw a key and print it, with its line or with the file that got the line. Raises ConfigError."""
    key = new_key()
    try:
        line = key_line(name, key, " ".join(limits))
    except ValueError as error:
        raise ConfigError(f"no key was drawn: {error}") from None
    place = f"its line in the file of keys:\n  {line}"
    if file is not None:
        _append(file, line)
        place = f"its line is in {file}"
    sys.stdout.write(f"the key, which is not shown again:\n  {key}\n{place}\n")


def check(file: Path) -> None:
    """Print whose keys a file has. Raises ConfigError where a router would not take it."""
    found = _parsed(_content(file), file)
    names = sorted({key.name for key in found.values()})
    sys.stdout.write(f"{file} is right: {len(found)} keys of {len(names)} clients\n")
    sys.stdout.writelines(f"  {each}\n" for each in names)


def _append(file: Path, line: str) -> None:
    """Add the line, if the file is right with it; the file is exchanged as a whole, so that no router reads a half.

    Commands that add to one file at the same time wait for each other.
    """
    with _alone_in(file.parent):
        _exchange(file, line)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep others from adding to a file of this folder meanwhile, where the file system has locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _exchange(file: Path, line: str) -> None:
    old = _content(file) if file.exists() else b""
    new = old + (b"\n" if old and not old.endswith(b"\n") else b"") + f"{line}\n".encode()
    _parsed(new, file)
    try:
        before = file.stat() if old else None
        # In a folder that others may write to: mkstemp opens a name that nobody can guess, with O_EXCL and O_NOFOLLOW.
        descriptor, beside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(descriptor, "wb") as opened:
                if before is not None:
                    _be_like(descriptor, before)
                opened.write(new)
            os.replace(beside, file)
        except OSError:
            os.unlink(beside)
            raise
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


def _be_like(descriptor: int, before: os.stat_result) -> None:
    """Give the new file the owner, group and mode of the old one: who reads that must be able to read this."""
    fresh = os.fstat(descriptor)
    if (fresh.st_uid, fresh.st_gid) != (before.st_uid, before.st_gid):
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, before.st_mode & 0o777)


def _parsed(content: bytes, file: Path) -> dict[bytes, ApiKey]:
    try:
        return parse_keys(content)
    except ValueError as error:
        raise ConfigError(f"{file} {error}") from None


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
