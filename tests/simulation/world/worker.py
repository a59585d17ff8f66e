"""A worker process of the simulated world: the real event loop around a real scheduler, everything else simulated.

The world drives the two halves of the loop's turn: `begin` when there is something to do, `finish` when the step
that it waits for has completed. The scheduler proves its books after each half that did anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from shared.batch.effects import Note
from shared.engine.sampling.masks import Constraints
from shared.links.events import LinkEvent, Received
from shared.primitives.loop_watch import LoopWatch
from shared.scheduling.drain import DrainStep, WorkerDrain
from shared.scheduling.event_loop import IDLE_WAIT_SECONDS_MAX, EventLoop
from shared.wire.baton import Holder, agent_name
from shared.wire.messages import Hello, Limits, Message, Role
from shared.worker.grammar_gate import GrammarGate
from tests.doubles.novelty import Novelty
from tests.simulation.judges.admissions import JudgedDecode
from tests.simulation.judges.masks import JudgedBudget
from tests.simulation.judges.prompts import JudgedPrefill
from tests.simulation.oracle.device import OracleDevice, Pages
from tests.simulation.oracle.model import EOS_TOKEN_IDS, VOCAB_SIZE
from tests.simulation.oracle.toy_grammar import ToyClock, ToyGrammars
from tests.simulation.scenarios.scenario import CONTEXT_LEN, ScenarioSizes, SimulationScenario
from tests.simulation.scenarios.settings import MODEL_NAME, decode_config, prefill_config
from tests.simulation.world.fabric import PAGE_BYTES, Agent, Fabric, FabricWords
from tests.simulation.world.network import Network
from tests.simulation.world.timeline import TimelineProcess
from tests.simulation.world.versions import Novelties
from tests.simulation.world.witness import Witness

TURN_SECONDS = 0.0005  # what the CPU takes for a turn


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process is started into."""

    scenario: SimulationScenario
    network: Network
    fabric: Fabric
    rng: random.Random
    count: Callable[[str], None]  # notes that something happened, by name
    understands: tuple[str, ...]  # the messages that its version knows beyond those of today


def _hello(role: Role, uid: str, epoch: int, sizes: ScenarioSizes) -> Hello:
    number = int(uid.rpartition("-")[2])
    odd = sizes.odd_kv_format and role == "decode" and number == sizes.decode_workers - 1
    slots = sizes.prefill_slots if role == "prefill" else sizes.decode_slots
    reticent = sizes.reticent and number == 0
    extend_tokens = sizes.local_tokens_max if role == "decode" else sizes.chunked_prefill_size
    return Hello(
        session=0,
        role=role,
        uid=uid,
        epoch=epoch,
        model_name=MODEL_NAME,
        model="oracle 1",
        kv_format="odd pages" if odd else "oracle pages",
        determinism="oracle",
        features=("allowed_token_ids", "bad_words", "grammar", "logprobs", "prompt_logprobs"),
        limits=Limits(slots=slots)
        if reticent
        else Limits(
            CONTEXT_LEN, sizes.page_size, sizes.pages(role, number), slots, VOCAB_SIZE, extend_tokens
        ),
    )


