"""How many requests may stand between prefill and decode, and how long a new one would wait before prefill.

What is computed faster than decode takes it waits with its pages on prefill workers, after its first token: a stream
that pauses, and breaks if no room comes. So while requests wait for decode, no more may stand in front of it than it
takes in three quarters of `ready_seconds`: with more, each lull of decode would make a stream late, as said below. The
others wait before they are computed, and a new request that would wait too long there is refused at once. What is being
computed stands in front of decode, too: decode takes others while it takes its time.

    waiting ─ the line of a model ─► prefill ─► ready ─ a kv_group: model and KV format ─► decode
    a wait above what is allowed: 429     what its rate takes in 0.75 of `ready_seconds` and the time of prefill

Rates come from what the router sees (`ServiceRate`). One may be wrong after a pause, a loss or a start. So it bounds
nothing where nothing waits, and some requests for each decode worker may always wait. Nor does it bound a tenant that
has nothing in front of it, while few others do: one that fills the kv_group holds up nobody else.

Whatever the rate, only tenants that have nothing in front of a kv_group, and no prompt at its decode workers, begin
anything there while a stream is *late*: it waits for decode, and its last token came more than `ready_seconds` ago.
For a while after that the rate bounds what is begun although nothing waits: else all that has waited meanwhile would be
begun at once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import TypeVar

from router.config import RouterConfig
from router.core.effects import ClientRequest
from router.core.fleet.worker import KvGroup
from router.core.fleet.workers import Fleet
from router.core.queueing.backfill import PlacementPass
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_queue import RequestQueue
from router.core.requests.tenants import Tenant
from shared.scheduling.tenant_shares import share_of

RATES_MAX = 64  # models and kv_groups whose rates are kept
STANDING = 0.75  # of `ready_seconds`: what decode takes in it may stand there
LATE_REMEMBERED = 4  # of `ready_seconds`: for so long after a stream was late the rate bounds the lane
LANE_MIN = 2  # requests that may stand in front of decode, whatever the rate; or one for each worker
PREFILL_WEIGHT = 0.1  # of the last request in the average time of prefill

Name = TypeVar("Name", str, KvGroup)


class Backpressure:
    """The rates of the queues, and the bounds that follow. `now` in seconds."""

    def __init__(self, settings: RouterConfig, fleet: Fleet, before_decode: Mapping[KvGroup, Counter[str]]):
        self._settings = settings
        self._fleet = fleet
        self._before_decode = before_decode  # requests in prefill and ready, by kv_group and tenant
        self._model_queues: OrderedDict[str, ServiceRate] = OrderedDict()  # by name of the model
        self._tenants: OrderedDict[str, ServiceRate] = OrderedDict()  # by name, of those that wait
        self._kv_groups: OrderedDict[KvGroup, ServiceRate] = OrderedDict()
        self._late_at: dict[KvGroup, float] = {}  # when a stream was late last
        self._token_at: dict[KvGroup, float] = {}  # of the ready stream that has waited longest for a token
        self._late_lanes: tuple[float, frozenset[KvGroup]] = (-inf, frozenset())  # when, and which
        self.first_token_seconds = 0.0  # from placement to the first token, on average
        self.prefill_seconds = 0.0  # … at prefill workers, after which requests stand in front of decode

    # ---- what happens ------------------------------------------------------------------------------------------

    def waiting_passed(self, attempts: PlacementPass, now: float) -> None:
        """A pass along the waiting queue has ended."""
        taken_of = Counter(live.tenant.name for live in attempts.taken)
        blocked_before = {name: None for name, rate in self._tenants.items() if rate.blocked}
        for name in blocked_before | attempts.tenants_blocked:
            _rate(self._tenants, name).passed(taken_of[name], name in attempts.tenants_blocked, now)
        taken = Counter(live.request.model for live in attempts.taken)
        blocked = {model: True for model, _, _ in attempts.blocked}
        for model in self._model_queues | blocked:
            _rate(self._model_queues, model).passed(taken[model], model in blocked, now)

    def ready_passed(self, attempts: PlacementPass, left: Sequence[LiveRequest], now: float) -> None:
        """A pass along the ready queue has ended, and `left` are still in it."""
        taken = Counter(live.kv_group for live in attempts.taken)
        waiting = Counter(live.kv_group for live in left)
        self._token_at = {}
        for live in left:
            if not live.unread_by:  # else it waits for other workers than those which are begun behind it
                self._token_at[live.kv_group] = min(live.token_at, self._token_at.get(live.kv_group, inf))
        self._late_lanes = (-inf, frozenset())
        remembered = now - LATE_REMEMBERED * self._settings.ready_seconds
        self._late_at = {kv_group: at for kv_group, at in self._late_at.items() if at > remembered}
        self._late_at |= dict.fromkeys(self.late_lanes(now), now)
        for kv_group in self._kv_groups | waiting:
            blocked = self._fleet.takers("decode", kv_group) > 0 and waiting[kv_group] >= self._lane_min(
                kv_group
            )
            _rate(self._kv_groups, kv_group).passed(taken[kv_group], blocked, now)

    def computed(self, seconds: float, *, at_prefill: bool) -> None:
        """A prompt has taken so long. More than `ready_seconds` counts as that: who computes it holds requests up."""
        seconds = min(seconds, self._settings.ready_seconds)
        self.first_token_seconds += (seconds - self.first_token_seconds) * PREFILL_WEIGHT
        if at_prefill:
            self.prefill_seconds += (seconds - self.prefill_seconds) * PREFILL_WEIGHT

    def refused(self, live: LiveRequest) -> None:
        """The worker that was to take the request has no room after all."""
        if live.state is RequestState.DECODING:
            rate = self._kv_groups.get(live.kv_group)
        else:
            rate = self._model_queues.get(live.request.model)
            if (own := self._tenants.get(live.tenant.name)) is not None:
                own.give_back()
        if rate is not None:
            rate.give_back()

    # ---- what follows ------------------------------------------------------------------------------------------

    def full_lanes(self, tenant: Tenant, now: float) -> frozenset[KvGroup]:
        """Lanes where enough requests stand in front of decode, or enough of this tenant, or where a stream is late."""
        late = frozenset(kv_group for kv_group in self.late_lanes(now) if tenant.begun[kv_group])
        return late | {
            kv_group
            for kv_group, rate in self._kv_groups.items()
            if (rate.blocked or kv_group in self._late_at)
            and not self._may_enter(kv_group, rate, tenant, now)
        }

    def late_lanes(self, now: float) -> frozenset[KvGroup]:
        """Lanes where a stream is late; found once in a placement pass, for all its prompts and workers."""
        if self._late_lanes[0] != now:
            late = now - self._settings.ready_seconds
            found = frozenset(kv_group for kv_group, token_at in self._token_at.items() if token_at < late)
            self._late_lanes = (now, found)
        return self._late_lanes[1]

    def seconds_before_decode(self, kv_group: KvGroup, now: float) -> float:
        """How long the stream that has waited longest for decode has had no token; 0.0: none waits."""
        return max(0.0, now - self._token_at.get(kv_group, now))

    def seconds_to_wait(
        self, queue: RequestQueue, request: ClientRequest, tenant: Tenant, now: float
    ) -> float:
        """How long a new request would wait for a prefill worker; 0.0 where that is not known.

        Others come meanwhile whose turn is before that of a tenant with much in the queue. So what it has there is
        also put against the rate at which its own requests are taken.
        """
        rate = self._model_queues.get(request.model)
        if rate is None or not rate.blocked:
            return 0.0
        ahead = queue.place_of_new(request.tenant, request.priority)
        workers = len(self._fleet.of_role("decode"))
        per_second = rate.per_second(now, self._settings.waiting_seconds_max)
        if per_second is None or ahead <= 2 * workers:
            return 0.0
        if len(self._model_queues) > 1:
            ahead = sum(live.request.model == request.model for live in queue.in_order()[:ahead])
        if not per_second:
            return inf
        own = self._tenants.get(tenant.name)
        own_rate = own.per_second(now, self._settings.waiting_seconds_max) if own is not None else None
        return max(ahead / per_second, tenant.waiting / own_rate if own_rate else 0.0)

    def _may_enter(self, kv_group: KvGroup, rate: ServiceRate, tenant: Tenant, now: float) -> bool:
        seconds = self._settings.ready_seconds
        per_second = rate.per_second(now, seconds)
        if per_second is None:
            return True
        standing_seconds = STANDING * seconds + self.prefill_seconds
        bound = max(self._lane_min(kv_group), round(per_second * standing_seconds))
        by_tenant = self._before_decode.get(kv_group, Counter())
        own = by_tenant[tenant.name]
        if not own:  # others may have filled a small bound, and take long to leave
            return len(by_tenant) < bound
        return by_tenant.total() < bound and own < share_of(bound, self._settings.tenant_share_max)

    def _lane_min(self, kv_group: KvGroup) -> int:
        return max(LANE_MIN, self._fleet.takers("decode", kv_group))


def _rate(rates: OrderedDict[Name, ServiceRate], name: Name) -> ServiceRate:
    if name not in rates:
        rates[name] = ServiceRate()
        if len(rates) > RATES_MAX:
            rates.popitem(last=False)
    rates.move_to_end(name)
    return rates[name]


# ---- how many requests a second leave a queue while others in it find no room ----------------------------------------
# Only such time counts: a queue that is empty, or that no worker serves at all, does not show how fast it could be
# served. The rate covers the last takes, however long they took, and at least the last seconds: as many as a request
# may be let wait by it, for takes come in bursts, and a rate that follows these moves the bounds that make them. After
# a long time without a wait it is forgotten, because the fleet may be another one. It has no clock: `now`, in seconds,
# never decreases.


TAKES_MIN = 16  # fewer show no rate
WINDOW_TAKES = 64
WINDOW_SECONDS = 20.0  # of waiting
MARK_SECONDS = 0.1  # of waiting, and a take, between two marks: so there are about two hundred
FORGOTTEN_SECONDS = 60.0  # without a wait


class ServiceRate:
    """The rate of one queue; `passed` follows each placement pass."""

    def __init__(self) -> None:
        self.blocked = False  # since the last pass some request has found no room
        self._at = 0.0  # the time of that pass
        self._waited = 0.0  # seconds in which requests found no room
        self._taken = 0  # requests taken meanwhile
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)])  # waited and taken, the oldest first

    def passed(self, taken: int, blocked: bool, now: float) -> None:
        """A pass placed `taken` requests; `blocked`: others found no room."""
        if self.blocked:
            self._waited += now - self._at
            self._taken += taken
            self._mark()
        elif blocked and now - self._at > FORGOTTEN_SECONDS:
            self._marks = deque([(self._waited, self._taken)])
        if self.blocked or blocked:
            self._at = now
        self.blocked = blocked

    def give_back(self) -> None:
        """A request that was taken comes back, because the worker had no room after all."""
        if self.blocked:
            self._taken -= 1

    def per_second(self, now: float, patience: float) -> float | None:
        """Requests taken a second; None: not known, for less than `patience` seconds of waiting and few takes."""
        first_waited, first_taken = self._marks[0]
        waited = self._waited - first_waited + (now - self._at if self.blocked else 0.0)
        taken = max(0, self._taken - first_taken)
        if not waited or (taken < TAKES_MIN and waited < patience):
            return None
        return taken / waited

    def _mark(self) -> None:
        waited, taken = self._marks[-1]
        if self._waited - waited < MARK_SECONDS or self._taken <= taken:
            return
        self._marks.append((self._waited, self._taken))
        while len(self._marks) > 2 and self._covers(*self._marks[1]):
            self._marks.popleft()

    def _covers(self, waited: float, taken: int) -> bool:
        """Whether what came after this mark is enough to go by."""
        return self._waited - waited >= WINDOW_SECONDS and self._taken - taken >= WINDOW_TAKES
