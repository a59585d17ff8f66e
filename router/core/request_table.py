"""All live requests, and the only moves they can make: each advances the table and keeps everything beside it in step.

Beside the state of a request stand its place in a queue, its deadlines, its assignment to a worker and the lease of
its pages. They change here, together, and nowhere else, so that nothing stays behind when a request moves on:

    state        in line    deadlines              worker (assigned)   holder (lease)
    waiting      waiting    wait                   -                   -
    prefilling   -          -                      prefill             -
    ready        ready      ready, renew           -                   prefill
    decoding     -          renew, while leased    decode              prefill, until the pages have arrived

A request that moves goes from decoding to ready once more: then its decode worker is the holder.

Why a move is made, `dispatch` knows.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Literal

from router.config import RouterConfig
from router.core import lifecycle
from router.core.counters import RouterCounters
from router.core.deadlines import Deadlines
from router.core.effects import (
    ClientRequest,
    Effect,
    NewTokens,
    Outcome,
    RequestCompleted,
    RequestEnded,
    RequestFailed,
    Send,
    outcome_word,
)
from router.core.fleet import Worker
from router.core.lifecycle import Lifecycle, RequestState
from router.core.live_request import LiveRequest
from router.core.placement import Need, Placement
from router.core.prefix_index import block_names
from router.core.request_queue import RequestQueue
from shared import messages
from shared.baton import Baton
from shared.errors import InvariantError
from shared.messages import Message

Deadline = Literal["wait", "ready", "request", "renew", "pause"]


class RequestTable:
    """The requests between arrival and end. Effects are appended to `effects` in the order of their causes."""

    def __init__(self, settings: RouterConfig, counters: RouterCounters):
        self.live: dict[str, LiveRequest] = {}
        self.by_state: Counter[RequestState] = Counter()
        self.ended: OrderedDict[str, dict[str, object]] = OrderedDict()  # what /debug tells of them
        self.waiting = RequestQueue()
        self.ready = RequestQueue()
        self.deadlines: Deadlines[tuple[Deadline, str]] = Deadlines()
        self.effects: deque[Effect] = deque()
        self._settings = settings
        self._counters = counters
        self._arrivals = 0
        self._indexed = "cache_aware" in (settings.prefill_policy, settings.decode_policy)

    @property
    def before_decode(self) -> int:
        """Requests that tie up, or soon will, pages of a prefill worker."""
        return self.by_state[RequestState.PREFILLING] + self.by_state[RequestState.READY]

    def admit(self, request: ClientRequest, now: float) -> LiveRequest:
        """A new request enters the waiting line."""
        if request.rid in self.live:
            raise InvariantError(f"request {request.rid} is live already")
        self._arrivals += 1
        blocks = block_names(request.token_ids, request.extra_key) if self._indexed else ()
        live = LiveRequest(
            request=request,
            arrival=self._arrivals,
            arrived_at=now,
            lifecycle=Lifecycle(request.rid),
            need=Need(rid=request.rid, model_name=request.model, tokens=0, tokens_max=0),
            blocks=blocks,
            state_since=now,
        )
        self.live[request.rid] = live
        self.by_state[live.state] += 1
        if self._settings.request_seconds_max > 0:
            self.deadlines.set(("request", live.rid), now + self._settings.request_seconds_max)
        live.wait_until = now + self._settings.waiting_seconds_max
        self._wait(live)
        return live

    def refuse(self, request: ClientRequest, failed: RequestFailed) -> None:
        """A request that never became one."""
        self._counters.requests[str(failed.status)] += 1
        self.effects.append(RequestEnded(request.rid, failed))

    def prefill(self, live: LiveRequest, choice: Placement, now: float) -> None:
        """waiting → prefilling."""
        if live.attempt == 1 and not live.visits:
            self._counters.queue_seconds.append(now - live.arrived_at)
        self._place(live, choice, live.need.tokens - choice.hit_tokens, now)
        request = live.request
        self.send(
            choice.worker,
            messages.Prefill(
                rid=live.rid,
                attempt=live.attempt,
                token_ids=live.token_ids,
                prompt_len=len(request.token_ids),
                params=request.params,
                priority=request.priority,
                extra_key=request.extra_key,
            ),
        )

    def hold(self, live: LiveRequest, baton: Baton, now: float) -> None:
        """prefilling → ready: the pages lie on the prefill worker."""
        assert live.worker is not None, live.rid
        hello = live.worker.hello
        live.model, live.determinism = hello.model, live.determinism or hello.determinism
        self._lent(live, baton, lifecycle.Prefilled(live.worker.peer), now)

    def ask_to_move(self, live: LiveRequest, choice: Placement) -> None:
        """There is room elsewhere: reserve it, and have the pages lent."""
        assert live.worker is not None, live.rid
        live.target = choice.worker
        choice.worker.reserved[live.rid] = choice.worker.pages_for(live.need.tokens)
        self.send(live.worker, messages.Migrate(live.rid, live.attempt))

    def move(self, live: LiveRequest, baton: Baton, now: float) -> None:
        """decoding → ready: the decode worker lends the pages; where they go is decided anew."""
        assert live.worker is not None, live.rid
        live.moving = True
        self._lent(live, baton, lifecycle.Migrating(live.worker.peer), now)

    def decode(self, live: LiveRequest, choice: Placement, now: float) -> None:
        """ready → decoding."""
        assert live.baton is not None, live.rid
        self._counters.ready_seconds.append(now - live.state_since)
        self._place(live, choice, live.need.tokens, now)
        live.joined = False
        request = live.request
        self.send(
            choice.worker,
            messages.Decode(
                rid=live.rid,
                attempt=live.attempt,
                token_ids=live.token_ids,
                prompt_len=len(request.token_ids),
                params=request.params,
                baton=live.baton,
                priority=request.priority,
                extra_key=request.extra_key,
            ),
        )

    def join(self, live: LiveRequest, joined: messages.Joined, now: float) -> None:
        """The pages have arrived at the decode worker."""
        self._advance(live, lifecycle.Joined(), now)
        live.joined = True
        live.fetched_bytes += joined.fetched_bytes
        live.fetch_seconds += joined.fetch_seconds
        if joined.transport:
            live.transport, live.link_bytes_per_second = joined.transport, joined.link_bytes_per_second
        self._counters.fetched_bytes += joined.fetched_bytes
        self._counters.fetch_seconds.append(joined.fetch_seconds)
        if live.moving:
            live.moving = False
            live.moves += 1
            self._counters.migrations["migrated"] += 1
        self._end_lease(live, messages.Release(live.rid, live.attempt))

    def generate(self, live: LiveRequest, token_ids: tuple[int, ...], now: float) -> None:
        """Tokens came from the decode worker, so it must have the pages."""
        self._advance(live, lifecycle.Generated(), now)
        live.joined = True
        self._end_lease(live, messages.Release(live.rid, live.attempt))
        self.deliver(live, token_ids, now)

    def deliver(self, live: LiveRequest, token_ids: tuple[int, ...], now: float) -> None:
        """Give tokens to the client: the one place where the output grows."""
        if not token_ids:
            return
        self.effects.append(NewTokens(live.rid, len(live.output), token_ids))
        gap = now - live.token_at
        inter_token = token_ids if live.output else token_ids[1:]
        if not live.output:
            self._counters.ttft_seconds.append(now - live.arrived_at)
            gap = 0.0
        for _ in inter_token:
            self._counters.itl_seconds.append(gap / len(token_ids))
        live.output.extend(token_ids)
        live.token_at = now
        self._counters.completion_tokens += len(token_ids)

    def step_back(self, live: LiveRequest, event: lifecycle.RequestEvent, now: float) -> None:
        """The worker holds nothing of it: back into the line, with the same attempt and the same deadline."""
        self._unassign(live)
        self._advance(live, event, now)
        if live.state is RequestState.READY:
            self._get_ready(live)
        else:
            self._wait(live)

    def lose(self, live: LiveRequest, peer: str, cause: str, now: float) -> None:
        """The worker that the state waits on is gone; if it was to fetch moved pages, another one can."""
        lent = live.moving and live.worker is not None and live.holder is not None
        if lent and live.losses + 1 < self._settings.losses_max:
            live.losses += 1
            live.avoided += (peer,)
            self.step_back(live, lifecycle.MigrationTargetLost(peer, cause), now)
        else:
            self.try_again(live, lifecycle.Lost(peer, cause), now)

    def try_again(
        self,
        live: LiveRequest,
        event: lifecycle.RequestEvent,
        now: float,
        *,
        let_go: bool = False,
        counts: bool = True,
    ) -> None:
        """A new attempt from the prompt and the tokens so far; or the end, if that was one loss too many.

        `let_go`: the worker holds nothing of the old attempt any more. `counts`: as one of `losses_max`.
        """
        if (reason := live.finish_reason()) is not None:
            self.end(
                live,
                lifecycle.Finished(cause=event.cause),
                RequestCompleted(reason, live.usage),
                now,
                let_go=let_go,
            )
            return
        if counts:
            live.losses += 1
            live.avoided += (event.worker,)
        if live.losses >= self._settings.losses_max:
            message = f"The request was lost {live.losses} times on its workers and is given up."
            exhausted = lifecycle.Exhausted(event.worker, event.cause)
            self.end(
                live, exhausted, RequestFailed(500, message, code="attempts_exhausted"), now, let_go=let_go
            )
            return
        self._counters.continuations[event.cause] += 1
        if live.moving:
            live.moving = False
            self._counters.migrations["recomputed"] += 1
        self._let_go(live, told=let_go)
        self._advance(live, event, now)
        live.attempt += 1
        patience = self._settings.worker_return_seconds if live.output else self._settings.waiting_seconds_max
        live.wait_until = now + patience
        self._wait(live)

    def end(
        self,
        live: LiveRequest,
        event: lifecycle.RequestEvent,
        outcome: Outcome,
        now: float,
        *,
        let_go: bool = False,
    ) -> None:
        """The last move of a request; whoever still works on it or holds its pages is told, unless it has `let_go`."""
        self._let_go(live, told=let_go)
        self._advance(live, event, now)
        self.deadlines.clear(("request", live.rid))
        del self.live[live.rid]
        self.by_state[live.state] -= 1
        self.ended.pop(live.rid, None)
        self.ended[live.rid] = live.debug()
        while len(self.ended) > self._settings.ended_requests_max:
            self.ended.popitem(last=False)
        self._counters.requests[outcome_word(outcome)] += 1
        self._counters.request_seconds.append(now - live.arrived_at)
        self.effects.append(RequestEnded(live.rid, outcome))

    def renew(self, live: LiveRequest, now: float) -> None:
        """Keep the lease for another while."""
        if live.holder is not None:
            self.send(live.holder, messages.Renew(live.rid, live.attempt))
            self.deadlines.set(("renew", live.rid), now + self._settings.renew_seconds)

    def forget_lease(self, live: LiveRequest) -> None:
        """The holder has given the pages up, or is gone."""
        if live.holder is not None:
            live.holder.leases.pop(live.rid)
            live.holder = live.baton = None
            self.deadlines.clear(("renew", live.rid))

    def forget_target(self, live: LiveRequest) -> None:
        """No room is kept for it anywhere."""
        if live.target is not None:
            del live.target.reserved[live.rid]
            live.target = None

    def send(self, worker: Worker, message: Message) -> None:
        """To a worker that is gone there is nothing to say."""
        if worker.up:
            self.effects.append(Send(worker.peer, message))

    # ---- what the moves are made of ----------------------------------------------------------------------------

    def _advance(self, live: LiveRequest, event: lifecycle.RequestEvent, now: float) -> None:
        before = live.state
        if live.lifecycle.advance(event) is not before:
            spent = live.seconds.get(before.value, 0.0) + now - live.state_since
            live.seconds[before.value] = spent
            live.state_since = now
            self.by_state[before] -= 1
            self.by_state[live.state] += 1
        self._counters.transitions[f"{before.value} {type(event).__name__}"] += 1

    def _place(self, live: LiveRequest, choice: Placement, tokens: int, now: float) -> None:
        worker = choice.worker
        self._leave_line(live)
        self._advance(live, lifecycle.Placed(worker.peer, choice.why), now)
        worker.assign(live.rid, tokens, worker.pages_for(live.need.tokens))
        worker.prefixes.insert(live.need.blocks)
        live.worker = worker
        live.visit(worker, choice.why, now)

    def _lent(self, live: LiveRequest, baton: Baton, event: lifecycle.RequestEvent, now: float) -> None:
        """Its worker has let go of it, and keeps its pages under a lease that wants renewal."""
        worker = live.worker
        assert worker is not None, live.rid
        self._advance(live, event, now)
        self._unassign(live)
        live.holder, live.baton = worker, baton
        worker.leases[live.rid] = None
        live.ready_until = now + self._settings.ready_seconds_max
        self.deadlines.set(("renew", live.rid), now + self._settings.renew_seconds)
        self._get_ready(live)

    def _wait(self, live: LiveRequest) -> None:
        live.refresh_need()
        self.waiting.enter(live)
        self.deadlines.set(("wait", live.rid), live.wait_until)

    def _get_ready(self, live: LiveRequest) -> None:
        live.refresh_need()
        self.ready.enter(live)
        self.deadlines.set(("ready", live.rid), live.ready_until)

    def _leave_line(self, live: LiveRequest) -> None:
        if live.state is RequestState.WAITING:
            self.waiting.leave(live)
            self.deadlines.clear(("wait", live.rid))
        elif live.state is RequestState.READY:
            self.ready.leave(live)
            self.deadlines.clear(("ready", live.rid))

    def _let_go(self, live: LiveRequest, *, told: bool) -> None:
        """Leave line, worker and lease; `told`: the worker knows by itself."""
        self._leave_line(live)
        if live.worker is not None:
            if not told:
                self.send(live.worker, messages.Cancel(live.rid, live.attempt))
            self._unassign(live)
        self._end_lease(live, messages.Cancel(live.rid, live.attempt))

    def _unassign(self, live: LiveRequest) -> None:
        assert live.worker is not None, live.rid
        live.worker.unassign(live.rid)
        live.worker = None
        self.forget_target(live)

    def _end_lease(self, live: LiveRequest, message: messages.Release | messages.Cancel) -> None:
        if live.holder is not None:
            self.send(live.holder, message)
            self.forget_lease(live)
