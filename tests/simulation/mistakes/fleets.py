"""Mistakes in what a router keeps of a large fleet, and in whom it asks: see `mutations`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from router.core.fleet import placement
from router.core.fleet.workers import OpenWorkers, Worker
from router.discovery import cells
from shared.wire.messages import Load
from tests.simulation.mistakes.mutation import Mutation, Patch, into

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


@_mistake("fleets", "a handful without room is not followed by a look at the others")
def _only_a_handful() -> list[Patch]:
    rounds = placement.decode_rounds

    def first_round(*inputs: Any) -> Iterator[list[Worker]]:
        return islice(rounds(*inputs), 1)

    return [(placement, "decode_rounds", first_round)]


@_mistake("fleets", "a load that brings room wakes nobody")
def _no_wake() -> list[Patch]:
    report = Worker.report

    def report_in_silence(self: Worker, load: Load) -> bool:
        report(self, load)
        return False

    return [(Worker, "report", report_in_silence)]


@_mistake("fleets", "a worker that was full is never open again")
def _closed_for_ever() -> list[Patch]:
    put = OpenWorkers.put

    def put_once(self: OpenWorkers, worker: Worker, *, is_open: bool) -> None:
        if not is_open or not worker.load_number:
            put(self, worker, is_open=is_open)

    return [(OpenWorkers, "put", put_once)]


@_mistake("fleets", "a cell has workers of one role")
def _roles_apart() -> list[Patch]:
    divide = cells.divide

    def by_role(names: Collection[str], count: int) -> dict[str, int]:
        apart = {"prefill": 0, "decode": 1}
        return {name: apart.get(name.split("-")[0], cell) for name, cell in divide(names, count).items()}

    return [(cells, "divide", by_role)]


@_mistake("fleets", "one router serves a cell")
def _one_router() -> list[Patch]:
    def served_cells(routers: Collection[str], count: int) -> dict[str, frozenset[int]]:
        return {
            router: frozenset([number] if number < count else []) for number, router in enumerate(routers)
        }

    return [(cells, "served_cells", served_cells)]
