"""Which workers a router dials in a fleet that is too large for every router to dial every worker.

The fleet is divided into cells of prefill and decode workers that serve together, as few as the size of a cell allows.
A router serves one cell or a few, and sees no other worker. Every router works that out by itself, from the names of
the workers and routers that it knows; there is nothing to agree on.

Both divisions are rendezvous hashing with quotas: each name ranks the cells by a hash, and the best ranked pairs of
name and cell come first until a cell has its share. So one name more or less moves few others, and the shares differ by
one at most:

    workers    each role on its own, so that every cell has both roles in the fleet's own ratio
    routers    at least two for each cell: each serves one cell where there are enough of them. Else each cell takes
               the two that rank it best, and a router that no cell took serves the one that it ranks best

One cell serves everything while a role has so few workers that a cell would have none, however many the other role has.
Routers that for a moment know different pods divide them differently. That costs nothing: a link is not ended because
its worker is in another cell now, see `known_pods`.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

ROUTERS_MIN = 2  # of a cell


def workers_of(
    router: str, routers: Collection[str], prefill: Collection[str], decode: Collection[str], size_max: int
) -> frozenset[str]:
    """The names of the workers that `router`, one of `routers`, dials; `size_max` is the most workers of a cell."""
    count = cells_of(len(prefill), len(decode), size_max)
    if count == 1:
        return frozenset((*prefill, *decode))
    mine = served_cells(routers, count)[router]
    cells = divide(prefill, count) | divide(decode, count)
    return frozenset(name for name, cell in cells.items() if cell in mine)


def cells_of(prefill: int, decode: int, size_max: int) -> int:
    """How many cells a fleet is divided into; more than one only if each has both roles."""
    most = max(1, min(prefill, decode))
    return next((n for n in range(1, most) if -(-prefill // n) + -(-decode // n) <= size_max), most)


def served_cells(routers: Collection[str], count: int) -> dict[str, frozenset[int]]:
    """The cells of each router."""
    if len(routers) >= ROUTERS_MIN * count:
        return {router: frozenset([cell]) for router, cell in divide(routers, count).items()}
    taken: dict[str, set[int]] = {router: set() for router in routers}
    for cell in range(count):
        for router in sorted(routers, key=lambda router: _rank(router, cell))[:ROUTERS_MIN]:
            taken[router].add(cell)
    return {
        router: frozenset(cells or {min(range(count), key=lambda cell: _rank(router, cell))})
        for router, cells in taken.items()
    }


def divide(names: Collection[str], count: int) -> dict[str, int]:
    """The cell of each name: shares differ by one at most, and one name more or less moves few others."""
    share, larger = divmod(len(names), count)
    sizes = [0] * count
    found: dict[str, int] = {}
    for _, name, cell in sorted((_rank(name, cell), name, cell) for name in names for cell in range(count)):
        if name in found or sizes[cell] > share or (sizes[cell] == share and not larger):
            continue
        larger -= sizes[cell] == share
        sizes[cell] += 1
        found[name] = cell
    return found


def _rank(name: str, cell: int) -> bytes:
    return blake2b(f"{cell}@{name}".encode(), digest_size=8).digest()
