"""Mistakes between workers of several ranks: see `mutations`."""

from __future__ import annotations

from typing import Any

from shared.transfer.protocol import FetchLanded, FetchStale
from tests.simulation.mistakes.mutation import Instead, Mistakes, nothing


def _word_of_the_first_rank() -> Instead:
    """What the word was when the first of the ranks had read its slices serves for all."""
    held: dict[tuple[int, int], bool] = {}

    def has_arrived(real: Any, agent: Any, read: Any) -> bool:
        if not all(read.pending) and (id(agent), read.fetch_id) not in held:
            holder = agent.fabric.agents.get(read.agent)
            word = holder.words.read(read.baton.lease) if holder else 0
            held[id(agent), read.fetch_id] = word == read.baton.nonce
        return bool(real(agent, read))

    def tell(real: Any, agent: Any, event: Any) -> None:
        was_held = isinstance(event, FetchStale) and held.get((id(agent), event.fetch_id))
        real(agent, FetchLanded(event.fetch_id, 0, 0.0) if was_held else event)

    return {"the reads of all ranks have ended": has_arrived, "the agent tells of a fetch": tell}


def _own_rank_alone(_: Any, agent: Any, read: Any) -> bool:
    del agent
    return not read.pending[0]


def _proven_by_rank_0(_: Any, agent: Any, read: Any) -> bool:
    del agent
    return 0 not in read.unproven


def _copied_by_rank_0(_: Any, device: Any, copying: set[int]) -> bool:
    del device
    return 0 not in copying


def _first_slices(slices_of: Any, agent: Any, part: int, parts: int) -> range:
    del part
    found: range = slices_of(agent, 0, parts)
    return found


MISTAKES: dict[str, Mistakes] = {
    "ranks": {
        "the word is read when the first rank is done": _word_of_the_first_rank,
        "a fetch has ended when rank 0's reads have": {
            "the reads of all ranks have ended": _own_rank_alone,
        },
        "the target of a fetch is free when rank 0's reads are proven to have ended": {
            "the reads of all ranks are proven to have ended": _proven_by_rank_0,
        },
        "retracted pages are free when rank 0 has copied them": {
            "the copies of all ranks are done": _copied_by_rank_0,
        },
        "that a rank is lost is told to the loop, which stands still": {
            "a worker that lost a rank ends": nothing,
        },
        "slices are put at the wrong head": {"which slices a rank reads from another": _first_slices},
    }
}
