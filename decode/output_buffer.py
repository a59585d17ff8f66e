"""Tokens on their way to the routers: one message a router and flush, and one row a request, not one a token.

Tokens wait at most `flush_seconds` for others to share their message; after a pause the first ones go at once. Those
of a request that leaves go before it and alone: else each end would send a row of every other request, too. What is
kept is which requests have tokens that were not sent; the tokens stay in the requests, so a step costs little here. It
does not know why a request has tokens or whether it goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import repeat

from shared.batch.effects import Send
from shared.batch.req import Req
from shared.wire.messages import Generated, Row
from shared.wire.sampled import Logprobs


class OutputBuffer:
    """Requests with tokens since the last flush, in the order of the first of these."""

    def __init__(self, flush_seconds: float):
        self._flush_seconds = flush_seconds
        self._reqs: dict[Req, None] = {}
        self._next_flush = 0.0

    def __bool__(self) -> bool:
        return bool(self._reqs)

    def add(self, reqs: Iterable[Req]) -> None:
        """Note that each of `reqs` has one token more."""
        self._reqs.update(zip(reqs, repeat(None)))

    def forget(self, router: str) -> None:
        """The router's session has ended: drop its tokens."""
        self._reqs = {req: None for req in self._reqs if req.router != router}

    def due(self, now: float) -> bool:
        """Whether the tokens have waited `flush_seconds`, or come after a pause that long."""
        return bool(self._reqs) and now >= self._next_flush

    def deadline(self) -> float | None:
        """When the tokens are due, in seconds of the worker's clock; None if there are none."""
        return self._next_flush if self._reqs else None

    def flush(self, now: float) -> list[Send]:
        """The messages with all tokens; the buffer is empty then."""
        if self._reqs:
            self._next_flush = now + self._flush_seconds
        reqs, self._reqs = self._reqs, {}
        return _messages(reqs)

    def flush_of(self, reqs: Iterable[Req]) -> list[Send]:
        """The messages with the tokens of these requests, which leave; those of others wait on."""
        leaving = [req for req in reqs if req in self._reqs]
        for req in leaving:
            del self._reqs[req]
        return _messages(leaving)


def _messages(reqs: Iterable[Req]) -> list[Send]:
    by_router: defaultdict[str, list[Row]] = defaultdict(list)
    for req in reqs:
        start, req.sent_len = req.sent_len, len(req.token_ids)
        token_ids = tuple(req.token_ids[start:])
        logprobs: Logprobs = ()
        if req.logprobs:
            logprobs, req.logprobs = tuple(req.logprobs), []
        by_router[req.router].append(Row(req.rid, req.attempt, start - req.prompt_len, token_ids, logprobs))
    return [Send(router, Generated(tuple(rows))) for router, rows in by_router.items()]
