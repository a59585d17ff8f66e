"""Mistakes in what a router keeps of a fleet, in whom it asks, and in what peers of another version understand."""

from __future__ import annotations

from itertools import islice
from typing import Any

from router.placement_policies import Placement, by_rendezvous
from tests.simulation.mistakes.mutation import Mistakes, gives, nothing


def _wake_nobody(report: Any, worker: Any, load: Any) -> bool:
    report(worker, load)
    return False


def _open_once(put_open: Any, workers: Any, worker: Any, *, is_open: bool) -> None:
    if not is_open or not worker.load_number:
        put_open(workers, worker, is_open=is_open)


def _roles_apart(divide: Any, names: Any, count: int) -> dict[str, int]:
    apart = {"prefill": 0, "decode": 1}
    return {name: apart.get(name.split("-")[0], cell) for name, cell in divide(names, count).items()}


def _one_router(_: Any, routers: Any, count: int) -> dict[str, frozenset[int]]:
    return {router: frozenset([number] if number < count else []) for number, router in enumerate(routers)}


def _own_although_it_drains(place: Any, need: Any, workers: Any, *inputs: Any) -> Any:
    choice = place(need, workers, *inputs)
    own = next(by_rendezvous(need, workers), None)
    found = choice is not None and choice.reason == "own"
    return Placement(own, "the prefix's own worker", "own") if found else choice


def _by_names_of_its_own(names: Any, tokens: Any, key: str, known: Any = ()) -> Any:
    return names(tuple(token + 1 for token in tokens), key, known)


def _by_tokens_alone(names: Any, tokens: Any, key: str, known: Any = ()) -> Any:
    del key
    return names(tokens, "", known)


def _counts_as_computed(correct: Any, reservations: Any, live: Any, cached_tokens: int, **_: bool) -> None:
    correct(reservations, live, cached_tokens, fetched=False)


MISTAKES: dict[str, Mistakes] = {
    "caches": {
        "routers name blocks differently": {"blocks are named": _by_names_of_its_own},
        "a prefix of another tenant counts as cached": {"blocks are named": _by_tokens_alone},
        "a prefix that was evicted stays a hit for ever": {
            "what is believed of a cache is corrected": nothing
        },
        "what is fetched tells what is found where prompts are computed": {
            "what is believed of a cache is corrected": _counts_as_computed
        },
        "the own worker of a prefix is taken although it drains": {
            "the prefill worker of a prompt": _own_although_it_drains
        },
    },
    "fleets": {
        "a handful without room is not followed by a look at the others": {
            "workers are asked": lambda rounds, *inputs: islice(rounds(*inputs), 1)
        },
        "a load that brings room wakes nobody": {"a worker reports its load": _wake_nobody},
        "a worker that was full is never open again": {"a worker is open or not": _open_once},
        "a cell has workers of one role": {"a fleet is divided": _roles_apart},
        "one router serves a cell": {"cells get routers": _one_router},
    },
    "versions": {
        "a router sends a new message to a worker that does not understand it": {
            "a worker knows a message": gives(True)
        },
        "a worker sends a new message to a router that does not understand it": {
            "a router knows a message": gives(True)
        },
        "every peer is taken for one of this version": {"a peer reads a message": gives(True)},
    },
}
