"""One virtual router: the real core, drain and effect pass; its clients read everything at once.

It also measures what the core costs: CPU time of this thread within the core's inputs, so without links, HTTP and text.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.drain import RouterDrain, RouterDrainState, RouterDrainStep
from router.core.effect_pass import EffectPass
from router.core.effects import ClientRequest, Outcome
from shared.batch.effects import Note
from shared.links.events import LinkEvent, Received
from shared.wire.messages import Generated, Hello, Load, Message
from shared.wire.sampled import Logprobs
from shared.wire.sampling_params import SamplingParams
from tests.benchmarks.virtual_cluster.device import EOS_TOKEN_ID, output_seed
from tests.benchmarks.virtual_cluster.figures import AnswerRecord, RunRecorder
from tests.benchmarks.virtual_cluster.network import VirtualNetwork
from tests.benchmarks.virtual_cluster.trace import REST_OF_CONTEXT
from tests.benchmarks.virtual_cluster.worker import MODEL_NAME
from tests.simulation.world.timeline import TimelineProcess

INPUT_KINDS = ("request", "token", "load")  # what the core's CPU time was spent on


class VirtualRouter:
    """One router process."""

    def __init__(
        self,
        uid: str,
        epoch: int,
        settings: RouterConfig,
        process: TimelineProcess,
        network: VirtualNetwork,
        context_len: int,
        recorder: RunRecorder,
    ):
        self.process = process
        self.hello = Hello(session=0, role="router", uid=uid, epoch=epoch)
        self.core = RouterCore(settings, process.now)
        self.cpu_seconds: Counter[str] = Counter()  # by INPUT_KINDS
        self.inputs: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.open: dict[str, AnswerRecord] = {}
        self.event_seconds = 0.0
        self.drain = RouterDrain(settings.endpoint_lag_seconds, settings.drain_seconds)
        self._context_len = context_len
        self._recorder = recorder
        self._network = network
        self._pass = EffectPass(self.core, self, self._set_timer)
        self._tick_at: float | None = None
        self._on_exit: Callable[[], None] = lambda: None
        network.add(self)

    # ---- what comes in ----

    @property
    def serving(self) -> bool:
        """Whether load balancers send new requests here."""
        return self.process.alive and self.drain.state is RouterDrainState.SERVING

    def submit(self, record: AnswerRecord) -> None:
        """A client sends a request; `record` notes what becomes of it."""
        traced = record.traced
        rid = f"r{traced.number}"
        prompt = traced.prompt()
        most = self._context_len - len(prompt)
        wanted = most if traced.max_new_tokens == REST_OF_CONTEXT else min(most, traced.max_new_tokens)
        request = ClientRequest(
            rid=rid,
            model=MODEL_NAME,
            token_ids=prompt,
            params=SamplingParams(max_new_tokens=wanted, seed=output_seed(traced.number, traced.output_len)),
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
            tenant=traced.tenant,
        )
        self.open[rid] = record
        began = time.thread_time()
        self.core.submit(request, self.process.now)
        self._spent("request", began)
        self._pass.run()

    def take(self, events: list[LinkEvent]) -> None:
        """Everything that the links have brought."""
        self.process.block(self.process.now + self.event_seconds * len(events))
        for event in events:
            kind = "request"
            if isinstance(event, Received):
                kind = "token" if isinstance(event.message, Generated) else kind
                kind = "load" if isinstance(event.message, Load) else kind
            began = time.thread_time()
            self.core.link(event, self.process.now)
            self._spent(kind, began)
        began = time.thread_time()
        self.core.settle(self.process.now)
        self.cpu_seconds["request"] += time.thread_time() - began  # type: ignore[assignment]
        self._pass.run()

    def _set_timer(self, deadline: float | None) -> None:
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            self.process.at(deadline, lambda: self._tick(deadline))

    def _tick(self, at: float) -> None:
        if at == self._tick_at:
            self._tick_at = None
            began = time.thread_time()
            self.core.tick(self.process.now)
            self._spent("request", began)
            self._pass.run()

    def _spent(self, kind: str, began: float) -> None:
        self.cpu_seconds[kind] += time.thread_time() - began  # type: ignore[assignment]
        self.inputs[kind] += 1

    # ---- the end ----

    def sigterm(self, on_exit: Callable[[], None]) -> None:
        """The process is asked to end; `on_exit` is called when it does."""
        self._on_exit = on_exit
        self.drain.sigterm(self.process.now)
        self._carry_out_drain()

    def _carry_out_drain(self) -> None:
        for step in self.drain.take_effects():
            if step is RouterDrainStep.BECOME_UNREADY:
                self.core.start_draining()
            elif step is RouterDrainStep.END_ANSWERS:
                for rid in list(self.open):
                    self.core.cancel(rid, self.process.now)
                self._pass.run()
            elif step is RouterDrainStep.EXIT:
                self._on_exit()
        if (deadline := self.drain.next_deadline()) is not None:
            self.process.at(deadline, self._tick_drain)

    def _tick_drain(self) -> None:
        self.drain.tick(self.process.now, len(self.open))
        self._carry_out_drain()

    # ---- effects: the pass calls these ----

    def send(self, peer: str, message: Message) -> None:
        self._network.send(self, peer, message)

    def note(self, note: Note) -> None:
        self.notes[note.event] += 1

    def tokens(self, rid: str, index: int, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        del logprobs
        self._recorder.tokens(self.open[rid], self.process.now, index, token_ids)

    def scored(self, rid: str, logprobs: Logprobs) -> None:
        raise AssertionError(f"{rid} did not ask for {len(logprobs)} scores")

    def ended(self, rid: str, outcome: Outcome) -> None:
        self._recorder.ended(self.open.pop(rid), outcome, self.process.now)

    def end_session(self, peer: str, reason: str) -> None:
        """The workers here are in order."""
        raise AssertionError(f"{peer}: {reason}")

    def paired(self) -> None:
        """The cluster knows by itself when it can serve."""
