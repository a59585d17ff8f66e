"""The times of a link as every process has them by default."""

from __future__ import annotations

from typing import Any

from shared.links.session import LinkSettings
from shared.process.process_config import ProcessConfig


def link_settings(**changes: Any) -> LinkSettings:
    """What a process makes of its configuration, with some values changed."""
    config = ProcessConfig()
    times = {"heartbeat_seconds": config.heartbeat_seconds, "silence_seconds": config.silence_seconds}
    return LinkSettings(**times | changes)
