"""One simulated deployment from its first request to the proof that nothing is left of any.

    run ─► requests come, faults strike, clients listen ─► all have ended ─► heal ─► settle ─► prove

Everything is deterministic in the scenario: two runs give equal journals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from router.core.drain import RouterDrainState
from router.core.effects import RequestFailed
from shared.kv.page_pool import PageState
from shared.links.events import Received, peer_name
from shared.primitives.errors import SegueError
from shared.wire.messages import Cancel, Paused, Role
from tests.simulation.adversaries import false_pauses
from tests.simulation.adversaries.lies import Lie, Lies
from tests.simulation.adversaries.nonsense import RefusedNonsense, unsound_command
from tests.simulation.adversaries.thief import Thief
from tests.simulation.judges.groups import prove_prompts_are_computed_once
from tests.simulation.judges.lost_ranks import prove_unlinked_soon
from tests.simulation.judges.prompts import JudgedPrefill
from tests.simulation.judges.tenancy import TenantWitness, prove_caches_are_apart
from tests.simulation.scenarios.faults import (
    FALSE_PAUSE,
    FORGET,
    HANG,
    LIE,
    LOSE_RANK,
    NONSENSE,
    SWALLOW,
    THEFT,
    Fault,
)
from tests.simulation.scenarios.scenario import SimulationScenario, dialed
from tests.simulation.world.clients import Router, SimulatedClient
from tests.simulation.world.fabric import Fabric
from tests.simulation.world.network import Network, SimulatedLink
from tests.simulation.world.timeline import Journal, Timeline, TimelineProcess
from tests.simulation.world.versions import understood_by
from tests.simulation.world.worker import SimulatedWorker, Surroundings

END_SECONDS_MAX = 300.0  # every deadline of the cores is shorter, also those of several attempts
SWALLOW_SECONDS = 60.0  # somebody has seen by then that a worker does nothing, and mends it
SETTLE_SECONDS = 8.0  # after the last end: leases expire, slow reads end, sessions come back

KILL_GRACE_SECONDS = 1.0  # after the time to drain: a worker that has not exited by then is killed

PROOFS = (SegueError, AssertionError)  # raised on purpose, for a state that must not be
# Raised by accident, in the code or in a mutation of it.
CRASHES = (LookupError, AttributeError, ValueError, TypeError)

Machine = SimulatedWorker | Router
AnyMachine = TypeVar("AnyMachine", SimulatedWorker, Router, Machine)


class SimulationError(Exception):
    """The world is not as it should be. `proven`: by an invariant, the oracle or a bound; else the code crashed."""

    def __init__(self, message: str, *, proven: bool = True):
        super().__init__(message)
        self.proven = proven


class World:
    """All processes of a scenario."""

    def __init__(self, scenario: SimulationScenario, show: Callable[[str], None] | None = None):
        self.scenario = scenario
        self.timeline = Timeline()
        self.journal = Journal(self.timeline, show)
        self.counts: Counter[str] = Counter()
        self.clients = [SimulatedClient(planned) for planned in scenario.requests]
        self._not_ended = list(self.clients)  # and some that have: the last one has not, or was not asked
        self._rng = scenario.random("world")
        self._nonsense = RefusedNonsense(self.count)
        self.lies = Lies(self.count, self._note_deceived)
        self.network = Network(
            scenario.network, scenario.random("network"), self.count, self.lies, self._nonsense.judge
        )
        self.fabric = Fabric(
            scenario.fabric,
            scenario.random("fabric"),
            self.count,
            scenario.random("renewals"),
            scenario.random("slices"),
            scenario.random("endings"),
        )
        self.thief = Thief(self.fabric, scenario.random("thief"), self.count)
        self.workers: dict[str, SimulatedWorker] = {}
        self.routers: dict[str, Router] = {}
        self.all_workers: list[SimulatedWorker] = []  # also those that are dead
        self.all_routers: list[Router] = []
        self._witnesses: dict[Router, TenantWitness] = {}
        self._healed = False
        self._dialed: dict[str, frozenset[str]] = {}  # workers by router

    def run(self) -> None:
        """Live through the scenario; raises `SimulationError`."""
        try:
            self._start()
            self._advance_until(self._all_ended, END_SECONDS_MAX)
            self._heal()
            settled_at = self.timeline.now + SETTLE_SECONDS
            self._advance_until(lambda: self.timeline.now >= settled_at, settled_at + 1)
            self._prove_nothing_is_left()
        except (*PROOFS, *CRASHES) as error:
            story = f"at {self.timeline.now:.3f} s: {type(error).__name__}: {error}"
            raise SimulationError(story, proven=isinstance(error, PROOFS)) from error

    def count(self, name: str) -> None:
        """Something happened that the report is about."""
        self.counts[name] += 1
        self.journal.note("", name)

    def _note_deceived(self, rid: str) -> None:
        for client in self.clients:
            client.deceived |= client.planned.rid == rid

    # ---- what happens ----

    def _start(self) -> None:
        sizes = self.scenario.sizes
        self._dialed = dialed(sizes)
        if len(set(self._dialed.values())) > 1:
            self.count("path a fleet is divided into cells")
        for number in range(sizes.prefill_workers):
            self._start_worker("prefill", f"prefill-{number}")
        for number in range(sizes.decode_workers):
            self._start_worker("decode", f"decode-{number}")
        for number in range(sizes.routers):
            self._start_router(f"router-{number}")
        for client in self.clients:
            self.timeline.at(client.planned.at, lambda client=client: self._submit(client))  # type: ignore[misc]
        for fault in self.scenario.faults:
            self.timeline.at(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _submit(self, client: SimulatedClient) -> None:
        router = self.routers.get(f"router-{client.planned.router}")
        if router is None:
            client.disconnected = True
        else:
            router.take(client)

    def _start_worker(self, role: Role, uid: str) -> None:
        worker = SimulatedWorker(role, uid, TimelineProcess(self.timeline, uid), self._surroundings(uid))
        self.workers[uid] = worker
        self.all_workers.append(worker)
        for name, router in self.routers.items():
            if uid in self._dialed[name]:
                self.network.connect(router, worker)

    def _start_router(self, uid: str) -> None:
        router = Router(uid, TimelineProcess(self.timeline, uid), self._surroundings(uid), self.journal.note)
        self.routers[uid] = router
        self._witnesses[router] = TenantWitness(router.core)
        self.all_routers.append(router)
        for name, worker in self.workers.items():
            if name in self._dialed[uid]:
                self.network.connect(router, worker)

    def _surroundings(self, uid: str) -> Surroundings:
        machines: list[Machine] = [*self.all_workers, *self.all_routers]
        before = [machine.hello for machine in machines if machine.hello.uid == uid]
        understands = understood_by(self.scenario.random, uid, restarts=len(before))
        if before and before[-1].understands != understands:
            self.count("path a process came again in a newer version")
        return Surroundings(self.scenario, self.network, self.fabric, self._rng, self.count, understands)

    # ---- faults ----

    def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case "crash prefill" | "crash decode" | "crash router":
                role = fault.kind.split()[1]
                self._crash(self._victim(fault, [m for m in self._machines() if m.hello.role == role]), fault)
            case "drain prefill" | "drain decode":
                role = fault.kind.split()[1]
                self._drain(
                    self._victim(fault, [w for w in self.workers.values() if w.hello.role == role]), fault
                )
            case "drain router":
                serving = [r for r in self.routers.values() if r.drain.state is RouterDrainState.SERVING]
                self._end_router(self._victim(fault, serving), fault)
            case "stop router":
                self._end_router(self._victim(fault, list(self.routers.values())), fault)
            case "freeze" | "long freeze":
                self._freeze(self._victim(fault, self._machines()), fault)
            case kind if kind in (HANG, LOSE_RANK):
                self._stand_still(fault)
            case kind if kind in (FALSE_PAUSE, FORGET, LIE, NONSENSE, SWALLOW, THEFT):
                self._confuse(fault)
            case "isolation":
                victim = self._victim(fault, list(self.workers.values()))
                self._break(self.network.links_of(victim.process) if victim else [], fault)
            case "loss" | "reconnect":
                links = self.network.links
                self._break([links[fault.choice % len(links)]] if links else [], fault)

    def _send_nonsense(self, fault: Fault) -> None:
        links = [link for link in self.network.links if link.router.up and not link.router.torn]
        if not links:
            return
        self.count(f"fault {fault.kind}")
        rid = f"nonsense-{len(self._nonsense.rids)}"
        self._nonsense.rids.add(rid)
        link = links[fault.choice % len(links)]
        holder = self.all_workers[fault.choice % len(self.all_workers)].agent.holder
        link.send(link.router, unsound_command(link.worker.endpoint.hello, rid, holder, fault.choice))

    def _pause_falsely(self, fault: Fault) -> None:
        """A worker tells a router that knows the message that requests are paused."""
        links = [
            link
            for link in self.network.links
            if link.worker.up and not link.worker.torn and link.worker.process.runs
            if link.router.endpoint.hello.reads(Paused)
        ]
        if not links:
            return
        self.count(f"fault {fault.kind}")
        link = links[fault.choice % len(links)]
        router, choice = self.routers[link.router.endpoint.hello.uid], fault.choice // len(links)
        ways = false_pauses.SOUND if self.scenario.calm else false_pauses.WAYS
        way = ways[choice % len(ways)]
        if way not in false_pauses.SOUND:
            self.lies.tell_now(link.worker.endpoint, Lie(way, Paused.__name__, choice // len(ways)))
        own = router.held_by(link.worker.peer)
        others = [
            router.held_by(worker) for worker in router.core.fleet.workers if worker != link.worker.peer
        ]
        elsewhere = {rid: attempt for held in others for rid, attempt in held.items()}
        for paused in false_pauses.false_pauses(way, own, elsewhere, choice // len(ways)):
            link.send(link.worker, paused)

    def _break(self, links: list[SimulatedLink], fault: Fault) -> None:
        broken = [link for link in links if link.break_off(fault.kind, both_ways=fault.kind != "loss")]
        if broken:
            self.count(f"fault {fault.kind}")

    def _machines(self) -> list[Machine]:
        return [*self.workers.values(), *self.routers.values()]

    def _victim(self, fault: Fault, machines: Sequence[AnyMachine]) -> AnyMachine | None:
        running = [machine for machine in machines if machine.process.runs]
        return running[fault.choice % len(running)] if running else None

    def _crash(self, machine: Machine | None, fault: Fault) -> None:
        if machine is None:
            return
        self.count(f"fault {fault.kind}")
        self._remove(machine)
        uid = machine.hello.uid
        if isinstance(machine, SimulatedWorker):
            role = machine.hello.role
            self.timeline.after(fault.seconds, lambda: self._start_worker(role, uid))
        else:
            self.timeline.after(fault.seconds, lambda: self._start_router(uid))

    def _drain(self, worker: SimulatedWorker | None, fault: Fault) -> None:
        """A worker is asked to end: it exits by itself, or is killed when it is long overdue, as Kubernetes does."""
        if worker is None or worker.draining:
            return
        self.count(f"fault {fault.kind}")

        def ended(*, closes_links: bool) -> None:
            if not worker.process.alive:
                return
            if not closes_links:
                self.count("path killed")
            self._remove(worker, closes_links=closes_links)
            self.timeline.after(
                fault.seconds, lambda: self._start_worker(worker.hello.role, worker.hello.uid)
            )

        def exits() -> None:
            self.count(f"path exit {worker.notes[-1].event}")
            ended(closes_links=True)

        worker.sigterm(exits)
        stays = any(self._stays(other, worker.hello.role) for other in self.workers.values())
        if self.scenario.sizes.small_pages and not stays:
            self.count("path no large worker stayed")
        self.timeline.after(
            self.scenario.sizes.drain_seconds + KILL_GRACE_SECONDS, lambda: ended(closes_links=False)
        )

    def _stays(self, worker: SimulatedWorker, role: Role) -> bool:
        """Whether it is a worker of the role that does not leave, and not the small one."""
        return worker.hello.role == role and not worker.draining and worker.hello.uid != f"{role}-0"

    def _end_router(self, router: Router | None, fault: Fault) -> None:
        """A router gets a signal: `RouterDrain` decides when it exits."""
        if router is None:
            return
        self.count(f"fault {fault.kind}")

        def exit_now() -> None:
            self.count("path router ended")
            self._remove(router, closes_links=True)
            self.timeline.after(fault.seconds, lambda: self._start_router(router.hello.uid))

        router.end(exit_now, at_once=fault.kind == "stop router")

    def _remove(self, machine: Machine, *, closes_links: bool = False) -> None:
        machine.process.kill()
        self.network.died(machine.process, closes_links=closes_links)
        if isinstance(machine, SimulatedWorker):
            del self.workers[machine.hello.uid]
            self.lies.dead.add(peer_name(machine.hello))
            self.fabric.died(machine.agent.holder.agent)
        else:
            del self.routers[machine.hello.uid]
            for client in machine.clients.values():
                client.disconnected = client.disconnected or not client.ended

    def _freeze(self, machine: Machine | None, fault: Fault) -> None:
        if machine is None:
            return
        self.count(f"fault {fault.kind}")
        process = machine.process
        process.freeze()
        if fault.seconds > self.scenario.network.silence_seconds:
            self.timeline.after(self.scenario.network.silence_seconds, lambda: self.network.silent(process))
        self.timeline.after(fault.seconds, process.thaw)

    def _confuse(self, fault: Fault) -> None:
        if fault.kind == NONSENSE:
            self._send_nonsense(fault)
        elif fault.kind == FALSE_PAUSE:
            self._pause_falsely(fault)
        elif fault.kind == THEFT:
            self.count(f"fault {fault.kind}")
            self.thief.steal()
        elif fault.kind == LIE:
            self.lies.plan(self._victim(fault, list(self.workers.values())), fault)
        elif fault.kind == SWALLOW:
            liar = self._victim(fault, list(self.workers.values()))
            self.lies.swallow(liar, fault)
            self.timeline.after(SWALLOW_SECONDS, lambda: self.lies.recover(liar))
        else:
            self._forget(fault)

    def _forget(self, fault: Fault) -> None:
        """A worker drops a request as if it were cancelled, though nobody has asked for that."""
        worker = self._victim(
            fault, [worker for worker in self.workers.values() if worker.scheduler.requests]
        )
        if worker is None:
            return
        self.count(f"fault {fault.kind}")
        requests = worker.scheduler.requests
        req = requests[fault.choice % len(requests)]
        self.lies.forgetful.add(peer_name(worker.hello))
        worker.deliver(Received(req.router, Cancel(req.rid, req.attempt)))

    def _hang(self, worker: SimulatedWorker | None, fault: Fault) -> None:
        if worker is None or self._healed:  # it may last for ever
            return
        self.count(f"fault {fault.kind}")
        worker.hang()

        def look() -> None:
            if worker.watch.hangs(self.timeline.now):
                for link in self.network.links_of(worker.process):
                    link.loop_hangs()
            elif (
                worker.watch.deadline > self.timeline.now
            ):  # a turn that waits for a step hears links behind it, too
                worker.process.at(worker.watch.deadline, look)

        worker.process.after(self.scenario.sizes.step_seconds_max, look)
        worker.process.after(fault.seconds, worker.resume)

    def _stand_still(self, fault: Fault) -> None:
        turning = [worker for worker in self.workers.values() if not worker.hanging]
        if fault.kind == HANG:
            self._hang(self._victim(fault, turning), fault)
        else:
            several = [worker for worker in turning if worker.agent.ranks > 1 and not worker.draining]
            self._lose_rank(self._victim(fault, several), fault)

    def _lose_rank(self, worker: SimulatedWorker | None, fault: Fault) -> None:
        """The device completes nothing, links end at once; the process follows within a second, as its memory may."""
        if worker is None or self._healed:
            return
        self.count(f"fault {fault.kind}")
        worker.hang()
        prove_unlinked_soon(self.network, worker)
        if fault.choice % 2:
            self.count("path a lost rank cannot be read")
            self.fabric.lose_rank(worker.agent.holder.agent)
        self._exit_without_rank(worker, fault)

    def _exit_without_rank(self, worker: SimulatedWorker, fault: Fault) -> None:
        for link in self.network.links_of(worker.process):
            link.loop_hangs()

        def gone() -> None:
            if worker.process.alive:
                self._remove(worker)
                self.timeline.after(
                    fault.seconds, lambda: self._start_worker(worker.hello.role, worker.hello.uid)
                )

        self.timeline.after((fault.choice % 97) / 97, gone)

    def _heal(self) -> None:
        self._healed = True
        for worker in list(self.workers.values()):  # one that drains may exit at once
            worker.resume()
        for machine in self._machines():
            if machine.process.frozen:
                machine.process.thaw()

    # ---- the end ----

    def _advance_until(self, done: Callable[[], bool], seconds_max: float) -> None:
        while not done():
            if not self.timeline.advance() or self.timeline.now > seconds_max:
                waiting = [client.planned.rid for client in self.clients if not client.ended]
                raise SimulationError(f"still not ended at {self.timeline.now:.3f} s: {waiting}")

    def _all_ended(self) -> bool:
        while self._not_ended and self._not_ended[-1].ended:
            self._not_ended.pop()
        return not self._not_ended and len(self.routers) == self.scenario.sizes.routers

    def _prove_nothing_is_left(self) -> None:
        for router in self.routers.values():
            assert not any(router.core.requests_by_state.values()), f"{router.hello.uid} still has requests"
            weights = self.scenario.sizes.tenant_weights
            self._witnesses[router].prove_charges(router.clients.values(), weights)
            for known in router.core.fleet.workers.values():
                assert not known.assigned, f"{router.hello.uid} counts {known.assigned} at {known.peer}"
                assert not known.leases, f"{router.hello.uid} counts leases {known.leases} at {known.peer}"
                assert not known.reserved, f"{router.hello.uid} keeps room {known.reserved} at {known.peer}"
        for uid, peer in self.network.sessions:  # else a router would give a linked worker nothing
            assert peer in self.routers[uid].core.fleet.workers, f"{peer} has a session, and nobody knows it"
        for worker in self.workers.values():
            self._prove_empty(worker)
        prove_caches_are_apart(self.clients, self.scenario.sizes)
        self._prove_prompts_are_computed_once()
        if self.scenario.calm:
            slow = self.counts["fetch that may take too long"]  # such a fetch may be given up, and is a loss
            partition = (
                self.scenario.fabric.partition
            )  # who has room may be whom it keeps from the pages, twice
            # While the small worker is alone, what does not fit it waits until another one is back, if that is soon;
            # and what comes then is refused.
            no_large = self.counts["path no large worker stayed"]
            may_exhaust = slow or (partition and self.scenario.sizes.losses_max == 1)
            failed = {
                client.planned.rid: client.outcome.code
                for client in self.clients
                if isinstance(client.outcome, RequestFailed)
                and not (may_exhaust and client.outcome.code == "attempts_exhausted")
                and not (no_large and client.outcome.code == "no_worker")
                and not (
                    no_large and client.outcome.code == "context_length_exceeded" and self._too_large(client)
                )
            }
            assert not failed, f"{failed} failed in a calm world"
            if not no_large:
                assert not self.counts["path answer cut by a draining router"], "cut in a calm world"
            causes = {cause for router in self.all_routers for cause in +router.core.counters.continuations}
            if not (self.counts["path exit worker.ended_with_work"] or self.counts["path killed"]):
                allowed = {"retracted", "holder_drains", "holder_full"}
                allowed |= {"unreachable"} if partition or slow else set()
                assert causes <= allowed, f"requests had to continue after {causes} in a calm world"

    def _too_large(self, client: SimulatedClient) -> bool:
        """Whether no worker was asked to take the request, and the small one could not."""
        planned, sizes = client.planned, self.scenario.sizes
        tokens = len(planned.prompt) + planned.params.max_new_tokens
        return not client.attempts and tokens > sizes.small_pages * sizes.page_size

    def _prove_prompts_are_computed_once(self) -> None:
        schedulers = [worker.scheduler for worker in self.all_workers]
        prefill = [each for each in schedulers if isinstance(each, JudgedPrefill)]
        judged = prove_prompts_are_computed_once(self.scenario, prefill)
        self.counts["path a group computed its prompt once"] += judged

    def _prove_empty(self, worker: SimulatedWorker) -> None:
        worker.scheduler.check()
        uid, scheduler = worker.hello.uid, worker.scheduler
        assert not worker.scheduler.requests, f"{uid} still has {[r.rid for r in worker.scheduler.requests]}"
        pool, cache = scheduler.memory.pool, scheduler.memory.cache
        endless = len(worker.agent.endless_pages)
        left = {
            state.name: pool.count(state)
            for state in PageState
            if state not in (PageState.FREE, PageState.TREE) and pool.count(state)
        }
        assert left == ({"QUARANTINED": endless} if endless else {}), f"{uid} still has pages {left}"
        assert not cache.locks, f"{uid} still has {cache.locks} locks"
        assert not scheduler.slots_used, f"{uid} still uses {scheduler.slots_used} slots"
        assert not any(worker.agent.words.values), f"{uid} still has lease words"
