"""The oracle for what a router believes to be in caches, by an account of its own.

- Blocks have the names that they have at every router.
- A draining worker is nobody's own one.
- What a worker turned out to have evicted is no hit any more: as many blocks are forgotten.
- What own workers are taken to have of prompts is learnt from those that compute them, not from those that fetch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from copy import copy
from hashlib import blake2b

import msgspec

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.effects import ClientRequest
from router.core.fleet.prefix_index import BLOCK_TOKENS, Found
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from shared.wire.messages import Joined, Message, Prefilled

ANSWERED = {Prefilled: RequestState.PREFILLING, Joined: RequestState.DECODING}


def prove_names(core: RouterCore, rid: str) -> bool:
    """Of a request, if it was admitted; returns whether there were any."""
    live = core._requests.live.get(rid)
    if live is None:
        return False
    name = blake2b(live.extra_key.encode(), digest_size=8).digest()
    tokens = live.request.token_ids
    for at, told in enumerate(live.blocks):
        block = tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
        name = blake2b(msgspec.msgpack.encode(block), digest_size=8, salt=name).digest()
        assert told == name, f"block {at} of {live.rid} has a name of this router alone"
    return bool(live.blocks)


def blocks_left(core: RouterCore, peer: str, message: Message) -> int | None:
    """How many blocks of a worker may be known after its message; None: it says nothing of an eviction."""
    if not isinstance(message, Prefilled | Joined) or peer not in core.fleet.prefixes:
        return None
    live, worker = core._requests.live.get(message.rid), core.fleet.workers.get(peer)
    if live is None or worker is None or live.waits_on is not worker or live.worker is not worker:
        return None
    if live.attempt != message.attempt or live.state is not ANSWERED[type(message)]:
        return None
    missed = worker.assigned[live.rid].hit_tokens - message.cached_tokens
    if missed < BLOCK_TOKENS:
        return None
    return max(0, len(core.fleet.prefixes._workers[peer].blocks) - missed // BLOCK_TOKENS)


def prove_forgotten(core: RouterCore, peer: str, left: int | None) -> bool:
    """The router knows no more blocks of a worker than are left; returns whether something was evicted."""
    if left is None or peer not in core.fleet.prefixes:
        return False
    known = len(core.fleet.prefixes._workers[peer].blocks)
    assert known <= left, f"{peer} is believed to have what it has evicted"
    return True


def prove_learnt(
    message: Message, before: dict[tuple[str, str], Found], after: dict[tuple[str, str], Found]
) -> bool:
    """What was found of prompts changes as they are computed, or fetched, apart; returns whether it has."""
    changed = {role for (model, role), each in after.items() if before.get((model, role)) != each}
    told = {"fetched"} if isinstance(message, Joined) else {"prefill", "decode"}
    may_tell = isinstance(message, Prefilled | Joined)
    assert not changed or (may_tell and changed <= told), f"{type(message).__name__} tells what was found"
    return bool(changed)


def prove_placed(core: RouterCore, live: LiveRequest) -> int:
    """The worker that a request was given to, if any, does not drain; returns how many went to their own ones."""
    worker = live.worker
    assert worker is None or not worker.draining, f"{live.rid} is given to {worker.peer}, which drains"
    return core.counters.placements["prefill", "own"]


class JudgedCaches(RouterCore):
    """A router's core. What it believes of caches is judged at each request, message and placement."""

    def __init__(self, settings: RouterConfig, now: float):
        super().__init__(settings, now)
        self.judged: Counter[str] = Counter()
        self.liars: Collection[str] = ()  # peers

    def submit(self, request: ClientRequest, now: float) -> None:
        super().submit(request, now)
        self.judged["blocks have the names of all routers"] += prove_names(self, request.rid)

    def _received(self, peer: str, message: Message, now: float) -> None:
        left = blocks_left(self, peer, message) if peer not in self.liars else None
        before = {each: copy(found) for each, found in self.fleet.prefixes._found.items()}
        super()._received(peer, message, now)
        learnt = prove_learnt(message, before, dict(self.fleet.prefixes._found))
        self.judged["what was found of prompts is learnt"] += learnt
        self.judged["what was evicted is no hit"] += prove_forgotten(self, peer, left)

    def _to_prefill(self, live: LiveRequest, now: float, *, or_decode: bool) -> bool | None:
        placed = super()._to_prefill(live, now, or_decode=or_decode)
        self.judged["a prefix goes to its own worker"] = prove_placed(self, live)
        return placed
