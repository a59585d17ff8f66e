"""What a worker's message about a request means, by the request's state.

A message is taken only from the worker that the request's state waits on, and only for its attempt; all others are
dropped and counted in one place, `_recipient`. What remains fits the table of states. A message that skips tokens,
brings more than were asked for, or names pages that cannot be this request's (`unsound_baton`) cannot be trusted: none
of it is delivered, and the request counts as lost there and is tried again.
"""

from __future__ import annotations

from functools import partial

from router.config import RouterConfig
from router.core.counters import RouterCounters
from router.core.effects import RequestCompleted, RequestFailed
from router.core.fleet.prompt_seconds import PromptSeconds
from router.core.fleet.unreachable_pairs import UnreachablePairs
from router.core.fleet.worker import Worker
from router.core.queueing.backpressure import Backpressure
from router.core.requests.lifecycle import RequestEvent, RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_table import RequestTable
from router.core.requests.reservations import Reservations
from router.core.requests.sampling_group import PATIENCE_SECONDS
from router.core.worker_events.silent_workers import SilentWorkers
from shared.kv.page_pool import pages_for_tokens
from shared.wire import messages
from shared.wire.baton import Baton
from shared.wire.messages import FinishReason

AboutRequest = (
    messages.Prefilled
    | messages.Scored
    | messages.Joined
    | messages.Row
    | messages.Migrating
    | messages.Finished
    | messages.Refused
    | messages.Failed
    | messages.Paused
)

SHARED_CACHE_ROUNDING = 128  # tokens; OpenAI's own figure is rounded so

FETCHES_MAX = 2  # workers that try to fetch the same pages, if the first cannot

EXPECTED: dict[RequestState, tuple[type, ...]] = {
    RequestState.PREFILLING: (messages.Scored, messages.Prefilled, messages.Refused, messages.Failed),
    RequestState.EXTENDING: (messages.Scored, messages.Prefilled, messages.Refused, messages.Failed),
    RequestState.READY: (messages.Refused,),
    RequestState.DECODING: (
        messages.Joined,
        messages.Row,
        messages.Migrating,
        messages.Finished,
        messages.Refused,
        messages.Failed,
        messages.Paused,
    ),
}


