"""What the owner of a link gives it: the times that every process has by default, and a writer for its log lines."""

from __future__ import annotations

from typing import Any

import structlog

from shared.batch.effects import Note
from shared.links.session import LinkSettings
from shared.process.process_config import ProcessConfig


def link_settings(**changes: Any) -> LinkSettings:
    """What a process makes of its configuration, with some values changed."""
    config = ProcessConfig()
    times = {"heartbeat_seconds": config.heartbeat_seconds, "silence_seconds": config.silence_seconds}
    return LinkSettings(**times | changes)


def write_note(note: Note) -> None:
    """Write a link's note with structlog, where a test can capture it."""
    getattr(structlog.get_logger("links"), note.level)(note.event, **note.fields)
