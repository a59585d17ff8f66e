"""What can go wrong in a world, and when: drawn before it begins. Nothing here acts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

LINK_FAULTS = ("loss", "reconnect", "isolation")
LEAVES = ("drain prefill", "drain decode")
DRAWN_FAULTS = (
    "crash prefill",
    "crash decode",
    "crash router",
    "freeze",
    "long freeze",
    *LEAVES,
    *LINK_FAULTS,
)
ROUTER_DRAINS = ("drain router", "stop router")  # by SIGTERM; by SIGINT, or SIGTERM twice
HANG = "hang"  # a worker's loop, as in a step that does not end; its links live on
FOR_EVER = 1000.0  # seconds; all has ended by then, or nothing ends it
LOSE_RANK = (
    "rank"  # a GPU of a worker is lost: its loop stands still, its links end, and soon the process is gone
)
FORGET = "forget"  # a worker loses a request, and lives on
NONSENSE = "nonsense"  # a router sends a worker a command that is not sound
THEFT = "theft"  # a worker that was taken over reads what is not its own
LIE = "lie"  # a worker says what is not so
SWALLOW = "swallow"  # a worker takes requests for a minute, and does nothing with them
FALSE_PAUSE = "false pause"  # a worker says that requests are paused, and they are not, or not its own
FAULTS = (*DRAWN_FAULTS, *ROUTER_DRAINS, HANG, LOSE_RANK, FORGET, NONSENSE, THEFT, LIE, SWALLOW, FALSE_PAUSE)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that will happen to the world; `choice` picks the victim among those alive then."""

    at: float
    kind: str
    choice: int
    seconds: float


def drawn_faults(rng: random.Random, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """Some of each kind, in the order in which they strike."""
    faults = [
        Fault(rng.uniform(0.1, 2.5), kind, rng.randrange(1000), _seconds(rng, kind))
        for kind in kinds
        for _ in range(rng.randint(2, 10) if kind in LINK_FAULTS else rng.randint(1, 4))
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _seconds(rng: random.Random, kind: str) -> float:
    """How long it lasts: a freeze or a hang, or the time until a crashed process is back."""
    if kind == HANG:
        return rng.choice((rng.uniform(0.05, 1.0), rng.uniform(2.5, 6.0), FOR_EVER))
    return rng.uniform(2.5, 6.0) if kind == "long freeze" else rng.choice((0.02, rng.uniform(0.05, 1.0)))


def rollout(rng: random.Random) -> tuple[Fault, ...]:
    """Workers of both roles leave in turn, and are back soon."""
    return tuple(
        Fault(0.3 + 0.25 * turn + rng.uniform(0, 0.25), kind, rng.randrange(1000), 0.02)
        for turn, kind in enumerate(LEAVES * 3)
    )