class WorkerReplies:
    """Takes each message to the step of `RequestTable` that it means. `now` in seconds."""

    def __init__(
        self,
        settings: RouterConfig,
        requests: RequestTable,
        reservations: Reservations,
        backpressure: Backpressure,
        unreachable_pairs: UnreachablePairs,
        silent_workers: SilentWorkers,
        prompt_seconds: PromptSeconds,
        counters: RouterCounters,
    ):
        self._settings = settings
        self._backpressure = backpressure
        self._unreachable_pairs = unreachable_pairs
        self._silent_workers = silent_workers
        self._prompt_seconds = prompt_seconds
        self._requests = requests
        self._reservations = reservations
        self._counters = counters
        self.recipient: LiveRequest | None = None  # that the last message was about

    def take(self, worker: Worker, message: AboutRequest, now: float) -> bool:
        """Act on a message; returns whether a request may be placed now that could not be before."""
        live = self.recipient = self._recipient(worker, message)
        if live is None:
            return False
        had_joined, reopened, before = live.joined, False, live.state
        live.heard_at = now
        match message:
            case messages.Row():  # by far the most frequent first
                self._generated(live, worker, message, now)
            case messages.Prefilled():
                self._prefilled(live, worker, message, now)
            case messages.Scored():
                self._scored(live, worker, message, now)
            case messages.Joined():
                reopened = self._joined(live, worker, message, now)
            case messages.Migrating():
                self._migrating(live, worker, message, now)
            case messages.Finished():
                self._finished(live, worker, message, now)
            case messages.Refused():
                self._refused(live, worker, message, now)
            case messages.Failed():
                self._reject(
                    live, worker, RequestFailed(message.status, message.message, code=message.code), now
                )
        may_migrate_now = worker.draining and live.joined and not had_joined
        return (
            live.state is not RequestState.DECODING or live.state is not before or may_migrate_now or reopened
        )

    def paused(self, worker: Worker, message: messages.Paused, now: float) -> None:
        """The worker keeps a request that does not run for now. Retraction is the only cause that there is yet."""
        live = self.recipient = self._recipient(worker, message)
        if live is not None:
            live.heard_at, live.held_up_by = now, "retracted"

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
        self._counters.dropped_messages[cause] += 1
        return None

    def _prefilled(self, live: LiveRequest, worker: Worker, message: messages.Prefilled, now: float) -> None:
        whole = message.token_ids and _has_logprobs(live, message) and not live.unscored
        if message.index != len(live.output) or not whole:
            self._lost(live, worker, "gap", now)
            return
        if _exceeds(live, message):
            self._lost(live, worker, "surplus", now)
            return
        output_len = message.index + len(message.token_ids)
        if message.baton is not None and not self._is_sound(message.baton, live, worker, output_len, now):
            return
        self._reservations.waiting.served(live)
        self._silent_workers.answered(live, worker, message.cached_tokens)
        self._computed(live, worker, now)
        if live.cached_tokens is None:
            live.cached_tokens = self._reported(message.cached_tokens)
            self._counters.cached_tokens += min(message.cached_tokens, live.request.charged_tokens)
        self._reservations.correct_index(live, message.cached_tokens, fetched=False)
        self._requests.deliver(live, message.token_ids, message.logprobs, now)
        reason = message.finish or live.finish_reason()
        if reason is not None:
            self._complete(live, worker, reason, now, worker_has_released=message.baton is None)
        elif live.state is RequestState.EXTENDING and message.baton is not None:
            self._requests.migrate(live, message.baton, now)
        elif live.state is RequestState.EXTENDING:
            self._requests.go_on(live, now)
        elif message.baton is None:
            self._lost(live, worker, "no_baton", now, worker_has_released=True)
        else:
            self._requests.hold(live, message.baton, now)

    def _scored(self, live: LiveRequest, worker: Worker, message: messages.Scored, now: float) -> None:
        known = live.scored_len - message.index
        end = message.index + len(message.logprobs)
        if known < 0 or not live.unscored or end > len(live.request.token_ids):
            self._lost(live, worker, "gap", now)
        elif end <= live.scored_len:
            self._counters.dropped_messages["repeat"] += 1
        else:
            self._requests.score(live, message.logprobs[known:])

    def _computed(self, live: LiveRequest, worker: Worker, now: float) -> None:
        """The worker has the prompt. When siblings of the request have waited long enough for it they go anywhere."""
        at_prefill = live.state is RequestState.PREFILLING
        self._backpressure.computed(now - live.state_since, at_prefill=at_prefill)
        group = live.sampling_group
        if group is None:
            return
        group.computed(worker, now)
        self._reservations.deadlines.set(("pause", group.name), now + PATIENCE_SECONDS)

    def _joined(self, live: LiveRequest, worker: Worker, message: messages.Joined, now: float) -> bool:
        """Returns whether a pair of workers was taken for apart until now."""
        reopened = live.holder is not None and self._unreachable_pairs.fetched(live.holder, worker)
        tokens, sent_at = live.need.tokens - message.cached_tokens, worker.assigned[live.rid].sent_at
        is_one_of_many = live.migrating and live.migration_cause == "drain"  # each waits for those before it
        if not is_one_of_many:
            self._prompt_seconds.observe_fetch(worker.kv_group, tokens, now - sent_at, now)
        self._reservations.correct_index(live, message.cached_tokens, fetched=True)
        self._requests.join(live, message, now)
        return reopened

    def _generated(self, live: LiveRequest, worker: Worker, row: messages.Row, now: float) -> None:
        known = len(live.output) - row.index
        if known < 0 or not _has_logprobs(live, row):
            self._lost(live, worker, "gap", now)
        elif known >= len(row.token_ids):
            self._counters.dropped_messages["repeat"] += 1
        elif _exceeds(live, row):
            self._lost(live, worker, "surplus", now)
        else:
            if not live.answered:
                self._silent_workers.answered(live, worker)
            self._requests.generate(live, row.token_ids[known:], row.logprobs[known:], now)

    def _migrating(self, live: LiveRequest, worker: Worker, message: messages.Migrating, now: float) -> None:
        if message.output_len != len(live.output):
            self._lost(live, worker, "gap", now)
        elif self._is_sound(message.baton, live, worker, message.output_len, now):
            self._requests.migrate(live, message.baton, now)

    def _finished(self, live: LiveRequest, worker: Worker, message: messages.Finished, now: float) -> None:
        live.retractions += message.retractions
        if message.output_len > len(live.output):
            self._lost(live, worker, "gap", now, worker_has_released=True)
        else:
            self._complete(live, worker, message.reason, now, worker_has_released=True)

    def _refused(self, live: LiveRequest, worker: Worker, message: messages.Refused, now: float) -> None:
        self._counters.refusals[message.reason] += 1
        again = partial(self._requests.try_again, live, now=now, peer=worker.peer)
        # A lease that ends while its request waits for room is no loss. Pages that are stale at once are one: a worker
        # that says so of all that it is offered would have prompts computed for ever.
        has_waited = now - live.state_since >= self._settings.ready_seconds
        if live.state is RequestState.READY:
            self._counters.stale_batons["lease_ended"] += 1
            self._reservations.forget_lease(live)
            again(RequestEvent.LEASE_ENDED, cause="lease_ended", counts=not has_waited)
        elif message.reason == "too_long":
            failed = RequestFailed(
                400, "The request is too long for its worker.", code="context_length_exceeded"
            )
            self._reject(live, worker, failed, now)
        elif live.state is RequestState.DECODING and live.joined:
            # Returned for lack of memory, not lost. This ends: each attempt has brought a token.
            live.retractions += 1
            again(RequestEvent.LOST, cause="retracted", worker_has_released=True, counts=False)
        elif message.reason == "no_room" and (
            live.state in (RequestState.PREFILLING, RequestState.EXTENDING) or live.holder is not None
        ):
            self._pause(worker, live, now)
            if live.state is not RequestState.PREFILLING:
                worker.refused.add(live.tenant.name, worker.load_number)
            self._backpressure.refused(live)
            self._requests.requeue(live, RequestEvent.NO_ROOM, now, peer=worker.peer)
        elif live.state is RequestState.DECODING and message.reason == "unreachable":
            self._unreachable(live, worker, now)
        elif live.state is RequestState.DECODING and message.reason == "stale":
            self._counters.stale_batons["stale"] += 1
            again(RequestEvent.STALE, cause="stale", worker_has_released=True, counts=not has_waited)
        else:
            again(RequestEvent.LOST, cause=message.reason, worker_has_released=True)

    def _reject(self, live: LiveRequest, worker: Worker, failed: RequestFailed, now: float) -> None:
        self._requests.end(
            live, RequestEvent.REJECTED, failed, now, peer=worker.peer, worker_has_released=True
        )

    def _unreachable(self, live: LiveRequest, worker: Worker, now: float) -> None:
        """The worker cannot fetch the pages, although their holder is up. Another one may try once."""
        self._counters.stale_batons["unreachable"] += 1
        if live.holder is not None:
            self._unreachable_pairs.failed(live.holder, worker, now)
            pair = f"{live.holder.peer} {worker.peer}"
            self._reservations.deadlines.set(("pause", pair), now + self._settings.unreachable_seconds)
            live.unread_by += (worker.peer,)
            if len(live.unread_by) < FETCHES_MAX:
                self._requests.requeue(live, RequestEvent.UNREACHABLE, now, peer=worker.peer)
                return
        self._requests.reroute(live, RequestEvent.STALE, now, peer=worker.peer)

    def _is_sound(self, baton: Baton, live: LiveRequest, worker: Worker, output_len: int, now: float) -> bool:
        """Whether the baton can be this request's; if not, the request is lost at the worker."""
        if why := unsound_baton(baton, live, worker, output_len):
            self._reservations.note("fleet.unsound_baton", worker, live, why)
            self._lost(live, worker, "baton", now)
            return False
        worker.kv_metadata = baton.holder.metadata
        return True

    def _lost(
        self, live: LiveRequest, worker: Worker, cause: str, now: float, *, worker_has_released: bool = False
    ) -> None:
        """The worker's messages skip something."""
        self._requests.try_again(
            live,
            RequestEvent.LOST,
            now,
            peer=worker.peer,
            cause=cause,
            worker_has_released=worker_has_released,
        )

    def _complete(
        self,
        live: LiveRequest,
        worker: Worker,
        reason: FinishReason,
        now: float,
        *,
        worker_has_released: bool,
    ) -> None:
        self._requests.end(
            live,
            RequestEvent.FINISHED,
            RequestCompleted(reason, live.usage),
            now,
            peer=worker.peer,
            worker_has_released=worker_has_released,
        )

    def _reported(self, cached_tokens: int) -> int:
        """What a client sees of the cache. Where tenants share it, an exact figure would tell what others sent."""
        if self._settings.share_prefix_cache:
            return cached_tokens - cached_tokens % SHARED_CACHE_ROUNDING
        return cached_tokens

    def _pause(self, worker: Worker, live: LiveRequest, now: float) -> None:
        pages = worker.assigned[live.rid].pages
        worker.pause(pages, now + self._settings.no_room_seconds, now)
        self._reservations.deadlines.set(("pause", worker.peer), worker.paused_until)


