"""The pods of a release as a router knows them, and what follows for its links to workers.

    unknown --seen--> waiting --Ready--> dialed --terminating--> terminating
                         `--------------- terminating --------------^
    any of them --in no slice--> absent --for ABSENT_SECONDS--> unknown

Takes observations, returns changes and notes; no clock, thread or I/O, and no log. Which pods the observed slices name
is decided in `pods_of_slices`. A pod is known by its uid: one that was recreated under the same name is another. Only
a Ready pod is dialed. A pod that stops being Ready keeps its link: it may still be decoding, and a dead peer is
noticed by the link first. When it becomes Ready again, it is redialed at once, without waiting for the backoff. An
outage of the API server changes no link: the last known fleet serves on.

In a large fleet a router dials the workers of its cells only; the others are `elsewhere`. A link stays when
its worker comes to be of another cell, because requests run on it. As pods are replaced, such links become fewer.

Two pods can have one address for a moment, when an IP address is given out again before the older pod's end was seen.
An address is hung up when no pod has it any more; that another process answers there is noticed by the link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from router.discovery.pods_of_slices import Pod, PodSlice, PodsOfSlices
from router.discovery.worker_address import WorkerAddress
from shared.batch.effects import Note
from shared.primitives.cell import CELL_WORKERS_MAX
from shared.wire.messages import WORKER_ROLES

PodState = Literal["waiting", "elsewhere", "dialed", "terminating", "absent"]
POD_STATES: tuple[PodState, ...] = ("waiting", "elsewhere", "dialed", "terminating", "absent")


# ---- observations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """Lists all slices there are."""

    slices: tuple[PodSlice, ...]


@dataclass(frozen=True, slots=True)
class Watching:
    """A watch was accepted, from the last list or event on."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A slice is new or has changed."""

    slice: PodSlice


@dataclass(frozen=True, slots=True)
class Removed:
    """A slice has gone."""

    name: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """`refresh_at` has come."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The API server gave no answer, or none that helps."""

    reason: str


@dataclass(frozen=True, slots=True)
class Denied:
    """The API server knows this router and forbids it this."""

    verb: str
    namespace: str
    detail: str


Observation = Listed | Watching | Changed | Removed | TimePassed | Unreachable | Denied


# ---- changes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DialPod:
    """Keep a link to this worker from now on."""

    worker: WorkerAddress


@dataclass(frozen=True, slots=True)
class RedialPod:
    """The worker at this address, dialed before, is Ready again: if its link is down, dial at once."""

    worker: WorkerAddress


@dataclass(frozen=True, slots=True)
class HangUpPod:
    """End the link to this worker: it has gone."""

    worker: WorkerAddress


Change = DialPod | RedialPod | HangUpPod | Note


