"""A design that others have, as a mistake: see `mutations`.

Pages are pushed: who has them writes them into the memory of who wants them, by address. Who wants them can end its
interest, and not the writes: it learns nothing of them, so an abort or an error is the end for it, and its pages are
given to another request. Here a reader asks only for pages, and keeps them until no byte can land any more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shared.transfer.protocol import FetchEnded, FetchFailed
from tests.simulation.mistakes.mutation import Mistakes
from tests.simulation.mistakes.roles import get, put

PUSHED = "pages are pushed by address, and after an abort they are another's"
UNPOLLED = "the events of an agent that nobody polled"


def _abort(abandon: Any, agent: Any, fetch_id: int) -> None:
    unpolled = any(event.fetch_id == fetch_id for event in get(agent, UNPOLLED))
    known = unpolled or fetch_id in get(agent, "the fetches of an agent")
    abandon(agent, fetch_id)
    events = [event for event in get(agent, UNPOLLED) if event.fetch_id != fetch_id]
    put(agent, UNPOLLED, [*events, FetchEnded(fetch_id)] if known else events)
    agent.on_event()


def _tell(tell: Any, agent: Any, event: Any) -> None:
    if isinstance(event, FetchFailed):
        tell(agent, replace(event, ended=True))
    elif not isinstance(event, FetchEnded):  # it was told so when it lost interest
        tell(agent, event)


def _land(end_some_day: Any, agent: Any, read: Any) -> None:
    end_some_day(agent, read)
    agent.endless_pages.clear()  # nobody keeps them


MISTAKES: dict[str, Mistakes] = {
    "transfer": {
        PUSHED: {
            "a fetch is abandoned at the agent": _abort,
            "the agent tells of a fetch": _tell,
            "bytes of a fetch that was given up land for a while": _land,
        }
    }
}
