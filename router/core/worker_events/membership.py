"""Workers that come, drain and go: what that means for the requests that they have, and what is noted of it.

It knows no queues: that something may be placed after each of these is the core's conclusion.
"""

from __future__ import annotations

from router.core.counters import RouterCounters
from router.core.effects import FleetPaired, RouterEffect
from router.core.fleet.unreachable_pairs import UnreachablePairs
from router.core.fleet.worker import Worker
from router.core.fleet.workers import Fleet
from router.core.requests.request_table import RequestTable
from router.core.requests.reservations import Deadline, Reservations
from shared.batch.effects import Note
from shared.links.events import PeerUp
from shared.wire import messages
from shared.wire.messages import WORKER_ROLES

OF_A_WORKER: tuple[Deadline, ...] = ("pause", "silent", "trial")  # deadlines that have a worker's name


class Membership:
    """Keeps the fleet up to date. Times in seconds."""

    def __init__(
        self,
        fleet: Fleet,
        requests: RequestTable,
        reservations: Reservations,
        unreachable_pairs: UnreachablePairs,
        counters: RouterCounters,
        effects: list[RouterEffect],
    ):
        # from then on no role counts as missing: workers may end along with the router
        self.router_drains = False
        self._fleet = fleet
        self._requests = requests
        self._reservations = reservations
        self._unreachable_pairs = unreachable_pairs
        self._counters = counters
        self._effects = effects
        self._missing_roles = fleet.missing
        self._paired = False  # there has been a pair of workers that can serve

    def up(self, event: PeerUp) -> None:
        """A worker has a session, and had none before."""
        worker = self._fleet.up(event.peer, event.hello)
        if isinstance(worker, str):
            self._counters.workers_refused[worker] += 1
            self._effects.append(
                Note("fleet.worker_refused", {"worker": event.peer, "cause": worker}, "warning")
            )
            return
        self._note_missing_roles()
        if not self._fleet.paired(worker):
            self._note_unpaired(worker)
        elif not self._paired:
            self._paired = True
            self._effects.append(FleetPaired())

    def down(self, peer: str, now: float) -> None:
        """A worker is lost; nothing happens if it is not known. Its requests go on elsewhere."""
        worker = self._fleet.down(peer)
        if worker is None:
            return
        if worker.draining:
            self._counters.drain_seconds.append(now - worker.draining_since)
        self._note_missing_roles()
        for kind in OF_A_WORKER:
            self._reservations.deadlines.clear((kind, peer))
        self._unreachable_pairs.down(peer)
        for rid in list(worker.reserved):
            self._reservations.forget_target(self._requests.live[rid])
        for rid in list(worker.foreseen):
            self._reservations.foresee(self._requests.live[rid], None)
        cause = f"lost_{worker.hello.role}"
        # A stream that moved, and went back to where its pages are, has both here.
        for rid in dict.fromkeys([*worker.assigned, *worker.leases]):
            live = self._requests.live[rid]
            if live.waits_on is worker:
                self._requests.lose(live, peer, cause, now)
            else:  # the decode worker will find out by itself whether it has all pages
                self._reservations.forget_lease(live)

    def drain(self, worker: Worker, now: float) -> None:
        """A worker takes nothing new from now on, and is answered that this router knows."""
        if not worker.draining:
            worker.draining_since = now
        self._fleet.drain(worker)
        self._note_missing_roles()
        self._reservations.send(worker, messages.DrainAck())
        fields = {"worker": worker.peer, "requests": len(worker.assigned), "leases": len(worker.leases)}
        self._effects.append(Note("fleet.worker_draining", fields))

    def _note_unpaired(self, worker: Worker) -> None:
        """No worker of the other role has an equal model and KV format: this one cannot serve yet."""
        alone = not self._fleet.of_role("decode" if worker.hello.role == "prefill" else "prefill")
        fields = {"worker": worker.peer, "model": worker.hello.model, "kv_format": worker.hello.kv_format}
        self._effects.append(Note("fleet.worker_unpaired", fields, "info" if alone else "warning"))

    def _note_missing_roles(self) -> None:
        """Roles that have lost their last worker, or have one again."""
        if self.router_drains:
            return
        before, self._missing_roles = self._missing_roles, self._fleet.missing
        for role in WORKER_ROLES:
            if role in self._missing_roles and role not in before:
                self._effects.append(Note("fleet.role_missing", {"worker_role": role}, "warning"))
            elif role in before and role not in self._missing_roles:
                self._effects.append(Note("fleet.role_present", {"worker_role": role}))