class KnownPods:
    """Observations in, changes out; see the head of this file. `now` in seconds, of any steady clock."""

    def __init__(self, now: float, router: str = "", cell_workers_max: int = CELL_WORKERS_MAX):
        """`router` is the name of this router's pod."""
        self.ready = False  # a list and a watch have worked; stays true when the API server fails later
        self.reachable = False
        self.routers_ready = 0  # routers that are Ready and do not terminate; asked for with each request
        self.waiting_for = "the first list of endpointslices"  # what is missing until `ready`
        self._router = router
        self._cell_workers_max = cell_workers_max
        self._divided: tuple[
            frozenset[str], ...
        ] = ()  # routers, prefill and decode workers, when `_mine` was found
        self._mine: frozenset[str] = frozenset()  # uids of the workers of this router's cells
        self._sliced = PodsOfSlices()
        self._pods: dict[str, Pod] = {}  # the workers' pods, by uid
        self._workers: dict[str, WorkerAddress] = {}  # by uid: dialed and terminating ones
        self._ready: set[str] = set()  # uids of those workers that are Ready
        self._terminating: set[str] = set()  # uids of those workers that have a deletionTimestamp
        self._unusable: set[str] = set()  # uids of Ready pods without a port for links
        self._notes: list[Note] = []  # of the observation at hand
        self._heard_at = now
        self._trouble: Unreachable | Denied | None = None
        self._troubled_at = now

    def observe(self, observation: Observation, now: float) -> list[Change]:
        """Take in one observation; returns the changes in the order to carry them out."""
        changes: list[Change] = []
        if isinstance(observation, Unreachable | Denied):
            self._note_failure(observation, now)
        else:
            self._take_in(observation, now)
            changes = self._update_links()
        notes, self._notes = self._notes, []
        return [*changes, *notes]

    def _take_in(self, observation: Listed | Watching | Changed | Removed | TimePassed, now: float) -> None:
        match observation:
            case Listed(slices):
                self._sliced.replace_all(slices, now)
            case Changed(changed):
                self._sliced.put(changed, now)
            case Removed(name):
                self._sliced.remove(name, now)
            case _:
                self._sliced.refresh(now)
        self._pods = {uid: pod for uid, pod in self._sliced.by_uid.items() if pod.role in WORKER_ROLES}
        self._divide()
        routers = (pod for pod in self._sliced.by_uid.values() if pod.role == "router")
        self.routers_ready = sum(pod.ready and not pod.terminating for pod in routers)
        if not isinstance(observation, TimePassed):
            self._heard_at = now
        if isinstance(observation, Watching):
            self._recover(now)

    @property
    def refresh_at(self) -> float | None:
        """When to come with `TimePassed`, unless another observation came since; None: not needed."""
        return self._sliced.refresh_at

    def age_seconds(self, now: float) -> float:
        """Since the last list, watch or event of the API server; before the first, since the start."""
        return now - self._heard_at

    @property
    def pods_by_state(self) -> Counter[PodState]:
        """How many pods are in each state."""
        return Counter(self._state(pod) for pod in self._pods.values())

    @property
    def routers(self) -> dict[str, str]:
        """The URL of each router, Ready or not, by the name of its pod."""
        pods = self._sliced.by_uid.values()
        return {pod.name: pod.url for pod in pods if pod.role == "router" and pod.url}

    # ---- links -------------------------------------------------------------------------------------------------

    def _update_links(self) -> list[Change]:
        before = _by_url(self._workers.values())
        self._workers = {pod.uid: worker for pod in self._pods.values() if (worker := self._wanted(pod))}
        after = _by_url(self._workers.values())
        recovered = self._newly_ready()
        self._note_terminating()
        self._unusable &= self._pods.keys()
        return [
            *(HangUpPod(worker) for url, worker in before.items() if url not in after),
            *(DialPod(worker) for url, worker in after.items() if url not in before),
            *(RedialPod(worker) for worker in recovered if worker.url in before),
        ]

    def _wanted(self, pod: Pod) -> WorkerAddress | None:
        """The worker to have a link to, if any: a new one must be Ready to serve, one that is linked need not be."""
        if pod.ready and not pod.url and pod.uid not in self._unusable:
            self._unusable.add(pod.uid)
            reason = "Ready, but its EndpointSlice has no port named links"
            self._notes.append(Note("discovery.unusable", {"pod": pod.name, "reason": reason}, "warning"))
        if not pod.url:
            return None
        worker = WorkerAddress(pod.role, pod.url, pod.name)
        kept = self._workers.get(pod.uid) == worker
        new = pod.ready and not pod.terminating and pod.uid in self._mine
        return worker if kept or new else None

    def _divide(self) -> None:
        """Find the workers of this router's cells anew, if a worker or a router came or went."""
        pods = [pod for pod in self._sliced.by_uid.values() if not pod.terminating]
        routers = frozenset((self._router, *(pod.name for pod in pods if pod.role == "router")))
        prefill, decode = (frozenset(pod.uid for pod in pods if pod.role == role) for role in WORKER_ROLES)
        if self._divided != (routers, prefill, decode):
            self._divided = (routers, prefill, decode)
            self._mine = workers_of(self._router, routers, prefill, decode, self._cell_workers_max)

    def _newly_ready(self) -> list[WorkerAddress]:
        before, self._ready = self._ready, {uid for uid in self._workers if self._pods[uid].ready}
        return [worker for uid, worker in self._workers.items() if uid in self._ready - before]

    def _note_terminating(self) -> None:
        before, self._terminating = (
            self._terminating,
            {uid for uid in self._workers if self._pods[uid].terminating},
        )
        for uid, worker in self._workers.items():
            if uid in self._terminating - before:
                fields = {"pod": worker.pod, "worker_role": worker.role, "address": worker.url}
                self._notes.append(Note("discovery.terminating", fields))

    def _state(self, pod: Pod) -> PodState:
        if pod.uid in self._sliced.absent:
            return "absent"
        if pod.terminating:
            return "terminating"
        if pod.uid in self._workers:
            return "dialed"
        return "waiting" if pod.uid in self._mine else "elsewhere"

    # ---- the API server ----------------------------------------------------------------------------------------

    def _recover(self, now: float) -> None:
        if not self.ready:
            self._notes.append(Note("discovery.synced", {"pods": len(self._pods)}))
        elif self._trouble is not None:
            seconds = round(now - self._troubled_at, 1)
            self._notes.append(Note("discovery.back", {"pods": len(self._pods), "seconds": seconds}))
        self.ready = self.reachable = True
        self._trouble = None

    def _note_failure(self, trouble: Unreachable | Denied, now: float) -> None:
        """One line when the trouble begins or changes, not one an attempt."""
        if self._trouble is None:
            self._troubled_at = now
        new = type(trouble) is not type(self._trouble)
        self._trouble, self.reachable = trouble, False
        if isinstance(trouble, Denied):
            self.waiting_for = (
                f"permission to {trouble.verb} endpointslices in the namespace {trouble.namespace}"
            )
        else:
            self.waiting_for = f"the API server: {trouble.reason}"
        if new:
            self._notes.append(self._note_of(trouble))

    def _note_of(self, trouble: Unreachable | Denied) -> Note:
        if isinstance(trouble, Denied):
            fields = {
                "verb": trouble.verb,
                "resource": "endpointslices",
                "namespace": trouble.namespace,
                "remedy": "bind a Role with list and watch of endpointslices.discovery.k8s.io to this router's account",
                "detail": trouble.detail,
                "pods": len(self._pods),
            }
            return Note("discovery.denied", fields, "error")
        doing = "serving with the last known fleet" if self.ready else "not ready until it answers"
        fields = {"reason": trouble.reason, "doing": doing, "pods": len(self._pods)}
        return Note("discovery.unreachable", fields, "warning")


