"""`segue keys`: draws API keys for clients, and says whether a file of them is right.

    segue keys new NAME [rpm=N tpm=N concurrent=N priority=N models=A,B] [--file FILE]
    segue keys check FILE

A new key is shown once and stored nowhere: the file gets its hash. Nothing here talks to a router, which follows its
file by itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from shared.primitives.errors import ConfigError
from shared.process.api_keys import ApiKey, key_line, new_key, parse_keys

USAGE = """usage: segue keys new NAME [rpm=N] [tpm=N] [concurrent=N] [priority=N] [models=A,B] [--file FILE]
       segue keys check FILE

new draws an API key for a client and shows it once, with the line that a router's file of keys gets; --file
appends the line to a file. A second key of the same name replaces the first as soon as the old line is deleted.
check says whether a router would take the file, and whose keys it has.
"""


def keys(argv: list[str]) -> None:
    """Carry out the command. Raises ConfigError."""
    sys.stdout.write(_printed(argv))


def _printed(argv: list[str]) -> str:
    match argv:
        case [] | ["-h" | "--help"] | ["new" | "check", "-h" | "--help"]:
            return USAGE
        case ["new", name, *settings, "--file", file] if not name.startswith("-"):
            return _new(name, settings, Path(file))
        case ["new", name, *settings] if not name.startswith("-"):
            return _new(name, settings, None)
        case ["check", file]:
            return _check(Path(file))
    raise ConfigError("there is `segue keys new NAME` and `segue keys check FILE`, see segue keys --help")


def _new(name: str, settings: list[str], file: Path | None) -> str:
    key = new_key()
    try:
        line = key_line(name, key, " ".join(settings))
    except ValueError as error:
        raise ConfigError(f"no key was drawn: {error}") from None
    if file is None:
        return f"the key, which is not shown again:\n  {key}\nits line in the file of keys:\n  {line}\n"
    _append(file, line)
    return f"the key, which is not shown again:\n  {key}\nits line is in {file}\n"


def _append(file: Path, line: str) -> None:
    """Add the line, if the file is right with it; the file is exchanged as a whole, so that no router reads a half."""
    old = _content(file) if file.exists() else b""
    new = old + (b"\n" if old and not old.endswith(b"\n") else b"") + f"{line}\n".encode()
    _parsed(new, file)
    mode = file.stat().st_mode & 0o777 if old else 0o600
    try:
        # In a folder that others may write to: mkstemp opens a name that nobody can guess, with O_EXCL and O_NOFOLLOW.
        descriptor, beside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(descriptor, "wb") as opened:
            os.fchmod(descriptor, mode)
            opened.write(new)
        os.replace(beside, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


def _check(file: Path) -> str:
    found = _parsed(_content(file), file)
    names = sorted({key.name for key in found.values()})
    return f"{file} is right: {len(found)} keys of {len(names)} clients\n" + "".join(
        f"  {name}\n" for name in names
    )


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
