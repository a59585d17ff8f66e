"""What a scheduler wants done: values, carried out by the event loop in the order they were given.

A scheduler has no I/O of its own. It hears link events, fetch events, finished copies and settled steps, and
answers with these. Lease words are the one exception: they are memory of the scheduler's own process and are written
directly, because the order "clear the word, then unlock the pages" must not depend on who drains a list when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.baton import Baton
from shared.messages import WorkerToRouter


@dataclass(frozen=True, slots=True)
class Send:
    """Give a message to a link; a peer that is gone is the link's business."""

    peer: str
    message: WorkerToRouter


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Read the baton's pages, from page `start_page` of the request on, into the local pages `into`."""

    fetch_id: int
    baton: Baton
    start_page: int
    into: Sequence[int]


@dataclass(frozen=True, slots=True)
class AbandonFetch:
    """The pages of this fetch are wanted no more."""

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
    """A line for the log, which the shell writes: cores do not log. `event` is `area.event`."""

    event: str
    fields: Mapping[str, object]
    level: Literal["debug", "info", "warning", "error"] = "info"


Effect = Send | StartFetch | AbandonFetch | Backup | Restore | Note