def _by_url(workers: Iterable[WorkerAddress]) -> dict[str, WorkerAddress]:
    """The first worker of each address."""
    found: dict[str, WorkerAddress] = {}
    for worker in workers:
        found.setdefault(worker.url, worker)
    return found


# ---- which workers a router dials in a fleet that is too large for every router to dial every worker -----------------
# The fleet is divided into cells of prefill and decode workers that serve together, as few as the size of a cell
# allows. A router serves one cell or a few, and sees no other worker. Every router works that out by itself, from the
# names of the workers and routers that it knows; there is nothing to agree on.
#
# Both divisions are rendezvous hashing with quotas: each name ranks the cells by a hash, and the best ranked pairs of
# name and cell come first until a cell has its share. So one name more or less moves few others, and the shares differ
# by one at most:
#
#     workers    each role on its own, so that every cell has both roles in the fleet's own ratio
#     routers    at least two for each cell: each serves one cell where there are enough of them. Else each cell takes
#                the two that rank it best, and a router that no cell took serves the one that it ranks best
#
# One cell serves everything while a role has so few workers that a cell would have none, however many the other role
# has. Routers that for a moment know different pods divide them differently. That costs nothing: a link is not ended
# because its worker is in another cell now.


ROUTERS_MIN = 2  # of a cell


def workers_of(
    router: str, routers: Collection[str], prefill: Collection[str], decode: Collection[str], size_max: int
) -> frozenset[str]:
    """The names of the workers that `router`, one of `routers`, dials; `size_max` is the most workers of a cell."""
    count = cells_of(len(prefill), len(decode), size_max)
    if count == 1:
        return frozenset((*prefill, *decode))
    mine = served_cells(routers, count)[router]
    cells = divide(prefill, count) | divide(decode, count)
    return frozenset(name for name, cell in cells.items() if cell in mine)


def cells_of(prefill: int, decode: int, size_max: int) -> int:
    """How many cells a fleet is divided into; more than one only if each has both roles, or all are decode workers."""
    most = max(1, min(prefill, decode) if prefill else decode)
    return next((n for n in range(1, most) if -(-prefill // n) + -(-decode // n) <= size_max), most)


def served_cells(routers: Collection[str], count: int) -> dict[str, frozenset[int]]:
    """The cells of each router."""
    if len(routers) >= ROUTERS_MIN * count:
        return {router: frozenset([cell]) for router, cell in divide(routers, count).items()}
    taken: dict[str, set[int]] = {router: set() for router in routers}
    for cell in range(count):
        for router in sorted(routers, key=lambda router: _rank(router, cell))[:ROUTERS_MIN]:
            taken[router].add(cell)
    return {
        router: frozenset(cells or {min(range(count), key=lambda cell: _rank(router, cell))})
        for router, cells in taken.items()
    }


def divide(names: Collection[str], count: int) -> dict[str, int]:
    """The cell of each name: shares differ by one at most, and one name more or less moves few others."""
    share, larger = divmod(len(names), count)
    sizes = [0] * count
    found: dict[str, int] = {}
    for _, name, cell in sorted((_rank(name, cell), name, cell) for name in names for cell in range(count)):
        if name in found or sizes[cell] > share or (sizes[cell] == share and not larger):
            continue
        larger -= sizes[cell] == share
        sizes[cell] += 1
        found[name] = cell
    return found


def _rank(name: str, cell: int) -> bytes:
    return blake2b(f"{cell}@{name}".encode(), digest_size=8).digest()
