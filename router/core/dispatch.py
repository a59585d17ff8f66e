"""The router's core: what each input means, and who waits for which worker.

Takes requests of clients, events of links and the time; gives effects. It has no clock, I/O, threads or chance of
its own: the same inputs give the same effects. The moves of a request are in `request_table`, the choice of a
worker in `placement`, the table in `lifecycle`.

Every input ends with a placement pass if it may have freed room or brought work: ready requests first, for they
tie up pages. Within a group of requests that compete for the same workers nobody overtakes, so that a large request
is not passed by small ones for ever.

A message is taken only from the worker that the request's state waits on, and only for its attempt; all others are
dropped and counted in one place, `_recipient`. What remains may be trusted to fit the table.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from router.config import RouterConfig
from router.core import lifecycle, placement
from router.core.admission import refusal
from router.core.counters import RouterCounters
from router.core.effects import ClientRequest, Effect, RequestAborted, RequestCompleted, RequestFailed
from router.core.fleet import Fleet, Worker
from router.core.lifecycle import RequestState
from router.core.live_request import LiveRequest
from router.core.request_queue import RequestQueue
from router.core.request_table import RequestTable
from shared import messages
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.messages import Message

log = structlog.get_logger(__name__)

AboutRequest = (
    messages.Prefilled
    | messages.Joined
    | messages.Row
    | messages.Migrating
    | messages.Finished
    | messages.Refused
)

EXPECTED: dict[RequestState, tuple[type, ...]] = {
    RequestState.PREFILLING: (messages.Prefilled, messages.Refused),
    RequestState.READY: (messages.Refused,),
    RequestState.DECODING: (
        messages.Joined,
        messages.Row,
        messages.Migrating,
        messages.Finished,
        messages.Refused,
    ),
}


class RouterCore:
    """Requests in, effects out; see the head of this file. `now` never decreases, in seconds."""

    def __init__(self, settings: RouterConfig, now: float):
        self.settings = settings
        self.counters = RouterCounters()
        self.fleet = Fleet(settings.prefix_blocks_max, (settings.model_name,))
        self._requests = RequestTable(settings, self.counters)
        self._now = now
        self._placeable = False  # something happened that may let a request be placed

    # ---- inputs ------------------------------------------------------------------------------------------------

    def submit(self, request: ClientRequest, now: float) -> None:
        """A client's request; the answer, also a refusal, comes as effects."""
        failed = refusal(request, self.fleet, len(self._requests.waiting), self.settings)
        if failed is not None:
            self._requests.refuse(request, failed)
            return
        self._requests.admit(request, now)
        self.counters.prompt_tokens += len(request.token_ids)
        self._placeable = True
        self._settle(now)

    def cancel(self, rid: str, now: float) -> None:
        """The client has gone."""
        live = self._requests.live.get(rid)
        if live is not None:
            self._requests.end(live, lifecycle.Cancelled(), RequestAborted(), now)
            self._placeable = True
        self._settle(now)

    def stop(self, rid: str, now: float) -> None:
        """A stop string was found in the text: the request is complete."""
        live = self._requests.live.get(rid)
        if live is not None:
            self._requests.end(live, lifecycle.Stopped(), RequestCompleted("stop", live.usage), now)
            self._placeable = True
        self._settle(now)

    def link(self, event: LinkEvent, now: float) -> None:
        """A worker came, went or said something."""
        match event:
            case PeerUp():
                self._peer_down(PeerDown(event.peer, "a new session began"), now)
                self._peer_up(event)
            case PeerDown():
                self._peer_down(event, now)
            case Received():
                self._received(event.peer, event.message, now)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Time has passed: act on every deadline that is due."""
        for kind, name in self._requests.deadlines.due(now):
            if kind == "pause":
                self._placeable = True
            elif kind == "renew":
                self._requests.renew(self._requests.live[name], now)
            else:
                self._expire(self._requests.live[name], kind, now)
        self._settle(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the latest; None: nothing."""
        return self._requests.deadlines.next()

    # ---- outputs -----------------------------------------------------------------------------------------------

    def drain(self) -> list[Effect]:
        """The effects since the last call, to be carried out in order."""
        effects = list(self._requests.effects)
        self._requests.effects.clear()
        return effects

    def debug(self, rid: str) -> dict[str, object] | None:
        """What became of a request, live or lately ended; None: not known (any more)."""
        live = self._requests.live.get(rid)
        return live.debug() if live is not None else self._requests.ended.get(rid)

    @property
    def requests_by_state(self) -> dict[str, int]:
        """How many live requests are in each state."""
        return {
            state.value: self._requests.by_state[state]
            for state in RequestState
            if state not in lifecycle.ENDED
        }

    # ---- workers -----------------------------------------------------------------------------------------------

    def _peer_up(self, event: PeerUp) -> None:
        worker = self.fleet.up(event.peer, event.hello)
        if isinstance(worker, str):
            self.counters.workers_refused[worker] += 1
            log.warning("worker refused", worker=event.peer, cause=worker)
            return
        if not self.fleet.paired(worker):
            others = len({other.hello.role for other in self.fleet.workers.values()}) > 1
            told = log.warning if others else log.info  # alone, it is only the first to come
            told(
                "worker has no counterpart of equal model and KV format: it cannot serve",
                worker=event.peer,
                model=event.hello.model,
                kv_format=event.hello.kv_format,
            )
        self._placeable = True

    def _peer_down(self, event: PeerDown, now: float) -> None:
        worker = self.fleet.down(event.peer)
        if worker is None:
            return
        self._requests.deadlines.clear(("pause", event.peer))
        for rid in list(worker.reserved):
            self._requests.forget_target(self._requests.live[rid])
        cause = f"lost_{worker.hello.role}"
        for rid in [*worker.assigned, *worker.leases]:
            live = self._requests.live[rid]
            if live.waits_on is worker:
                self._requests.lose(live, event.peer, cause, now)
            else:  # the decode worker will find out by itself whether it has all pages
                self._requests.forget_lease(live)
        self._placeable = True

    def _leaving(self, worker: Worker) -> None:
        self.fleet.leave(worker)
        self._requests.send(worker, messages.DrainAck())
        self._placeable = True
        log.info(
            "worker leaves", worker=worker.peer, requests=len(worker.assigned), leases=len(worker.leases)
        )

    def _pause(self, worker: Worker, now: float) -> None:
        worker.paused_until = now + self.settings.no_room_seconds
        self._requests.deadlines.set(("pause", worker.peer), worker.paused_until)

    # ---- messages ----------------------------------------------------------------------------------------------

    def _received(self, peer: str, message: Message, now: float) -> None:
        worker = self.fleet.workers.get(peer)
        if worker is None:
            self.counters.dropped_messages["unknown_worker"] += 1
        elif isinstance(message, messages.Load):
            worker.report(message)
            self._placeable = True
        elif isinstance(message, messages.Draining):
            self._leaving(worker)
        elif isinstance(message, messages.Generated):
            for row in message.rows:
                self._take(worker, row, now)
        elif isinstance(message, AboutRequest):
            self._take(worker, message, now)
        else:
            self.counters.dropped_messages["unexpected"] += 1

    def _take(self, worker: Worker, message: AboutRequest, now: float) -> None:
        live = self._recipient(worker, message)
        if live is None:
            return
        self._placeable |= worker.leaving  # it may be able to move now
        match message:
            case messages.Prefilled():
                self._prefilled(live, worker, message, now)
            case messages.Joined():
                self._requests.join(live, message, now)
            case messages.Row():
                self._generated(live, worker, message, now)
            case messages.Migrating():
                self._moving(live, worker, message, now)
            case messages.Finished():
                self._finished(live, worker, message, now)
            case messages.Refused():
                self._refused(live, worker, message, now)

    def _recipient(self, worker: Worker, message: AboutRequest) -> LiveRequest | None:
        """The request that still waits for this message of this worker: the one place where others are dropped."""
        live = self._requests.live.get(message.rid)
        if live is None:
            cause = "ended"
        elif message.attempt != live.attempt:
            cause = "old_attempt"
        elif live.waits_on is not worker:
            cause = "other_worker"
        elif not isinstance(message, EXPECTED.get(live.state, ())):
            cause = "unexpected"
        else:
            return live
        self.counters.dropped_messages[cause] += 1
        return None

    def _prefilled(self, live: LiveRequest, worker: Worker, message: messages.Prefilled, now: float) -> None:
        if message.index != len(live.output) or not message.token_ids:
            self._requests.try_again(live, lifecycle.Lost(worker.peer, "gap"), now)
            return
        if live.cached_tokens is None:
            live.cached_tokens = message.cached_tokens
            self.counters.cached_tokens += message.cached_tokens
        self.counters.prefill_queue_seconds.append(message.queue_seconds)
        self.counters.prefill_compute_seconds.append(message.compute_seconds)
        self._requests.deliver(live, message.token_ids, now)
        reason = message.finish or live.finish_reason()
        if reason is not None:
            finished = lifecycle.Finished(worker.peer)
            done = RequestCompleted(reason, live.usage)
            self._requests.end(live, finished, done, now, let_go=message.baton is None)
        elif message.baton is None:
            self._requests.try_again(live, lifecycle.Lost(worker.peer, "no_baton"), now, let_go=True)
        else:
            self._requests.hold(live, message.baton, now)
        self._placeable = True

    def _generated(self, live: LiveRequest, worker: Worker, row: messages.Row, now: float) -> None:
        known = len(live.output) - row.index
        if known < 0:
            self._requests.try_again(live, lifecycle.Lost(worker.peer, "gap"), now)
            self._placeable = True
        elif known >= len(row.token_ids):
            self.counters.dropped_messages["repeat"] += 1
        else:
            self._requests.generate(live, row.token_ids[known:], now)

    def _moving(self, live: LiveRequest, worker: Worker, message: messages.Migrating, now: float) -> None:
        if message.output_len != len(live.output):
            self._requests.try_again(live, lifecycle.Lost(worker.peer, "gap"), now)
        else:
            self._requests.move(live, message.baton, now)
        self._placeable = True

    def _finished(self, live: LiveRequest, worker: Worker, message: messages.Finished, now: float) -> None:
        live.retractions = message.retractions
        if message.output_len > len(live.output):
            self._requests.try_again(live, lifecycle.Lost(worker.peer, "gap"), now, let_go=True)
        else:
            finished = lifecycle.Finished(worker.peer)
            self._requests.end(live, finished, RequestCompleted(message.reason, live.usage), now, let_go=True)
        self._placeable = True

    def _refused(self, live: LiveRequest, worker: Worker, message: messages.Refused, now: float) -> None:
        self.counters.refusals[message.reason] += 1
        self._placeable = True
        again = self._requests.try_again
        if live.state is RequestState.READY:
            self.counters.stale_batons["lease_ended"] += 1
            self._requests.forget_lease(live)
            again(live, lifecycle.LeaseEnded(worker.peer, "lease_ended"), now)
        elif message.reason == "too_long":
            failed = RequestFailed(
                400, "The request is too long for its worker.", code="context_length_exceeded"
            )
            self._requests.end(live, lifecycle.Rejected(worker.peer), failed, now, let_go=True)
        elif live.state is RequestState.DECODING and live.joined:
            # Sent back for lack of memory, not lost. It cannot go on for ever: each attempt has brought a token.
            again(live, lifecycle.Lost(worker.peer, "retracted"), now, let_go=True, counts=False)
        elif message.reason == "no_room" and (
            live.state is RequestState.PREFILLING or live.holder is not None
        ):
            self._pause(worker, now)
            self._requests.step_back(live, lifecycle.NoRoom(worker.peer), now)
        elif live.state is RequestState.DECODING and message.reason in ("stale", "unreachable"):
            self.counters.stale_batons[message.reason] += 1
            again(live, lifecycle.Stale(worker.peer, message.reason), now, let_go=True)
        else:
            again(live, lifecycle.Lost(worker.peer, message.reason), now, let_go=True)

    # ---- time --------------------------------------------------------------------------------------------------

    def _expire(self, live: LiveRequest, kind: str, now: float) -> None:
        retry = self.settings.retry_after_seconds
        if kind == "request":
            seconds = self.settings.request_seconds_max
            failed = RequestFailed(
                504, f"The request took longer than {seconds:g} s.", code="request_timeout"
            )
        elif kind == "ready" and live.moving:
            assert live.holder is not None, live.rid
            self._requests.try_again(live, lifecycle.LeaseEnded(live.holder.peer, "no_room"), now)
            self._placeable = True
            return
        elif kind == "ready":
            seconds = self.settings.ready_seconds_max
            message = f"No decode worker had room within {seconds:g} s. Try again later."
            failed = RequestFailed(503, message, retry, code="no_worker")
        else:
            seconds = now - live.state_since
            nobody = " or ".join(self.fleet.missing)
            why = f"There was no {nobody} worker for" if nobody else "No worker took the request within"
            message = f"{why} {seconds:g} s. Try again later."
            failed = RequestFailed(503, message, retry, code="no_worker")
        self._requests.end(live, lifecycle.Expired(cause=kind), failed, now)
        self._placeable = True

    # ---- placement ---------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        assert now >= self._now, (now, self._now)
        self._now = now
        if self._placeable:
            self._placeable = False
            self._serve(self._requests.ready, self._to_decode, now)
            self._serve(self._requests.waiting, self._to_prefill, now)
            self._empty_the_leaving(now)

    def _serve(self, line: RequestQueue, place: Callable[[LiveRequest, float], bool], now: float) -> None:
        """Go down the line; behind one that waits for room, those that want the same room wait as well."""
        blocked: set[tuple[str, str, str]] = set()
        for live in line.in_order():
            if live.need.group not in blocked and not place(live, now):
                blocked.add(live.need.group)

    def _to_prefill(self, live: LiveRequest, now: float) -> bool:
        if self._requests.before_decode >= self.settings.ready_max:
            return False
        workers = placement.prefill_workers(live.need, self.fleet)
        choice = placement.place_prefill(live.need, workers, self.settings, now)
        if choice is not None:
            self.fleet.chosen(choice.worker)
            self._requests.prefill(live, choice, now)
        return choice is not None or not workers

    def _to_decode(self, live: LiveRequest, now: float) -> bool:
        workers = placement.decode_workers(live.need, self.fleet)
        choice = placement.place_decode(live.need, workers, self.settings, now)
        if choice is not None:
            self.fleet.chosen(choice.worker)
            self._requests.decode(live, choice, now)
        return choice is not None or not workers

    def _empty_the_leaving(self, now: float) -> None:
        """Requests move from workers that leave as far as others have room; nobody else waits for that room."""
        for worker in [worker for worker in self.fleet.role("decode") if worker.leaving]:
            for live in [self._requests.live[rid] for rid in worker.assigned]:
                if live.joined and live.target is None:
                    live.refresh_need()
                    workers = placement.decode_workers(live.need, self.fleet)
                    choice = placement.place_decode(live.need, workers, self.settings, now)
                    if choice is not None:  # one that fits nowhere stands in no other's way
                        self._requests.ask_to_move(live, choice)