class SimulatedWorker:
    """One prefill or decode process, from its start to its death."""

    def __init__(self, role: Role, uid: str, process: TimelineProcess, world: Surroundings):
        scenario, sizes = world.scenario, world.scenario.sizes
        number = int(uid.rpartition("-")[2])
        pages = sizes.pages(role, number)
        epoch = world.rng.getrandbits(64)
        self.process = process
        self._network = world.network
        self.hello = msgspec.structs.replace(_hello(role, uid, epoch, sizes), understands=world.understands)
        kv_format = self.hello.kv_format
        clock = ToyClock(scenario.random(f"masks of {uid}"))
        grammars = ToyGrammars(process, world.rng, VOCAB_SIZE, self.wake, clock)
        self.budget = JudgedBudget(clock)
        self.device = OracleDevice(
            process=process,
            pages=Pages(pages, sizes.page_size, salt=epoch),
            host_pages=Pages(sizes.host_pages, sizes.page_size, salt=epoch + 1),
            speed=scenario.speed.slowed(world.rng.choice((1, 1, 1, 5))),
            rng=world.rng,
            on_copied=self.wake,
            constraints=Constraints(grammars, VOCAB_SIZE, self.budget),
            ranks=self._ranks(sizes),
            followers=scenario.random(f"copies of the ranks of {uid} {epoch}"),
        )
        self.gate = GrammarGate(self, grammars)
        self.agent = self._make_agent(world, uid, epoch)
        self.scheduler = (
            _prefill(sizes, pages, self.agent, kv_format)
            if role == "prefill"
            else _decode(sizes, pages, self.agent, kv_format)
        )
        self.witness = Witness(self.scheduler, world.count)
        self.notes: list[Note] = []
        self.loop = EventLoop(
            self.witness,
            self.device,
            self.agent,
            self.gate,
            self._now,
            self.notes.append,
            overlap=sizes.overlap,
            launches_cost=sizes.launches_cost,
        )
        self.watch = LoopWatch(sizes.step_seconds_max)
        self.hanging = False
        self._held_up: list[Callable[[], None]] = []  # what the loop would do if it did not hang
        self.drain = WorkerDrain(sizes.drain_seconds)
        self.draining = False
        self._on_exit: Callable[[], None] = lambda: None
        self._inbox: list[LinkEvent] = []
        self._novelties = Novelties(self.hello, scenario.random, world.count)
        self._turns = 0  # scheduled so far
        self._turn_at: float | None = None  # when the next begins; None while one is under way
        self.turn_at(process.now)

    def _make_agent(self, world: Surroundings, uid: str, epoch: int) -> Agent:
        nonces = world.scenario.random(f"nonces of {uid} {epoch}")
        agent = Agent(
            world.fabric,
            self.process,
            Holder(uid, epoch, agent_name(uid, epoch), b"", 0, PAGE_BYTES, 0),
            self.device.pages,
            FabricWords(self.process, world.scenario.sizes.leases_max, partial(nonces.getrandbits, 64)),
            world.scenario.sizes.fetch_seconds_max,
            on_event=self.wake,
            newer=bool(world.understands),
            ranks=self._ranks(world.scenario.sizes),
        )
        world.fabric.agents[agent.holder.agent] = agent
        return agent

    def _ranks(self, sizes: ScenarioSizes) -> int:
        return sizes.prefill_ranks if self.hello.role == "prefill" else sizes.decode_ranks

    def _now(self) -> float:
        return self.process.now

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        """What has come, but the last of several events: it comes a moment later. The waiting is done by `_rest`."""
        del timeout_seconds
        self.watch.turned(self.process.now)
        taken = max(1, len(self._inbox) - 1)
        events, self._inbox = self._inbox[:taken], self._inbox[taken:]
        return events

    def send(self, peer: str, message: Message) -> None:
        self._network.send(self, peer, message)

    def deliver(self, event: LinkEvent) -> None:
        self._inbox.append(event)
        self.wake()

    @property
    def accepts_sessions(self) -> bool:
        """Its links' thread does, unless the loop hangs for too long."""
        return not self.watch.hangs(self.process.now)

    def hang(self) -> None:
        """The loop hangs, as in a step that does not end; the links live on."""
        self.hanging = True

    def resume(self) -> None:
        """The loop goes on where it hung."""
        self.hanging = False
        held_up, self._held_up = self._held_up, []
        for action in held_up:
            self.process.do(action)

    def sigterm(self, on_exit: Callable[[], None]) -> None:
        """The process is asked to end; `on_exit` is called when it does."""
        self.draining = True
        self._on_exit = on_exit
        self.process.do(lambda: self.drain.sigterm(self.process.now))
        self.wake()

    def wake(self) -> None:
        """Something has happened that the loop notices when it is idle."""
        if self._turn_at is not None:
            self.turn_at(self.process.now)

    def turn_at(self, seconds: float) -> None:
        """Begin the next turn at `seconds`, unless it begins earlier anyway."""
        if self._turn_at is None or seconds < self._turn_at:
            self._turn_at = seconds
            self._turns += 1
            turn = self._turns
            self.process.at(seconds, lambda: self._begin(turn))

    def _begin(self, turn: int) -> None:
        if turn != self._turns:
            return  # it was woken, and this turn began earlier
        if self.hanging:
            self._held_up.append(lambda: self._begin(turn))
            return
        self._turn_at = None
        if self._exits():
            return
        heard = [event.peer for event in self._inbox if isinstance(event, Received)]
        self.loop.begin()
        self.witness.check_unless_quiet()
        self._send_novelties(heard)
        step = self.loop.awaits
        if step is None:
            self._rest()
        else:
            self.process.at(max(self.process.now, self.device.completes_at(step)), self._finish)

    def _send_novelties(self, routers: list[str]) -> None:
        for router in routers:
            if self._novelties.due():
                if self.scheduler._sessions.understands(router, Novelty):
                    self.send(router, Novelty(self.hello.uid))
                else:
                    self._novelties.without()

    def _exits(self) -> bool:
        """Do as the drain says, as `shared.worker.worker.turn_until_exit` does.

        There the turn before has waited for what comes, and has heard it before the drain is asked.
        """
        decision = self.drain.decide(self.process.now, self.scheduler)
        if decision.step is DrainStep.EXIT and self._inbox:
            return False
        if decision.note:
            self.notes.append(decision.note)
        if decision.step is DrainStep.START_DRAINING:
            self.scheduler.start_draining()
        if decision.step is DrainStep.EXIT:
            self._on_exit()
        return decision.step is DrainStep.EXIT

    def _finish(self) -> None:
        if self.hanging:
            self._held_up.append(self._finish)
            return
        self.loop.finish()
        self.witness.check_unless_quiet()
        self._rest()

    def _rest(self) -> None:
        """Go on at once while there is work; else sleep until a deadline, or until woken."""
        now = self.process.now
        seconds = TURN_SECONDS
        if not self._inbox and self.loop.patience_seconds() > 0:
            deadline = self.scheduler.next_deadline()
            until_deadline = IDLE_WAIT_SECONDS_MAX if deadline is None else deadline - now
            seconds = max(TURN_SECONDS, min(IDLE_WAIT_SECONDS_MAX, until_deadline))
        self.turn_at(now + seconds)


def _prefill(sizes: ScenarioSizes, pages: int, agent: Agent, kv_format: str) -> JudgedPrefill:
    return JudgedPrefill(
        prefill_config(sizes),
        pages=pages,
        context_len=CONTEXT_LEN,
        holder=agent.holder,
        words=agent.words,
        kv_format=kv_format,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS_TOKEN_IDS,
    )


def _decode(sizes: ScenarioSizes, pages: int, agent: Agent, kv_format: str) -> JudgedDecode:
    return JudgedDecode(
        decode_config(sizes),
        pages=pages,
        host_pages=sizes.host_pages,
        context_len=CONTEXT_LEN,
        holder=agent.holder,
        words=agent.words,
        kv_format=kv_format,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS_TOKEN_IDS,
    )
