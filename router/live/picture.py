"""A router's fleet and requests at a moment, as plain values for those who watch: numbers, names of pods, hashed ids.

Everything is read from the books of the core, nothing is asked of a worker: a pod's figures are those of its last load.
What is given by second is the difference between two pictures, so one `FleetPicture` is for one series of them. There
is no text in a picture, no token id, no name of a key or tenant. Its size is bounded: REQUESTS_MAX requests at most are
listed one by one, all others are in the sums of their pods.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from typing import Any

from router.core.dispatch import RouterCore
from router.core.fleet.worker import KvGroup, Worker
from router.core.requests.live_request import LiveRequest

REQUESTS_MAX = 256
MEASURED_SECONDS = 60.0  # in which first tokens count for the 95th percentile
MEASURED = 1024
ID_BYTES = 6
GROUPS = 64  # models and KV formats that are told apart

Json = dict[str, Any]


def public_id(rid: str) -> str:
    """What watchers see of a request's id. The id itself is 96 bits by chance, and cannot be found from this."""
    return hashlib.blake2b(rid.encode(), digest_size=ID_BYTES).hexdigest()


def pod_of(peer: str) -> str:
    """The pod's name in the name of a link's peer, which is `uid/epoch`."""
    return peer.rpartition("/")[0]


class FleetPicture:
    """Takes pictures of one core, about one a second."""

    def __init__(self, core: RouterCore, name: str, now: float):
        self._core = core
        self._name = name
        self._at = now
        self._generated = core.counters.completion_tokens
        self._lengths: dict[str, int] = {}  # tokens of each request's output at the last picture
        self._by_pod: Counter[str] = Counter()  # tokens per second
        self._token_ms: list[float] = []
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MEASURED)  # (when, seconds)
        self._groups: dict[KvGroup, int] = {}

    def first_token(self, live: LiveRequest) -> None:
        """The first token of a request has come."""
        self._first_tokens.append((live.token_at, live.token_at - live.arrived_at))

    def take(self, now: float) -> Json:
        """The fleet now, and what has become of it since the last picture."""
        seconds = max(now - self._at, 1e-3)
        listed = self._measure_streams(seconds)
        generated = self._core.counters.completion_tokens
        rate = (generated - self._generated) / seconds
        self._at, self._generated = now, generated
        return {
            "router": self._name,
            "pods": [self._pod(worker) for worker in self._core.fleet.workers.values()],
            "totals": self._totals(rate, now),
            "requests": [_request(live, now) for live in listed],
            "unlisted": len(self._core.requests) - len(listed),
        }

    def _measure_streams(self, seconds: float) -> list[LiveRequest]:
        """Tokens by pod since the last picture; the requests that are listed, of which alone they are counted."""
        before, self._lengths = self._lengths, {}
        self._by_pod.clear()
        self._token_ms.clear()
        listed: list[LiveRequest] = []
        for live in self._core.requests.values():
            if len(listed) == REQUESTS_MAX:
                break
            listed.append(live)
            length = self._lengths[live.rid] = len(live.output)
            tokens = length - before.get(live.rid, 0)
            if tokens > 0 and live.worker is not None:
                self._by_pod[live.worker.peer] += tokens
                if live.rid in before:
                    self._token_ms.append(seconds * 1000 / tokens)
        for peer in self._by_pod:
            self._by_pod[peer] = round(self._by_pod[peer] / seconds)
        return listed

    def _pod(self, worker: Worker) -> Json:
        load, limits = worker.load, worker.hello.limits
        return {
            "name": worker.hello.uid,
            "role": worker.hello.role,
            "state": _state(worker),
            "group": self._group(worker.kv_group),
            "slots": [limits.slots - load.slots_free, limits.slots],
            "pages": [
                max(0, limits.pages - load.free_pages - load.pages_arriving),
                load.pages_arriving,
                limits.pages,
            ],
            "queued_tokens": load.queued_tokens,
            "requests": len(worker.assigned) + len(worker.leases),
            "step_ms": round(load.step_seconds * 1000, 1),
            "tokens_per_second": self._by_pod[worker.peer],
        }

    def _group(self, kv_group: KvGroup) -> int:
        """A small number for a model and its KV format: the page has a colour for each."""
        if len(self._groups) >= GROUPS:
            self._groups.clear()
        return self._groups.setdefault(kv_group, len(self._groups))

    def _totals(self, tokens_per_second: float, now: float) -> Json:
        counters = self._core.counters
        while self._first_tokens and self._first_tokens[0][0] < now - MEASURED_SECONDS:
            self._first_tokens.popleft()
        moved = {"migrated": 0, "recomputed": 0}
        for (outcome, _cause), count in counters.migrations.items():
            moved[outcome] += count
        return {
            "tokens_per_second": round(tokens_per_second),
            "states": self._core.requests_by_state,
            "ttft_ms": percentile([seconds * 1000 for _, seconds in self._first_tokens]),
            "token_ms": percentile(self._token_ms),
            "ended": counters.requests.total(),
            "rejected": counters.requests["429"],
            "errors": sum(count for word, count in counters.requests.items() if word.startswith("5")),
            "migrated": moved["migrated"],
            "continued": counters.continuations.total(),  # new attempts, those of `recomputed` among them
        }


def _state(worker: Worker) -> str:
    if worker.draining:
        return "draining"
    if worker.doubted is not None:
        return "silent"
    return "ready" if worker.load.accepting else "full"


def _request(live: LiveRequest, now: float) -> list[object]:
    """[id, state, pod, tokens of prompt, of output, age in seconds]: a list, for there are many."""
    at = live.waits_on
    return [
        public_id(live.rid),
        live.state.value,
        at.hello.uid if at is not None else "",
        len(live.request.token_ids),
        len(live.output),
        round(now - live.arrived_at, 1),
    ]


def percentile(values: list[float], share: float = 0.95) -> float | None:
    """The least of the values that no more than `1 - share` of them exceed; None of none."""
    if not values:
        return None
    return round(sorted(values)[math.ceil(share * len(values)) - 1], 1)
