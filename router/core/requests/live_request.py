"""One live request as the router keeps it: its tokens so far, where it is, and what /debug shows of it.

Plain mutable data; `request_table` is the only writer of its state. The output lives here and nowhere else
until the request ends: it is what a new attempt continues from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from router.core.counters import GapPart, MigrationCause, PauseCause
from router.core.effects import ClientRequest, Usage
from router.core.fleet.prompt_seconds import Ways
from router.core.fleet.worker import KvGroup, Worker
from router.core.requests.hand_over import HandOver
from router.core.requests.lifecycle import TRANSITIONS, RequestState
from router.core.requests.sampling_group import SamplingGroup
from router.core.requests.tenants import Tenant
from router.placement_policies import Need
from shared.wire.baton import Baton
from shared.wire.messages import FinishReason

FORGIVING_TOKENS = 32  # since the last loss: what is computed so far did not kill that worker
# placements, and moves, that are remembered: the last ones of a request that always comes back
VISITS_MAX = 32


@dataclass(frozen=True, slots=True)
class Visit:
    """One placement: for /debug."""

    worker: str
    role: str
    attempt: int
    why: str
    after_seconds: float  # since the request came


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between its arrival and its end."""

    request: ClientRequest
    tenant: Tenant
    arrival: int  # numbers requests in the order they came; breaks every tie
    arrived_at: float  # here: targets count from then
    head_at: float  # the head of its HTTP request: what its client waits for began then
    need: Need  # what the placement it waits for must know; renewed at each entry into a queue
    rid: str = field(init=False)
    state: RequestState = TRANSITIONS.start
    sampling_group: SamplingGroup | None = None
    extra_key: str = ""  # names its prefix caches
    blocks: tuple[bytes, ...] = ()
    starts: dict[RequestState, float] = field(default_factory=dict)  # place in each queue: `VirtualTime`
    backfilled: int = 0  # requests behind it that were placed while it found no room

    attempt: int = 1
    losses: int = 0  # events that cost it a worker, see `count_loss`
    lost_at: float = -math.inf  # when the last of them began
    lost_len: int = 0  # tokens of the output then
    rests_until: float = -math.inf  # it is placed nowhere before
    output: list[int] = field(default_factory=list)  # delivered, across attempts
    scored_len: int = 1  # tokens of the prompt whose logprobs need not come any more; the first has none
    worker: Worker | None = None  # it works on this attempt: set in prefilling and decoding
    holder: Worker | None = None  # worker that leases the pages to this attempt
    foreseen_at: Worker | None = None  # decode worker that will have pages for it; until it is sent there
    target: Worker | None = None  # where room is reserved for it: its migration was requested
    made_room: bool = False  # it was asked to leave a worker for the prompts there, which it is once
    migration_cause: MigrationCause = "drain"  # of the last migration that was asked for
    moved_from: tuple[tuple[str, float], ...] = ()  # workers that it left for balance, and when
    migrating: bool = False  # its decode worker leases its pages, and no other has them yet
    baton: Baton | None = None
    kv_group: KvGroup = ("", "")  # of the prefill worker of this attempt
    model: str = ""  # fingerprint of the worker that sampled the first token
    determinism: str = ""
    avoided: tuple[str, ...] = ()  # peers that lost an attempt; at most two for each loss, and one more
    unread_by: tuple[str, ...] = ()  # peers that could not fetch its pages from their present holder
    rerouted: bool = False  # it was computed again because nobody could fetch its pages; that is no loss once
    hand_over: HandOver | None = None  # the last one before the second token
    second_token_parts: Mapping[GapPart, float] | None = None  # of the gap before the second token
    joined: bool = False  # the decode worker of this attempt has the pages
    answered: bool = False  # the worker of this attempt has said its first token or row
    heard_at: float = 0.0  # when its worker last reported something of it
    target_seconds: float = 0.0  # from arrival to its first token; 0.0: none
    foreseen_seconds: float = 0.0  # … that were expected when it came; 0.0: not known
    wait_until: float = 0.0  # until its first token; survives a refusal for lack of room
    worth_at: float = math.inf  # when a worker with a turn gets its prompt, although another has it sooner
    ways: Ways | None = None  # foreseen as its prompt was last placed; None: its ways were not compared
    begun_at: float = 0.0  # when its prompt was last placed
    fleet_looked_at: int = -1  # `Fleet.changes` when it was last asked whether a worker could continue it

    state_since: float = 0.0
    token_at: float = 0.0  # when the last token came
    held_up_by: PauseCause = "other"  # … and what has held the stream up since then
    first_token_seconds: float = 0.0  # from the head of its HTTP request; 0.0: it has none
    outcome: str = ""  # in the words of `segue_requests_total`, once it has ended
    seconds: dict[str, float] = field(default_factory=dict)  # spent in each state that is over
    visits: list[Visit] = field(default_factory=list)
    cached_tokens: int | None = None  # in the first attempt's prompt
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    transport: str = ""  # of the last fetch
    link_bytes_per_second: float = 0.0  # what that link was measured to carry
    retractions: int = 0
    migrations: int = 0  # by pages, from one decode worker to another

    def __post_init__(self) -> None:
        self.rid = self.request.rid

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output: what the next worker starts from."""
        return self.request.token_ids + tuple(self.output)

    @property
    def unscored(self) -> bool:
        """Whether logprobs of its prompt are asked for and have not come."""
        return self.request.params.prompt_logprobs >= 0 and self.scored_len < len(self.request.token_ids)

    @property
    def waits_on(self) -> Worker | None:
        """The worker whose loss the request suffers: the one that works on it, else the one that holds its pages."""
        return self.worker or self.holder

    @property
    def usage(self) -> Usage:
        charged, cached = self.request.charged_tokens, self.cached_tokens or 0
        return Usage(charged, len(self.output), min(cached, charged))

    def count_loss(self, peer: str, now: float, event_seconds: float) -> None:
        """Count the loss of a worker. Workers that die together are one loss, and the second makes the request rest.

        So a request that meets one worker after another that is just dying keeps its attempts, and one that kills
        its workers takes at most two with each loss that counts. A stream that has come far since its last loss has
        not killed that worker by what it is, and its losses are counted anew: a long one outlives many workers.
        """
        if len(self.output) - self.lost_len >= FORGIVING_TOKENS:
            self.losses, self.avoided = 0, ()
        self.lost_len = len(self.output)
        self.avoided += (peer,)
        if now - self.lost_at < event_seconds:
            self.rests_until = self.lost_at + event_seconds
        else:
            self.losses += 1
            self.lost_at = now

    def finish_reason(self) -> FinishReason | None:
        """Why nothing can follow the output so far; the worker may have died before it could report the end."""
        params = self.request.params
        if self.output:
            last = self.output[-1]
            if last in params.stop_token_ids or (last in self.eos_token_ids and not params.ignore_eos):
                return "stop"
        return "length" if len(self.output) >= params.max_new_tokens else None

    @property
    def eos_token_ids(self) -> Collection[int]:
        """The end tokens that its worker named; those of the tokenizer, if it named none."""
        serving = self.waits_on
        return (serving.hello.eos_token_ids if serving else ()) or self.request.eos_token_ids

    def refresh_need(self) -> None:
        """Bring `need` up to date: what the next worker must have to continue the request."""
        request = self.request
        self.need = Need(
            rid=self.rid,
            model_name=request.model,
            tenant=self.tenant.name,
            tokens=len(request.token_ids) + len(self.output),
            tokens_max=len(request.token_ids) + request.params.max_new_tokens,
            blocks=self.blocks,
            session=request.session,
            model=self.model or (self.worker.hello.model if self.worker is not None else ""),
            kv_format=self._kv_format(),
            determinism=self.determinism,
            avoided=self.avoided,
            features=request.params.features,
        )

    def _kv_format(self) -> str:
        """KV format of the request's pages, where they are now."""
        if self.baton is not None:
            return self.baton.kv_format
        return self.worker.hello.kv_format if self.worker is not None else ""

    def may_begin(self, running_max: int, now: float) -> bool:
        """Whether its prompt may be begun, as soon as some worker has room.

        Not while it rests, its tenant has as many running as it may, or a sibling computes the same prompt; nor once
        its target is over: it is dropped at the next tick.
        """
        if now < self.rests_until or (
            self.sampling_group is not None and self.sampling_group.holds_back(self)
        ):
            return False
        if self.output:
            return True
        dropped = self.sampling_group is None and self.is_past_target(now)
        return not dropped and not (running_max and self.tenant.running >= running_max)

    def is_past_target(self, now: float) -> bool:
        """Whether its first token was to have come by now."""
        return bool(self.target_seconds) and now >= self.arrived_at + self.target_seconds

    def move_from(self, worker: Worker, now: float) -> None:
        """Note that it leaves a worker for balance. A worker may say so as often as it likes."""
        self.moved_from = (*self.moved_from, (worker.peer, now))[-VISITS_MAX:]

    def visit(self, worker: Worker, why: str, now: float) -> None:
        """Note a placement."""
        after = now - self.head_at
        self.visits.append(Visit(worker.peer, worker.hello.role, self.attempt, why, after))
        del self.visits[:-VISITS_MAX]

    def debug(self) -> dict[str, object]:
        """What /debug shows: neither text nor token ids. Milliseconds are of the stages that have ended."""
        return {
            "id": self.rid,
            "state": self.state.value,
            "outcome": self.outcome,
            "attempts": self.attempt,
            "losses": self.losses,
            "priority": self.request.priority,
            "prompt_tokens": len(self.request.token_ids),
            "charged_tokens": self.request.charged_tokens,
            "completion_tokens": len(self.output),
            "cached_tokens": self.cached_tokens or 0,
            "fetched_bytes": self.fetched_bytes,
            "first_token_milliseconds": _milliseconds(self.first_token_seconds),
            "fetch_milliseconds": _milliseconds(self.fetch_seconds),
            "second_token_milliseconds": {
                part: _milliseconds(seconds) for part, seconds in (self.second_token_parts or {}).items()
            },
            "transport": self.transport,
            "link_bytes_per_second": round(self.link_bytes_per_second),
            "retractions": self.retractions,
            "migrations": self.migrations,
            "workers": [
                {
                    "worker": visit.worker,
                    "role": visit.role,
                    "attempt": visit.attempt,
                    "why": visit.why,
                    "after_milliseconds": _milliseconds(visit.after_seconds),
                }
                for visit in self.visits
            ],
            "stage_milliseconds": {state: _milliseconds(seconds) for state, seconds in self.seconds.items()},
        }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
