"""Where a worker's links listen, and how a setting writes that down.

A worker's role is the one in its Hello; the role in the setting is for readers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.primitives.errors import ConfigError
from shared.wire.messages import WORKER_ROLES


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A worker that can be dialed."""

    role: str
    url: str  # tcp://host:port
    pod: str = ""  # its name; empty where there are no pods


def static_workers(entries: Sequence[str]) -> list[WorkerAddress]:
    """The workers of `prefill=HOST:PORT` and `decode=HOST:PORT`; raises `ConfigError` for other words."""
    return [_parse(entry) for entry in entries]


def _parse(entry: str) -> WorkerAddress:
    role, equals, address = entry.partition("=")
    host, colon, port = address.rpartition(":")
    if role not in WORKER_ROLES or not (
        equals and colon and host and port.isdigit() and 0 < int(port) < 65536
    ):
        raise ConfigError(f"workers must be prefill=HOST:PORT or decode=HOST:PORT, got {entry!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"workers must have IPv6 addresses in brackets, [{host}]:{port}, got {entry!r}")
    return WorkerAddress(role, f"tcp://{host}:{port}")
