"""One worker as the router knows it: its `Hello`, its load, and the requests that are assigned to it.

Load is what the worker last reported plus what was assigned since, less what ended since, and never less than what this
router alone has there. What ended since gives no pages: a worker refuses less if a router waits for its word. It gives
its slot. Nothing here decides; see `placement`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp2, inf
from typing import Any, Literal

from router.core.fleet.assignments import AssignedTotals, Assignment, totals_of
from router.core.fleet.refused_tenants import RefusedTenants
from router.core.fleet.told_rates import FleetRates
from router.placement_policies import salt_of
from shared.kv.page_pool import pages_for_tokens
from shared.scheduling.tenant_shares import share_of
from shared.wire.messages import Hello, Load, Message, Serve

# of prompts at a decode worker: what waits longer waits at the router, where tenants take turns
STEPS_WAITING = 2
FASTER = 1.5  # times its rate for prompts: one that has waited for others may go there now
FETCHED_WEIGHT = 0.1  # of the last request in the average share that is fetched
WORK_HALF_SECONDS = 5.0

# fingerprints of model and KV format: what a prefill and a decode worker must share
KvGroup = tuple[str, str]

Doubt = Literal["rests", "tried"]  # a worker found silent gets nothing at first, then one request at a time


@dataclass(slots=True, eq=False)
class Worker:
    """One prefill or decode worker."""

    peer: str
    hello: Hello
    arrival: int  # breaks the last ties
    up: bool = True
    load: Load = field(default_factory=Load)
    load_number: int = 0
    assigned: dict[str, Assignment] = field(default_factory=dict)  # by rid
    by_tenant: Counter[str] = field(default_factory=Counter)  # how many of `assigned` each tenant has
    own: AssignedTotals = field(default_factory=AssignedTotals)  # of `assigned`
    unreported: AssignedTotals = field(default_factory=AssignedTotals)  # … since the last load
    ended: AssignedTotals = field(default_factory=AssignedTotals)  # in the last load, and over since
    leases: dict[str, None] = field(default_factory=dict)  # rids whose pages it keeps for others to fetch
    reserved: dict[str, int] = field(default_factory=dict)  # pages by rid of those that will migrate here
    foreseen: dict[str, int] = field(default_factory=dict)  # pages by rid of those that will come here
    foreseen_told: int = 0  # … that it was last told
    extending: dict[str, int] = field(default_factory=dict)  # tokens by rid of prompts that it computes
    extending_unreported: int = 0  # … of those that came since the last load
    extended_since: int = 0  # … of those in the last load, and computed or gone since
    fetched_share: float = 1.0  # of the pages of requests that come here, on average; the others are cached
    draining: bool = False  # it takes nothing new …
    draining_since: float = 0.0  # … since then
    kv_metadata: bytes | None = None  # of its first baton, and so of all others in this session
    last_chosen: int = 0
    paused_until: float = 0.0  # it has just refused for lack of room …
    paused_pages: int = 0  # … a request of as many pages: smaller ones may be tried
    refused: RefusedTenants = field(default_factory=RefusedTenants)
    heard_at: float = 0.0  # when it last said something of a request that it had
    doubted: Doubt | None = None  # see `silent_workers`
    prefilling_max: int = 1  # requests that it may have at a time, if it is a prefill worker
    # called when `is_open` may have changed
    changed: Callable[[Worker], None] = field(default=lambda _: None)
    rates: FleetRates = field(default_factory=FleetRates)  # of its fleet
    capacity: int | None = field(init=False)  # tokens that one request may have here; None: not known
    features: frozenset[str] = field(init=False)  # of sampling parameters that it knows
    salt: int = field(init=False)  # for its weights in rendezvous hashing
    _work: float = 0.0
    _work_at: float = 0.0
    pool_tokens: int = field(init=False)  # what its pool holds; 0: not known
    extends: bool = field(init=False)  # it is a decode worker that computes prompts

    def __post_init__(self) -> None:
        limits = self.hello.limits
        self.salt = salt_of(self.hello.uid)
        self.features = frozenset(self.hello.features)
        self.load = Load(free_pages=limits.pages, slots_free=limits.slots)  # until its first report
        self.pool_tokens = limits.pages * limits.page_size
        self.extends = self.hello.role == "decode" and limits.extend_tokens > 0 and self.understands(Serve)
        self.capacity = min((n for n in (limits.context_len, self.pool_tokens) if n), default=None)

    @property
    def kv_group(self) -> KvGroup:
        """What workers must share with it to exchange pages."""
        return (self.hello.model, self.hello.kv_format)

    def understands(self, message: type[Message]) -> bool:
        """Whether such a message may be sent to it; if not, do as was done before the message existed.

        Protocol 1 has no such message yet; the simulation has one.
        """
        return self.hello.reads(message)

    @property
    def tokens_waiting(self) -> int:
        """Tokens of prompts that a decode worker had to compute by its last load, and of those that came since."""
        return self.load.queued_tokens + self.extending_unreported

    @property
    def tokens_left(self) -> int:
        """`tokens_waiting` without prompts that are computed since: what a prompt that comes now waits for.

        A client's next turn follows its answer sooner than a load does: counted with the turn before, it would go to a
        worker that has nothing of it cached. What had been computed of a prompt by the last load is taken off twice.
        """
        return max(0, self.load.queued_tokens - self.extended_since) + self.extending_unreported

    def has_turn(self, tenant: str, tokens: int) -> bool:
        """Whether a decode worker computes one more prompt, of so many tokens, soon: what waits fits its next steps.

        There is as much room again for tenants that have no prompt there; and beside a prompt of several steps a step
        for such as fit it together, which the worker computes beside it.
        """
        step = self.hello.limits.extend_tokens
        most, waiting = STEPS_WAITING * step, self.tokens_waiting
        if waiting < most:
            return True
        if waiting < 2 * most and all(self.assigned[rid].tenant != tenant for rid in self.extending):
            return True
        short = sum(count for count in self.extending.values() if count <= step)
        return short + tokens <= step and max(self.extending.values(), default=0) > step

    def may_have_turn(self) -> bool:
        """Whether a decode worker has a turn for any prompt; none that is placed meanwhile makes that true."""
        step = self.hello.limits.extend_tokens
        if self.tokens_waiting < 2 * STEPS_WAITING * step:
            return True
        return max(self.extending.values(), default=0) > step

    @property
    def tokens(self) -> int:
        """Uncached tokens queued (prefill) or tokens held (decode), as far as the router knows by now."""
        reported = self.load.queued_tokens if self.hello.role == "prefill" else self.load.running_tokens
        return max(self.own.tokens, reported + self.unreported.tokens - self.ended.tokens)

    @property
    def requests(self) -> int:
        """Requests queued or running, as far as the router knows by now."""
        reported = self.load.queued + self.load.running
        return max(len(self.assigned), reported + self.unreported.requests - self.ended.requests)

    @property
    def running(self) -> int:
        """Streams of a decode worker, no more than it told: those that have ended since are none."""
        return min(self.load.running, max(0, self.requests - len(self.extending)))

    @property
    def fullness(self) -> float:
        """`tokens` as a share of what its pool holds; plain tokens where its size is not known."""
        return self.tokens / (self.pool_tokens or 1)

    def work(self, now: float) -> float:
        """Tokens that this router has given it lately: what is `WORK_HALF_SECONDS` old counts half."""
        return self._work * exp2((self._work_at - now) / WORK_HALF_SECONDS)

    def pages_for(self, tokens: int, shared: int = 0) -> int:
        """Pages that `tokens` tokens take here, beside those of the first `shared`, which are here already."""
        page_size = self.hello.limits.page_size
        return pages_for_tokens(tokens, page_size) - shared // page_size if page_size else 0

    def fits(self, tokens: int) -> bool:
        """Whether a request of `tokens` tokens could ever be held."""
        return self.capacity is None or tokens <= self.capacity

    @property
    def pages_in_front(self) -> int:
        """Pages of what a decode worker gets before a new request, by what its last load told and since then.

        What was sent to it since, what will migrate there, and what was begun for it, by other routers too.
        """
        begun = sum(self.foreseen.values()) + max(0, self.load.pages_foreseen)
        return self.unreported.pages + sum(self.reserved.values()) + begun

    @property
    def is_unclaimed(self) -> bool:
        """Whether a worker has nothing, and nothing was begun for it: it takes whatever fits it."""
        load = self.load
        return not (load.queued or load.running or self.assigned or self.foreseen or load.pages_foreseen > 0)

    def pages_found(self, tenant: str, seconds: float, only_max: int = 0) -> float:
        """Pages that a new request of the tenant will find in so many seconds, if it tells; see `_pages_for`."""
        if self.is_unclaimed:
            return self.hello.limits.pages or inf
        pages = self._pages_for(tenant, only_max)
        return pages + self.load.pages_a_second * seconds - self.pages_in_front

    def seconds_to_fetch(self) -> float:
        """Seconds until all that is in front of a decode worker is fetched, by the rate that it tells; 0.0: none."""
        load = self.load
        if not load.pages_arriving_a_second:
            return 0.0
        pages = load.pages_arriving + self.pages_in_front * self.fetched_share
        return pages / load.pages_arriving_a_second

    @property
    def tokens_to_fetch(self) -> int:
        """Tokens that are on their way to a decode worker whose links have been busy; 0: they have not."""
        load = self.load
        pages = load.pages_arriving + self.unreported.pages if load.pages_arriving_a_second else 0
        return pages * self.hello.limits.page_size

    def has_fetched(self, tokens: int, cached_tokens: int) -> None:
        """A request of so many tokens has joined, and had some of them in the cache."""
        share = max(0.0, 1 - cached_tokens / tokens) if tokens else 0.0
        self.fetched_share += (share - self.fetched_share) * FETCHED_WEIGHT

    def has_room(
        self,
        pages: int,
        tenant: str,
        share_max: float,
        now: float,
        *,
        whatever_told: bool = False,
        only_max: int = 0,
    ) -> bool:
        """Whether a decode worker can take a request of `pages` pages at once.

        One that accepts nothing, because it is full, may still have room for a tenant that holds less than others.
        `whatever_told`: all free pages count, also those that it keeps for the growth of others. `only_max`: see
        `_pages_for`.
        """
        if not (self.takes_work() or self._is_below_share(tenant)):
            return False
        load, unreported = self.load, self.unreported
        slots, migrations = self.hello.limits.slots, len(self.reserved)
        taken = unreported.requests + migrations
        return (
            load.slots_free > taken
            and self._slots_for(tenant, more_than=taken) > taken
            and len(self.assigned) + migrations < slots
            and (load.free_pages if whatever_told else self._pages_for(tenant, only_max))
            - unreported.pages
            - sum(self.reserved.values())
            >= pages
            and (now >= self.paused_until or pages < self.paused_pages)
            and self._within_share_max(tenant, slots, share_max)
        )

    def _pages_for(self, tenant: str, only_max: int) -> int:
        """Pages that a decode worker gives to a request of this tenant: most get what the growth of others leaves.

        `only_max`: tokens to which the only request grows that the tenant has begun; 0: it has begun others.
        """
        load = self.load
        is_light = bool(self.assigned) and not self.by_tenant[tenant]
        is_light |= bool(only_max) and self.may_be_below_share(tenant, only_max)
        if load.pages_for_new < 0 or is_light or self.is_empty():
            return load.free_pages
        return load.pages_for_new

    def _slots_for(self, tenant: str, *, more_than: int) -> int:
        """Slots of a decode worker for a request of this tenant: some are kept for tenants that hold little there.

        Whether that is fewer than another one holds only the worker knows. One that has none there from this router, or
        fewer than another, is tried until it is refused. `more_than`: so many need no closer look.
        """
        load = self.load
        told = load.slots_for_new + self.ended.requests
        if load.slots_for_new < 0 or told > more_than or self.is_empty():
            return load.slots_free
        held = self.by_tenant[tenant]
        may_be_light = not held or held < max(self.by_tenant.values())
        return load.slots_free if may_be_light and tenant not in self.refused else told

    def is_empty(self) -> bool:
        """Whether it has no request: nothing there ends and makes room, but for pages that others fetch."""
        return not (self.load.queued or self.load.running or self.assigned)

    def may_be_below_share(self, tenant: str, tokens_max: int) -> bool:
        """Whether a request that grows to so many tokens may be below its tenant's share, as the worker reckons it.

        Its last load has requests, of whatever router, and the tenant has none there from this one. What was assigned
        since does not count: one that found no room would find some by what is placed behind it. Only the worker knows
        what the tenant has there from others, so one that it has refused is none for a while.
        """
        others = self.requests > self.unreported.requests and not self.by_tenant[tenant]
        if not others or tenant in self.refused:
            return False
        even = self.pool_tokens / (max(1, len(self.by_tenant)) + 2)
        return tokens_max - 1 <= even  # the last token has no KV

    def takes_prefill(self, share_max: float, tenant: str, now: float) -> bool:
        """Whether a prefill worker may be given one more: the requests assigned to it are bounded."""
        return (
            self.takes_work()
            and now >= self.paused_until
            and len(self.assigned) < self.prefilling_max
            and self._within_share_max(tenant, self.prefilling_max, share_max)
        )

    @property
    def is_open(self) -> bool:
        """Whether there is any request that it could take now; cheap, and never false while there is one."""
        if self.draining or self._is_withheld():
            return False
        if self.hello.role == "prefill":
            return self.load.accepting and len(self.assigned) < self.prefilling_max
        load, unreported, limits = self.load, self.unreported, self.hello.limits
        return (
            load.slots_free > unreported.requests
            and len(self.assigned) < limits.slots
            and (load.free_pages > unreported.pages or not limits.page_size)
        )

    def takes_work(self) -> bool:
        """Whether it takes anything new at all."""
        return self.load.accepting and not self.draining and not self._is_withheld()

    def _is_withheld(self) -> bool:
        """Whether nothing is given to it because it was found silent."""
        return self.doubted is not None and (self.doubted == "rests" or bool(self.assigned))

    def _within_share_max(self, tenant: str, places: int, share_max: float) -> bool:
        """Whether the tenant may have one more of so many places; the first one it always may."""
        held = self.by_tenant.get(tenant, 0)
        return not held or held < share_of(places, share_max)

    def _is_below_share(self, tenant: str) -> bool:
        """Whether it may take a request of this tenant while it is full for others: the tenant has none here."""
        return not self.draining and not self._is_withheld() and not self.by_tenant[tenant]

    def pause(self, pages: int, until: float, now: float) -> None:
        """Offer the worker no request of `pages` pages or more before `until`: it has no room for one."""
        self.paused_pages = min(pages, self.paused_pages) if now < self.paused_until else pages
        self.paused_until = until

    def assign(
        self,
        rid: str,
        tokens: int,
        pages: int,
        tenant: str = "",
        hit_tokens: int = 0,
        sent_at: float = 0.0,
        *,
        own: bool = False,
    ) -> None:
        """Count a request in, until `unassign`."""
        assert rid not in self.assigned, rid
        self._work, self._work_at = self.work(sent_at) + tokens, sent_at
        self.assigned[rid] = Assignment(tokens, pages, self.load_number, hit_tokens, tenant, sent_at, own)
        self.by_tenant[tenant] += 1
        self.own.add(tokens, pages)
        self.unreported.add(tokens, pages)
        self.changed(self)

    def extend(self, rid: str, tokens: int) -> None:
        """Count so many tokens of the prompt of a request, just assigned, among those to compute, until `extended`."""
        assert self.assigned[rid].load_number == self.load_number, rid
        self.extending[rid] = tokens
        self.extending_unreported += tokens

    def extended(self, rid: str) -> None:
        """The prompt is computed, or is not to be; a no-op where it is none that the worker computes."""
        tokens = self.extending.pop(rid, 0)
        if self.assigned[rid].load_number == self.load_number:
            self.extending_unreported -= tokens
        else:
            self.extended_since += tokens

    def unassign(self, rid: str) -> None:
        """Count a request out."""
        self.extended(rid)
        assignment = self.assigned.pop(rid)
        self.own.subtract(assignment)
        self.by_tenant[assignment.tenant] -= 1
        if not self.by_tenant[assignment.tenant]:
            del self.by_tenant[assignment.tenant]
        if assignment.load_number == self.load_number:
            self.unreported.subtract(assignment)
        else:
            self.ended.add(assignment.tokens, assignment.pages)
        self.changed(self)

    def forget(self, rid: str) -> bool:
        """Take a request out, whatever of it a step that broke off has left; returns whether anything was."""
        claimed: tuple[dict[str, Any], ...] = (
            self.assigned,
            self.leases,
            self.reserved,
            self.foreseen,
            self.extending,
        )
        known = any(rid in claims for claims in claimed)
        for claims in claimed:
            claims.pop(rid, None)
        self.by_tenant = Counter(each.tenant for each in self.assigned.values())
        self.own = totals_of(self.assigned.values())
        self.unreported = totals_of(
            each for each in self.assigned.values() if each.load_number == self.load_number
        )
        self.extending_unreported = sum(
            tokens
            for rid, tokens in self.extending.items()
            if self.assigned[rid].load_number == self.load_number
        )
        return known

    def report(self, load: Load) -> bool:
        """Take in the load that the worker reports; it includes what was assigned before.

        Returns whether it may take something now that it could not take before, or a prompt may be begun for it.
        """
        before, unreported = self.load, self.unreported
        waiting = before.queued_tokens + self.extending_unreported
        had_others = self.requests > unreported.requests
        self.load = load
        self.load_number += 1
        forgiven = self.refused.forgive(self.load_number)
        self.unreported = AssignedTotals()
        self.ended = AssignedTotals()
        self.extending_unreported = self.extended_since = 0
        self.rates.told(self.peer, self.hello, load)
        self.changed(self)
        more_pages = load.free_pages > before.free_pages - unreported.pages
        more = load.accepting and not before.accepting
        if self.hello.role == "decode":
            more |= more_pages
            more |= self.extends and (
                load.queued_tokens < waiting or load.extend_rate > FASTER * before.extend_rate
            )
            more |= load.slots_free > before.slots_free - unreported.requests
        foreseen = load.pages_for_new > before.pages_for_new - unreported.pages
        foreseen |= load.pages_a_second > before.pages_a_second
        foreseen |= load.pages_foreseen < before.pages_foreseen
        # tenants that have nothing here need only free pages, also where no slot is free
        foreseen |= more_pages or forgiven or (self.requests > 0 and not had_others)
        foreseen |= load.pages_arriving < before.pages_arriving + unreported.pages
        foreseen |= load.pages_arriving_a_second != before.pages_arriving_a_second  # 0.0 bounds nothing
        return (more and self.is_open) or (foreseen and load.pages_for_new >= 0)