def _exceeds(live: LiveRequest, tokens: messages.Prefilled | messages.Row) -> bool:
    """Whether the tokens are more than the request has asked for: its tenant would pay for them."""
    return tokens.index + len(tokens.token_ids) > live.request.params.max_new_tokens


def _has_logprobs(live: LiveRequest, tokens: messages.Prefilled | messages.Row) -> bool:
    """Whether the tokens come with logprobs, if they were asked for: a worker that lost them cannot be trusted."""
    asked = live.request.params.logprobs >= 0
    return len(tokens.logprobs) == (len(tokens.token_ids) if asked else 0)


# ---- can a baton be what its sender says? ----------------------------------------------------------------------------
# A worker that names another holder, or another request's pages, would make decode workers connect to addresses of its
# choice, or blame others for pages that cannot be read; one that names another's agent would be taken for that one.
# Where a worker listens it says itself, in the metadata of its first baton: a router keeps to that for the session. It
# may well be another interface than the one that was dialed. What a baton says of memory (addresses, lease, nonce) only
# its holder knows; the worker that reads checks that it is within bounds (`shared.scheduling.sound_commands`).


# of all ranks; those of NIXL have about 1 KiB, and a router keeps one of each worker
METADATA_BYTES_MAX = 64 << 10


def unsound_baton(baton: Baton, live: LiveRequest, sender: Worker, output_len: int) -> str:
    """What is wrong with a baton that `sender` gives out for a request with `output_len` tokens; empty: nothing."""
    hello, holder = sender.hello, baton.holder
    if (holder.uid, holder.epoch) != (hello.uid, hello.epoch):
        return f"names the holder {holder.name}"
    if not holder.has_own_agent:
        return f"names the agent {holder.agent} of another holder"
    if holder.metadata_bytes > METADATA_BYTES_MAX:
        return f"has KV metadata of {holder.metadata_bytes} bytes, more than {METADATA_BYTES_MAX}"
    if sender.kv_metadata is not None and holder.metadata != sender.kv_metadata:
        return "has other KV metadata than this worker's first baton"
    if (baton.rid, baton.attempt) != (live.rid, live.attempt):
        return f"is of attempt {baton.attempt} of request {baton.rid}"
    if baton.kv_format != hello.kv_format:
        return f"has the KV format {baton.kv_format}"
    prompt_len = len(live.request.token_ids)
    kv_len = prompt_len + output_len - 1  # the KV of the last token is not computed
    if (baton.prompt_len, baton.kv_len) != (prompt_len, kv_len):
        return f"is of {baton.kv_len} tokens behind a prompt of {baton.prompt_len}, not {kv_len} and {prompt_len}"
    page_size = hello.limits.page_size
    if page_size and len(baton.pages) != pages_for_tokens(kv_len, page_size):
        return f"has {len(baton.pages)} pages for {kv_len} tokens"
    return ""
