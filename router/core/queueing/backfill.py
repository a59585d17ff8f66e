"""Which requests of a queue may be tried while those in front of them find no room.

A request that finds no room does not hold back smaller ones that compete for the same workers: room for it comes only
as others end, and meanwhile the smaller ones use what is there. After `backfill_max` of them have gone past it, the
room that comes is kept for it, so that small ones cannot starve a large one. It is not kept from tenants that have
less running than its own tenant: else one that fills all workers would hold up the others with its next request.

Where all workers of a model are of one version, a stream that has to go on there competes with new prompts, too.

One that could begin somewhere, and waits for a worker that has computed it sooner, keeps room from nobody: it does not
want what is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from router.core.requests.live_request import LiveRequest
from router.core.requests.tenants import Tenant
from router.placement_policies import Need

Group = tuple[str, str, str]

CHOOSING_MAX = 8  # of a tenant that wait for a better worker: those behind them are not tried in this pass


class PlacementPass:
    """One walk along a queue, in its order."""

    def __init__(self, backfill_max: int, only_versions: Mapping[str, str]):
        self._backfill_max = backfill_max
        self._only_versions = only_versions  # fingerprints of models of which there is one version, by name
        self._front: dict[Group, LiveRequest] = {}  # the first that found no room
        # Tokens: of a tenant, a request of as many found none
        self._room_below: dict[tuple[Group, str], int] = {}
        self._choosing: Counter[tuple[Group, str]] = Counter()  # of a tenant, that wait for a better worker
        # by group and name: tenants that room is kept from, until those that it is kept for have more running
        self._kept_from: dict[tuple[Group, str], Tenant] = {}
        self.taken: list[LiveRequest] = []  # those that were placed
        self.look_again = False  # what was placed may have taken the room that one in front of it waits for
        self.lets_in_others = False  # … or may let one in front of it use what is kept
        self.tenants_blocked: dict[str, None] = {}  # names of tenants of which some found no room
        self._tenants_apart: set[str] = set()  # … and wait for other workers than others

    @property
    def blocked(self) -> Iterable[Group]:
        """The groups of requests that found no room."""
        return self._front.keys()

    def group_of(self, need: Need) -> Group:
        """What a request competes in: room is kept for one of a group from the others of it."""
        only = self._only_versions.get(need.model_name)
        return (need.model_name, "", "") if need.model == only and not need.kv_format else need.group

    def may_try(self, live: LiveRequest) -> bool:
        """Whether room for it is possible, and not kept for another one."""
        room_below = self._room_below.get((live.need.group, live.tenant.name))
        if room_below is not None and live.need.tokens >= room_below:
            return False  # so its tenant is among those that are blocked
        group = self.group_of(live.need)
        front = self._front.get(group)
        if front is None or front.backfilled < self._backfill_max or _has_less(live.tenant, front):
            return True
        self._kept_from[group, live.tenant.name] = live.tenant
        return False

    def found_no_room(self, live: LiveRequest, *, is_choosy: bool = False) -> None:
        """Note that a request waits on. Others of its size need not be tried, unless it passes over some workers."""
        self._front.setdefault(self.group_of(live.need), live)
        self.tenants_blocked[live.tenant.name] = None
        if not is_choosy:
            self._room_below[live.need.group, live.tenant.name] = live.need.tokens

    def waits_for_better(self, live: LiveRequest) -> None:
        """Note that a request leaves the room that there is to others, since it has begun sooner elsewhere."""
        key = live.need.group, live.tenant.name
        self.tenants_blocked[live.tenant.name] = None
        self._choosing[key] += 1
        if self._choosing[key] >= CHOOSING_MAX:
            self._room_below[key] = 0

    def waits_apart(self, live: LiveRequest) -> None:
        """Note that a request waits for other workers than those behind it, which it does not hold back."""
        self._tenants_apart.add(live.tenant.name)

    def placed(self, live: LiveRequest, group: Group) -> None:
        """Note that a request went to a worker, past the first of `group` that found no room, if there is one.

        `group`: the one that it waited in; with its worker it gets a model and a KV format, and so another one.
        """
        self.taken.append(live)
        self.look_again |= self._choosing.total() > 0
        left = self.tenants_blocked.keys() | self._tenants_apart
        self.lets_in_others = _is_first(live) and bool(left - {live.tenant.name})
        self.lets_in_others |= any(
            self._front[kept].tenant is live.tenant and _has_less(tenant, live)
            for (kept, _), tenant in self._kept_from.items()
        )
        if (front := self._front.get(group)) is not None:
            front.backfilled += 1

    def begin_anew(self) -> None:
        """Try all of them once more that are still in the queue."""
        self._front.clear()
        self._room_below.clear()
        self._choosing.clear()
        self._kept_from.clear()
        self.tenants_blocked.clear()
        self._tenants_apart.clear()
        self.lets_in_others = False


def _is_first(live: LiveRequest) -> bool:
    """Whether its decode worker had nothing of this router: other tenants are below their shares there from now on."""
    worker = live.worker
    return worker is not None and worker.hello.role == "decode" and len(worker.assigned) == 1


def _has_less(tenant: Tenant, live: LiveRequest) -> bool:
    """Whether a tenant has less running than that of a request."""
    return tenant.running < live.tenant.running
