"""All live requests, and the only steps they can take: each advances the state and all that must agree with it.

A request has a state, a place in a queue, deadlines, an assignment to a worker and a lease of its pages. They change
together in these steps and nowhere else, so that nothing stays behind (all but the state are `reservations`):

    state        queue      deadlines              worker (assigned)   holder (lease)
    waiting      waiting    wait or gone           -                   -
    prefilling   -          -                      prefill             -
    extending    -          -                      decode              -
    ready        ready      gone, late, renew      -                   prefill
    decoding     -          renew, while leased    decode              prefill, until the pages have arrived

`wait` ends with the first token, and `gone` is set only while no worker could continue the stream. A request that
migrates goes from decoding or extending to ready: then its decode worker is the holder. `dispatch` and
`worker_replies` decide which step is taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from math import inf

from router.config import RouterConfig
from router.core.counters import MigrationCause, PauseCause, RouterCounters, WayName
from router.core.effects import (
    ClientRequest,
    NewTokens,
    Outcome,
    PromptScored,
    RequestCompleted,
    RequestEnded,
    RequestFailed,
    RouterEffect,
    outcome_word,
)
from router.core.fleet.prefix_index import block_names
from router.core.fleet.worker import KvGroup, Worker
from router.core.requests.ended_requests import EndedRequests
from router.core.requests.hand_over import HandOver
from router.core.requests.lifecycle import RequestEvent, RequestState, next_state
from router.core.requests.live_request import LiveRequest
from router.core.requests.reservations import Reservations
from router.core.requests.sampling_group import SamplingGroups
from router.core.requests.tenants import Tenant, Tenants
from router.core.requests.worker_commands import decode_command, prompt_command
from router.placement_policies import Need, Placement
from shared.batch.effects import Note
from shared.primitives.errors import InvariantError
from shared.wire import messages
from shared.wire.baton import Baton
from shared.wire.messages import Prefill, Serve
from shared.wire.sampled import Logprobs

ROW_NAMES = {
    (state, event): f"{state.value} {event.value}" for state in RequestState for event in RequestEvent
}
PAUSE_SECONDS_MIN = 1.0  # between two tokens: a shorter gap is no pause
BEFORE_DECODE = (RequestState.PREFILLING, RequestState.READY)
BEGUN = (*BEFORE_DECODE, RequestState.EXTENDING)


class RequestTable:
    """The requests between arrival and end. Effects are appended to `effects` in the order of their causes."""

    def __init__(
        self,
        settings: RouterConfig,
        counters: RouterCounters,
        reservations: Reservations,
        effects: list[RouterEffect],
    ):
        self.live: dict[str, LiveRequest] = {}
        self.by_state: Counter[RequestState] = Counter()
        # By kv_group and tenant: those that tie up, or soon will, pages of prefill workers.
        self.before_decode: defaultdict[KvGroup, Counter[str]] = defaultdict(Counter)
        self.begun_whole: list[LiveRequest] = []  # since the last placement pass
        self.ended = EndedRequests(settings.ended_requests_max)
        self.tenants = Tenants(settings)
        self.sampling_groups = SamplingGroups()
        self.reservations = reservations
        self._effects = effects
        self._settings = settings
        self._counters = counters
        self._arrivals = 0
        self._indexed = bool(settings.indexed_roles)

    def admit(
        self, request: ClientRequest, now: float, target_seconds: float = 0.0, foreseen_seconds: float = 0.0
    ) -> LiveRequest:
        """A new request enters the queue of waiting ones; its first token is foreseen in so many seconds."""
        if request.rid in self.live:
            raise InvariantError(f"request {request.rid} is live already")
        self._arrivals += 1
        tenant = self.tenants.find(request.tenant, now)
        extra_key = tenant.cache_key(request.cache_salt, shared=self._settings.share_prefix_cache)
        live = LiveRequest(
            request=request,
            tenant=tenant,
            arrival=self._arrivals,
            arrived_at=now,
            head_at=request.head_at or now,
            need=Need(rid=request.rid, model_name=request.model, tokens=0, tokens_max=0),
            sampling_group=self.sampling_groups.enter(request),
            extra_key=extra_key,
            blocks=block_names(request.token_ids, extra_key) if self._indexed else (),
            state_since=now,
            target_seconds=target_seconds,
            foreseen_seconds=foreseen_seconds,
            seconds=request.seconds_before(now),
        )
        self.live[request.rid] = live
        self.tenants.enter(tenant)
        tenant.spend(request.charged_tokens, now)
        self._counters.prompt_tokens += request.charged_tokens
        self._counters.prompt_sizes.append(len(request.token_ids))
        self._count(live, live.state, 1)
        if self._settings.request_seconds_max > 0:
            self.reservations.deadlines.set(("request", live.rid), now + self._settings.request_seconds_max)
        self._wait(live, now, now + self._settings.waiting_seconds_max)
        self.reservations.enqueue(live)
        return live

    def oldest_seconds(self, now: float) -> dict[RequestState, float]:
        """How long, in each state, the request waits that has waited longest for a token or another state."""
        oldest = dict.fromkeys(self.by_state, 0.0)
        for live in self.live.values():
            since = max(live.state_since, live.token_at)
            oldest[live.state] = max(oldest.get(live.state, 0.0), now - since)
        return oldest

    def find_tenant(self, name: str, now: float) -> Tenant:
        """Whoever sends requests under this name."""
        return self.tenants.find(name, now)

    def count_before_decode(self) -> int:
        """How many requests tie up, or soon will, pages of prefill workers."""
        return sum(by_tenant.total() for by_tenant in self.before_decode.values())

    def find_ended(self, rid: str) -> dict[str, object] | None:
        """What is known of a request that ended lately; None if it is forgotten."""
        return self.ended.get(rid)

    def refuse(self, request: ClientRequest, failed: RequestFailed) -> None:
        """Answer a request that is not admitted."""
        self._counters.requests[str(failed.status)] += 1
        if failed.status == 429:
            self._counters.rejections[failed.code or ""] += 1
        self._effects.append(RequestEnded(request.rid, failed))

    def prefill(
        self, live: LiveRequest, choice: Placement[Worker], now: float, reader: Worker | None = None
    ) -> None:
        """waiting → prefilling. `reader` is the decode worker that will have room for it, as far as is known."""
        self.reservations.foresee(live, reader)
        self._note_begun(live, choice.worker, now)
        self._place(live, choice, live.need.tokens - choice.hit_tokens, now)
        self.reservations.send(choice.worker, prompt_command(Prefill, live))

    def serve(self, live: LiveRequest, choice: Placement[Worker], now: float) -> None:
        """waiting → extending: a decode worker computes the prompt and goes on with it."""
        self._note_begun(live, choice.worker, now)
        if live.sampling_group is not None:
            live.sampling_group.decodes(choice.worker)
        self.reservations.ready.charge(live, live.request.params.max_new_tokens)
        self._place(live, choice, live.need.tokens, now, RequestEvent.PLACED_WHOLE)
        missing = live.need.tokens - max(choice.hit_tokens, choice.shared_tokens)
        choice.worker.extend(live.rid, missing)
        live.joined = False
        self.reservations.send(choice.worker, prompt_command(Serve, live))

    def go_on(self, live: LiveRequest, now: float) -> None:
        """extending → decoding: the worker has computed the prompt, and decodes."""
        worker = live.worker
        assert worker is not None, live.rid
        worker.extended(live.rid)
        self._note_way(live, "decode", now)
        live.model, live.determinism = worker.hello.model, live.determinism or worker.hello.determinism
        self._advance(live, RequestEvent.PREFILLED, now, worker.peer)
        self._note_joined(live)
        self.begun_whole.append(live)

    def hold(self, live: LiveRequest, baton: Baton, now: float) -> None:
        """prefilling → ready: the pages lie on the prefill worker."""
        self._become_ready(live, baton, RequestEvent.PREFILLED, now)

    def request_migration(
        self, live: LiveRequest, choice: Placement[Worker], cause: MigrationCause = "drain"
    ) -> None:
        """Another decode worker has room: reserve it, and ask the present one to lease the pages.

        One that still computes the prompt leases them with the first token.
        """
        assert live.worker is not None, live.rid
        live.migration_cause = cause
        self.reservations.reserve_target(live, choice.worker)
        self.reservations.send(live.worker, messages.Migrate(live.rid, live.attempt))

    def migrate(self, live: LiveRequest, baton: Baton, now: float) -> None:
        """decoding or extending → ready: the decode worker leases the pages; who fetches them is chosen anew."""
        live.migrating, live.held_up_by = True, "moved"
        live.ways = None  # another worker has the prompt first
        if live.migration_cause == "balance" and live.worker is not None:
            live.move_from(live.worker, now)
        self._become_ready(live, baton, RequestEvent.MIGRATING, now)

    def decode(self, live: LiveRequest, choice: Placement[Worker], now: float) -> None:
        """ready → decoding. One that comes back to the worker that it was to leave for prompts has not left it."""
        if choice.worker is live.holder and live.migration_cause == "packed":
            live.made_room = False
        self.reservations.foresee(live, None)
        self._counters.ready_seconds.append(now - live.state_since)
        if len(live.output) == 1:
            live.hand_over = HandOver(live.token_at, now)
        if live.sampling_group is not None:
            live.sampling_group.decodes(choice.worker)
        self._place(live, choice, live.need.tokens, now)
        live.joined = False
        self.reservations.send(choice.worker, decode_command(live))

    def join(self, live: LiveRequest, joined: messages.Joined, now: float) -> None:
        """The pages have arrived at the decode worker."""
        self._advance(live, RequestEvent.JOINED, now)
        self._note_way(live, "prefill", now)
        live.fetched_bytes += joined.fetched_bytes
        live.fetch_seconds += joined.fetch_seconds
        if live.hand_over is not None:
            live.hand_over.fetch_seconds = joined.fetch_seconds
        if live.worker is not None:
            live.worker.has_fetched(live.need.tokens, joined.cached_tokens)
        if joined.transport:
            live.transport, live.link_bytes_per_second = joined.transport, joined.link_bytes_per_second
        self._counters.fetch_seconds.append(joined.fetch_seconds)
        self._effects.append(_joined_note(live, joined, now))
        if not live.migrating:
            self._counters.handoff_bytes += joined.fetched_bytes
        else:
            self._counters.migration_bytes += joined.fetched_bytes
            live.migrating = False
            live.migrations += 1
            self._counters.migrations["migrated", live.migration_cause] += 1
        self._note_joined(live)

    def generate(self, live: LiveRequest, token_ids: tuple[int, ...], logprobs: Logprobs, now: float) -> None:
        """Tokens came from the decode worker, so it must have the pages."""
        self._advance(live, RequestEvent.GENERATED, now)
        if not live.joined:
            self._note_way(live, "prefill", now)
            self._note_joined(live)
        self.deliver(live, token_ids, logprobs, now)

    def score(self, live: LiveRequest, logprobs: Logprobs) -> None:
        """Give the client the logprobs of the next tokens of its prompt."""
        self._effects.append(PromptScored(live.rid, logprobs))
        live.scored_len += len(logprobs)

    def deliver(self, live: LiveRequest, token_ids: tuple[int, ...], logprobs: Logprobs, now: float) -> None:
        """Give tokens to the client: the one place where the output grows."""
        if not token_ids:
            return
        self._effects.append(NewTokens(live.rid, len(live.output), token_ids, logprobs))
        gap = now - live.token_at
        inter_token = token_ids if live.output else token_ids[1:]
        if not live.output:
            self._note_first_token(live, now)
            gap = 0.0
        elif len(live.output) == 1:
            self._note_second_token(live, gap, now)
        for _ in inter_token:
            self._counters.itl_seconds.append(gap / len(token_ids))
        if gap > PAUSE_SECONDS_MIN:
            self._counters.paused(live.held_up_by, gap)
        live.held_up_by = "other"
        live.output.extend(token_ids)
        live.tenant.spend(len(token_ids), now)
        live.token_at = now
        self._counters.completion_tokens += len(token_ids)

    def _note_second_token(self, live: LiveRequest, gap: float, now: float) -> None:
        self._counters.second_token_seconds.append(gap)
        if live.hand_over is not None and live.worker is not None:
            live.second_token_parts = live.hand_over.parts(now, live.worker.load.step_seconds)
            for part, seconds in (live.second_token_parts or {}).items():
                self._counters.second_token_part(part, seconds)

    def requeue(
        self, live: LiveRequest, event: RequestEvent, now: float, *, peer: str, cause: str = ""
    ) -> None:
        """Put it back into its queue, with the same attempt and deadline; the worker `peer` holds nothing of it."""
        worker = live.worker
        # it did not wait meanwhile, and may find its own work in the cache
        if live.state is RequestState.EXTENDING:
            self._wait(live, now, live.wait_until + now - live.state_since)
            live.cached_tokens = live.cached_tokens or 0
        self.reservations.unassign(live)
        self._advance(live, event, now, peer, cause)
        self.reservations.foresee(live, worker if live.state is RequestState.READY else None)
        self.reservations.enqueue(live)

    def lose(self, live: LiveRequest, peer: str, cause: str, now: float) -> None:
        """The worker that the request waits on is gone. If it was to fetch migrating pages of another, a third can."""
        leased = live.migrating and live.worker is not None and live.holder not in (None, live.worker)
        self._count_loss(live, peer, now)
        if leased and live.losses < self._settings.losses_max:
            self.requeue(live, RequestEvent.MIGRATION_TARGET_LOST, now, peer=peer, cause=cause)
        else:
            self.try_again(live, RequestEvent.LOST, now, peer=peer, cause=cause, counts=False)

    def try_again(
        self,
        live: LiveRequest,
        event: RequestEvent,
        now: float,
        *,
        peer: str,
        cause: str,
        worker_has_released: bool = False,
        counts: bool = True,
    ) -> None:
        """A new attempt from the prompt and the tokens so far; or the end, if that was one loss too many.

        `peer` is the worker that failed it; `worker_has_released` says that it holds nothing of the old attempt any
        more, `counts` that this is one of `losses_max`.
        """
        end = partial(
            self.end, live, now=now, peer=peer, cause=cause, worker_has_released=worker_has_released
        )
        if (reason := live.finish_reason()) is not None:
            end(RequestEvent.FINISHED, RequestCompleted(reason, live.usage))
            return
        if counts:
            self._count_loss(live, peer, now)
        if live.losses >= self._settings.losses_max:
            message = f"The request was lost {live.losses} times on its workers and is given up."
            end(RequestEvent.EXHAUSTED, RequestFailed(500, message, code="attempts_exhausted"))
            return
        self._counters.continuations[cause] += 1
        live.held_up_by, live.hand_over = _held_up_by(cause, live), None
        if live.migrating:
            live.migrating = False
            self._counters.migrations["recomputed", live.migration_cause] += 1
        self.reservations.withdraw(live, worker_has_released)
        self._advance(live, event, now, peer, cause)
        live.attempt += 1
        self._wait(live, now, now + self._settings.waiting_seconds_max)
        self.reservations.enqueue(live)

    def reroute(self, live: LiveRequest, event: RequestEvent, now: float, *, peer: str) -> None:
        """Compute a request anew whose pages no worker could fetch, elsewhere if possible. The first time is no loss.

        `peer` is the last worker that tried; it holds nothing of it.
        """
        if live.holder is not None:
            live.avoided += (live.holder.peer,)
        counts, live.rerouted = live.rerouted, True
        self.try_again(
            live, event, now, peer=peer, cause="unreachable", worker_has_released=True, counts=counts
        )

    def end(
        self,
        live: LiveRequest,
        event: RequestEvent,
        outcome: Outcome,
        now: float,
        *,
        peer: str = "",
        cause: str = "",
        worker_has_released: bool = False,
    ) -> None:
        """The last step of a request: its worker and the holder of its pages get a `Cancel` if they still have it."""
        if live.joined:
            self.reservations.index_output(live)
        self.reservations.withdraw(live, worker_has_released)
        self._advance(live, event, now, peer, cause)
        self.reservations.close(live)
        del self.live[live.rid]
        self._count(live, live.state, -1)
        self.tenants.leave(live.tenant, now)
        self.sampling_groups.leave(live.sampling_group, live.rid)
        live.outcome = outcome_word(outcome)
        self.ended.add(live)
        self._counters.requests[live.outcome] += 1
        self._counters.request_seconds.append((now - live.head_at, live.rid))
        if live.output:
            self._counters.output_sizes.append(len(live.output))
        self._effects.append(RequestEnded(live.rid, outcome))

    # ---- what the steps are made of ----------------------------------------------------------------------------

    def _advance(
        self, live: LiveRequest, event: RequestEvent, now: float, peer: str = "", cause: str = ""
    ) -> None:
        before, after = live.state, next_state(live.state, event, live.rid)
        if before is not after:
            fields = {"rid": live.rid, "worker": peer, "cause": cause}
            fields |= {"from": before.value, "on": event.value, "to": after.value}
            self._effects.append(Note("request.state", fields, "debug"))
            spent = live.seconds.get(before.value, 0.0) + now - live.state_since
            live.seconds[before.value] = spent
            live.state, live.state_since = after, now
            self._count(live, before, -1)
            self._count(live, after, 1)
            self._count_before_decode(live, (after in BEFORE_DECODE) - (before in BEFORE_DECODE))
            if change := (after in BEGUN) - (before in BEGUN):
                live.tenant.begun[live.kv_group] += change
                live.tenant.begun = +live.tenant.begun
        self._counters.transitions[ROW_NAMES[before, event]] += 1

    def _wait(self, live: LiveRequest, now: float, until: float) -> None:
        """From `now` on it may wait to be computed until then, and no longer than its target, counted from arrival."""
        target = live.arrived_at + live.target_seconds if live.target_seconds else until
        live.wait_until = max(now, min(until, target))

    def _note_first_token(self, live: LiveRequest, now: float) -> None:
        seconds = now - live.arrived_at
        live.first_token_seconds = now - live.head_at
        self._counters.ttft_seconds.append((live.first_token_seconds, live.rid))
        if live.target_seconds:
            self._counters.targets["met" if seconds <= live.target_seconds else "missed"] += 1
        if live.foreseen_seconds:
            self._counters.ttft_foreseen.append(live.foreseen_seconds)
            self._counters.ttft_real.append(seconds)

    def _note_way(self, live: LiveRequest, way: WayName, now: float) -> None:
        """Decode has the prompt, by this way."""
        if live.ways is not None and (foreseen := getattr(live.ways, way)) < inf:
            self._counters.way(way, foreseen, now - live.begun_at)
        live.ways = None

    def _note_begun(self, live: LiveRequest, worker: Worker, now: float) -> None:
        """A worker is to compute the prompt."""
        live.begun_at = now
        if live.attempt == 1 and not live.visits:
            self._counters.queue_seconds.append(now - live.state_since)
        live.kv_group = worker.kv_group
        if live.sampling_group is not None:
            live.sampling_group.placed(live)

    def _note_joined(self, live: LiveRequest) -> None:
        """The decode worker has the pages, so their holder need not keep them."""
        live.joined = True
        self.reservations.ready.served(live)
        self.reservations.end_lease(live, messages.Release(live.rid, live.attempt))

    def _count_loss(self, live: LiveRequest, peer: str, now: float) -> None:
        live.count_loss(peer, now, self._settings.loss_seconds)
        if live.rests_until > now:
            self.reservations.deadlines.set(("rest", live.rid), live.rests_until)

    def _place(
        self,
        live: LiveRequest,
        choice: Placement[Worker],
        tokens: int,
        now: float,
        event: RequestEvent = RequestEvent.PLACED,
    ) -> None:
        self.reservations.dequeue(live)
        self._advance(live, event, now, choice.worker.peer, choice.why)
        self._counters.placements[choice.worker.hello.role, choice.reason] += 1
        self.reservations.assign(live, choice, tokens, now)

    def _become_ready(self, live: LiveRequest, baton: Baton, event: RequestEvent, now: float) -> None:
        """Make a request ready: its worker has computed its part and leases the pages; the lease must be renewed."""
        worker = live.worker
        assert worker is not None, live.rid
        live.model, live.determinism = worker.hello.model, live.determinism or worker.hello.determinism
        self._advance(live, event, now, worker.peer)
        self.reservations.unassign(live)
        self.reservations.hold_lease(live, worker, baton, now)
        if live.held_up_by == "other":
            live.held_up_by = "no_room"
        self.reservations.enqueue(live)

    def _count_before_decode(self, live: LiveRequest, change: int) -> None:
        if change:
            tenant, by_tenant = live.tenant.name, self.before_decode[live.kv_group]
            by_tenant[tenant] += change
            if not by_tenant[tenant]:
                del by_tenant[tenant]
            if not by_tenant:
                del self.before_decode[live.kv_group]

    def _count(self, live: LiveRequest, state: RequestState, change: int) -> None:
        self.by_state[state] += change
        live.tenant.by_state[state] += change


def _joined_note(live: LiveRequest, joined: messages.Joined, now: float) -> Note:
    """Whose pages a decode worker has fetched; `moved` is why they left another decode worker, or empty."""
    fields = {
        "rid": live.rid,
        "from": live.holder.peer if live.holder is not None else "",
        "worker": live.worker.peer if live.worker is not None else "",
        "bytes": joined.fetched_bytes,
        "transport": joined.transport,
        "moved": live.migration_cause if live.migrating else "",
        "pause_seconds": round(now - live.token_at, 3),
    }
    return Note("request.joined", fields, "debug")


def _held_up_by(cause: str, live: LiveRequest) -> PauseCause:
    """What holds a stream up whose attempt has ended by `cause`."""
    if cause == "retracted":
        return "retracted"
    if cause == "lease_ended":
        return "no_room"  # its holder has kept the pages for as long as it could
    if cause in ("holder_drains", "holder_full"):
        return "moved"
    worker = live.waits_on
    return "lost_prefill" if worker is not None and worker.hello.role == "prefill" else "lost_decode"
