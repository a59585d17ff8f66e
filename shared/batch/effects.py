"""What a core wants done: values, carried out by its shell in the order they were given.

A core has no I/O of its own: it takes events and answers with these. `Send` and `Note` are every core's; the others
are the schedulers'. Lease words are the one exception: they are memory of the scheduler's own process and are written
directly, because the order "clear the word, then unlock the pages" must not depend on when effects are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.wire.baton import Baton
from shared.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to `peer`. If the session has ended, the link drops the message and counts it."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Read the baton's pages, from page `start_page` of the request on, into the local pages `into`."""

    fetch_id: int
    baton: Baton
    start_page: int
    into: Sequence[int]


@dataclass(frozen=True, slots=True)
class AbandonFetch:
    """Stop this fetch: its request has ended."""

    fetch_id: int


@dataclass(frozen=True, slots=True)
class Backup:
    """Copy device pages to host pages."""

    copy_id: int
    pages: Sequence[int]
    host_pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy host pages to device pages."""

    copy_id: int
    host_pages: Sequence[int]
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log, which the shell writes: cores do not log, shells and libraries use structlog directly.

    `event` is `area.event`. A warning or an error needs a row in docs/troubleshooting.md: its meaning and its remedy.
    """

    event: str
    fields: Mapping[str, object]
    level: Literal["debug", "info", "warning", "error"] = "info"


WorkerEffect = Send | StartFetch | AbandonFetch | Backup | Restore | Note
