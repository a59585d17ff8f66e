"""A router process of the simulated world, and the clients behind it, which check every token they are given.

The cores and the pass are the real ones (`RouterCore`, which `fairness` judges, `RouterDrain`, `EffectPass`); links,
clients, signals and timers are the world's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

import shared.wire.baton
from router.core.drain import RouterDrain, RouterDrainState, RouterDrainStep
from router.core.effect_pass import EffectPass
from router.core.effects import ClientRequest, Outcome, RequestAborted, RequestCompleted, RequestFailed
from router.core.requests.sampling_group import split_choices
from shared.batch.effects import Note
from shared.kv.page_pool import pages_for_tokens
from shared.links.events import LinkEvent, Received
from shared.wire.messages import Decode, FinishReason, Hello, Message
from shared.wire.sampled import Logprobs, TokenLogprobs
from tests.doubles.novelty import Novelty
from tests.simulation.judges import waits
from tests.simulation.judges.fairness import JudgedRouterCore
from tests.simulation.judges.gaps import JudgedGaps
from tests.simulation.judges.pauses import JudgedPauses
from tests.simulation.judges.silences import JudgedSilences
from tests.simulation.oracle.model import EOS_TOKEN_IDS, expected_logprobs, expected_output, expected_scores
from tests.simulation.scenarios.scenario import PlannedRequest
from tests.simulation.scenarios.settings import MODEL_NAME, router_config
from tests.simulation.world.timeline import TimelineProcess
from tests.simulation.world.versions import Novelties
from tests.simulation.world.worker import Surroundings

ROUNDING = 1e-6  # seconds
REFUSALS = (400, 429, 500, 503, 504)  # the statuses that a request of these worlds may fail with


@dataclass(eq=False)
class SimulatedClient:
    """One request, and what has come back."""

    planned: PlannedRequest
    output: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)  # of the prompt
    outcome: Outcome | None = None
    disconnected: bool = False  # its router crashed, or no longer listens: there is no answer
    ended_at: float | None = None  # seconds
    attempts: int = 0  # that its router needed
    came_at: float = 0.0  # when its router heard of it, in seconds
    # a worker has lied about it: its tokens may be wrong, but not more than it asked for
    deceived: bool = False
    cut: bool = False  # its router has ended the answer: it drained for long enough, or was stopped

    @property
    def ended(self) -> bool:
        return self.outcome is not None or self.disconnected

    def tokens(self, index: int, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        """Every token comes once, in order, and as the oracle says; and so do its logprobs, if asked for."""
        rid, known = self.planned.rid, len(self.output)
        assert self.outcome is None, f"{rid}: tokens after the end"
        assert index == known, f"{rid}: tokens {index} … after {known}"
        if self.deceived:
            self.output.extend(token_ids)
            most = self.planned.params.max_new_tokens
            assert len(self.output) <= most, f"{rid}: {len(self.output)} tokens, asked for {most}"
            return
        assert len(self.scores) == len(self.expected_scores), f"{rid}: tokens after {len(self.scores)} scores"
        self.output.extend(token_ids)
        expected = self.answer[0][: len(self.output)]
        assert tuple(self.output) == expected, f"{rid}: output {self.output}, expected {list(expected)}"
        told = self.expected_logprobs[index : len(self.output)]
        assert logprobs == told, f"{rid}: logprobs {logprobs} from {index} on"

    def scored(self, logprobs: Logprobs) -> None:
        """The logprobs of the prompt's tokens come once, in order, as the oracle says, and before all tokens."""
        rid, known = self.planned.rid, len(self.scores)
        assert not self.output, f"{rid}: scores after tokens"
        self.scores.extend(logprobs)
        if self.deceived:
            assert len(self.scores) < len(self.planned.prompt), f"{rid}: {len(self.scores)} scores"
            return
        told = self.expected_scores[known : len(self.scores)]
        assert logprobs == told, f"{rid}: scores {logprobs} from {known} on"

    def end(self, outcome: Outcome) -> None:
        """A request ends once: complete with all its tokens, stopped or gone at the client's wish, or refused."""
        rid = self.planned.rid
        assert self.outcome is None, f"{rid}: ended twice, {self.outcome} and {outcome}"
        self.outcome = outcome
        match outcome:
            case RequestCompleted(reason, usage):
                if not (self.stopped or self.deceived):
                    assert (tuple(self.output), reason) == self.answer, f"{rid}: ended early, {outcome}"
                assert usage.completion_tokens == len(self.output), f"{rid}: {usage}"
                assert usage.cached_tokens <= usage.prompt_tokens, f"{rid}: {usage}"
            case RequestFailed(code="grammar_too_complex") if not self.deceived:
                assert (tuple(self.output), None) == self.answer, f"{rid}: {outcome}"
            case RequestFailed(status):
                assert status in REFUSALS or self.deceived, f"{rid}: {outcome}"
            case RequestAborted():
                assert self.aborts or self.cut, f"{rid}: aborted by nobody"

    @cached_property
    def answer(self) -> tuple[tuple[int, ...], FinishReason | None]:
        """All tokens that must come, and why they end; None: the grammar allows no more."""
        return expected_output(self.planned.prompt, self.planned.params)

    @cached_property
    def expected_logprobs(self) -> Logprobs:
        """What is told of all tokens of the answer."""
        return expected_logprobs(self.planned.prompt, self.answer[0], self.planned.params)

    @cached_property
    def expected_scores(self) -> Logprobs:
        """What is told of its prompt; of siblings the first is told it for all."""
        is_told = self.planned.group[:1] in ((), (self.planned.rid,))
        return expected_scores(self.planned.prompt, self.planned.params) if is_told else ()

    @property
    def stopped(self) -> bool:
        """The text layer has found its stop string."""
        limit = self.planned.stop_after_tokens
        return limit is not None and len(self.output) >= limit

    @property
    def aborts(self) -> bool:
        return self.planned.abort_after_seconds is not None or self.planned.abort_after_tokens is not None


class Router:
    """One router process, from its start to its death."""

    def __init__(
        self, uid: str, process: TimelineProcess, world: Surroundings, note: Callable[[str, object], None]
    ):
        sizes = world.scenario.sizes
        self.process = process
        self.hello = Hello(
            session=0,
            role="router",
            uid=uid,
            epoch=world.rng.getrandbits(64),
            understands=world.understands,
        )
        self.clients: dict[str, SimulatedClient] = {}
        self._accepted: dict[str, SimulatedClient] = {}
        self.core = JudgedRouterCore(router_config(sizes), process.now)
        self._network = world.network
        self.core.liars = world.network.lies.liars
        self._silences = JudgedSilences(self.core, world.network.lies)
        self.held_by = self._silences.held_by  # attempts that a worker has, by rid
        self._pauses = JudgedPauses(self.core, self._silences)
        self._gaps = JudgedGaps(self.core)
        self._novelties = Novelties(self.hello, world.scenario.random, world.count)
        self._pass = EffectPass(self.core, self, self._set_timer)
        self._journal = note
        self._tick_at: float | None = None
        self._sizes = sizes
        self._count = world.count
        self.drain = RouterDrain(sizes.endpoint_lag_seconds, sizes.drain_seconds)
        self._listening = True
        self._drained_at: float | None = None  # when the first SIGTERM came
        self._stopped = False  # … and at once
        self._exit: Callable[[], None] = lambda: None

    @property
    def accepts_sessions(self) -> bool:
        """It dials them."""
        return True

    def deliver(self, event: LinkEvent) -> None:
        self.core.fails_at = self._network.fails_at
        now = self.process.now
        self._silences.hear(event, now)
        self._pauses.take(event, lambda: self.core.link(event, now))
        self.core.settle(self.process.now)
        self._pass.run()
        worker = self.core.fleet.workers.get(event.peer)
        if worker is not None and isinstance(event, Received) and self._novelties.due():
            if worker.understands(Novelty):
                self.send(event.peer, Novelty(self.hello.uid))
            else:
                self._novelties.without()

    def take(self, client: SimulatedClient) -> None:
        """A client connects; what it does later it does by itself."""
        self.clients[client.planned.rid] = client
        self.process.do(lambda: self._submit(client))

    def _submit(self, client: SimulatedClient) -> None:
        if not self._listening:
            assert self._may_refuse(), "a router refused a connection before every proxy knew that it drains"
            client.disconnected = True
            return
        self._accepted[client.planned.rid] = client
        if self._drained_at is not None:
            self._count("path request taken while draining")
        planned, client.came_at = client.planned, self.process.now
        self.core.submit(self._request(planned), self.process.now)
        self._pass.run()
        if planned.abort_after_seconds is not None:
            self.process.after(planned.abort_after_seconds, lambda: self._abort(client))

    def _request(self, planned: PlannedRequest) -> ClientRequest:
        """What the HTTP side makes of it; siblings are made from the first of their group."""
        number = planned.group.index(planned.rid) if planned.group else 0
        seed = planned.params.seed - number
        request = ClientRequest(
            rid=planned.rid,
            model=MODEL_NAME,
            token_ids=planned.prompt,
            params=msgspec.structs.replace(planned.params, seed=seed),
            priority=planned.priority,
            tenant=planned.tenant,
            cache_salt=planned.cache_salt,
            session=planned.session,
            deadline_seconds=planned.deadline_seconds,
            by_prefill=planned.by_prefill,
            eos_token_ids=EOS_TOKEN_IDS,
        )
        return split_choices(request, planned.group)[number] if planned.group else request

    def _abort(self, client: SimulatedClient) -> None:
        self.core.cancel(client.planned.rid, self.process.now)
        self._pass.run()

    def _stop(self, client: SimulatedClient) -> None:
        self.core.stop(client.planned.rid, self.process.now)
        self._pass.run()

    # ---- the end ----

    def end(self, on_exit: Callable[[], None], *, at_once: bool) -> None:
        """A signal; `on_exit` is called when the process has ended."""

        def signalled() -> None:
            now = self.process.now
            self._drained_at = now if self._drained_at is None else self._drained_at
            self._stopped = self._stopped or at_once or self.drain.state is not RouterDrainState.SERVING
            (self.drain.sigint if at_once else self.drain.sigterm)(now)
            self._carry_out_drain()

        if self._drained_at is None:
            self._exit = on_exit
        self.process.do(signalled)

    def _carry_out_drain(self) -> None:
        for effect in self.drain.take_effects():
            self._journal("", effect)
            if effect is RouterDrainStep.STOP_LISTENING:
                self._listening = False
            elif effect is RouterDrainStep.END_ANSWERS:
                self._end_answers()
            elif effect is RouterDrainStep.BECOME_UNREADY:
                self.core.start_draining()
            elif effect is RouterDrainStep.EXIT:
                assert not self._open(), f"a router ended with answers open: {self._open()}"
                self._exit()
        if self.process.alive and (deadline := self.drain.next_deadline()) is not None:
            self.process.at(deadline, self._tick_drain)

    def _tick_drain(self) -> None:
        deadline = self.drain.next_deadline()
        if deadline is not None and deadline <= self.process.now:
            self.drain.tick(self.process.now, len(self._open()))
            self._carry_out_drain()

    def _end_answers(self) -> None:
        for rid in self._open():
            assert self._may_cut(), f"{rid}: cut by a router that had time left"
            self.clients[rid].cut = True
            self._count("path answer cut by a draining router")
            self.core.cancel(rid, self.process.now)
        self._pass.run()

    def _open(self) -> list[str]:
        """Requests whose answer is not written; a connection that waits while the process is frozen is none yet."""
        return [rid for rid, client in self._accepted.items() if not client.ended]

    def _may_refuse(self) -> bool:
        return self._stopped or self._drains_for(self._sizes.endpoint_lag_seconds)

    def _may_cut(self) -> bool:
        sizes = self._sizes
        return self._stopped or self._drains_for(sizes.endpoint_lag_seconds + sizes.drain_seconds)

    def _drains_for(self, seconds: float) -> bool:
        return self._drained_at is not None and self.process.now - self._drained_at >= seconds - ROUNDING

    # ---- effects: the pass calls these ----

    def send(self, peer: str, message: Message) -> None:
        if isinstance(message, Decode):
            self._prove_baton(message)
        self._silences.sent(peer, message, self.process.now)
        self._network.send(self, peer, message)

    def _prove_baton(self, decode: Decode) -> None:
        """What a worker is told to read is the request's, at a worker that this router knows."""
        baton, rid = decode.baton, decode.rid
        holder = self.core.fleet.workers.get(baton.holder.name)
        assert holder is not None, f"{rid}: pages at {baton.holder.name}, which nobody knows"
        assert (baton.rid, baton.attempt, baton.kv_format) == (rid, decode.attempt, holder.hello.kv_format)
        assert (baton.kv_len, baton.prompt_len) == (len(decode.token_ids) - 1, decode.prompt_len), rid
        agent = shared.wire.baton.agent_name(holder.hello.uid, holder.hello.epoch)
        assert baton.holder.agent == agent, f"{rid}: pages at the agent {baton.holder.agent}, not {agent}"
        if page_size := holder.hello.limits.page_size:  # else nobody has told the router
            pages = pages_for_tokens(baton.kv_len, page_size)
            assert len(baton.pages) == pages, f"{rid}: {len(baton.pages)} pages for {baton.kv_len} tokens"

    def note(self, note: Note) -> None:
        self._silences.noted(note, self.process.now)
        self._journal("", note)

    def tokens(self, rid: str, index: int, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        self._journal(rid, token_ids)
        shown = self.core.debug(rid)
        assert shown is not None, rid
        self._pauses.tokens(rid, shown["attempts"], self.process.now)  # type: ignore[arg-type]
        self._gaps.tokens(rid, index, shown, self.process.now)
        client = self.clients[rid]
        client.tokens(index, token_ids, logprobs)
        self._hear(client)

    def scored(self, rid: str, logprobs: Logprobs) -> None:
        client = self.clients[rid]
        live = self.core.debug(rid)
        if client.scores and live and live["attempts"] != 1:
            self._count("path the rest of a prompt was scored by another attempt")
        if client.planned.group:
            self._count("path siblings had their prompt scored once")
        client.scored(logprobs)

    def ended(self, rid: str, outcome: Outcome) -> None:
        self._journal(rid, outcome)
        client = self.clients[rid]
        client.end(outcome)
        if isinstance(outcome, RequestFailed) and outcome.status == 503 and client.output:
            assert rid in self.core.stranded, f"{rid} had begun and is refused: {outcome.message}"
        client.ended_at = self.process.now
        if isinstance(outcome, RequestFailed) and outcome.code == "target_missed":
            waits.prove_target_missed(client.planned, self._sizes, outcome, self.process.now - client.came_at)
            assert not client.output, f"{rid} has its first token and is ended: {outcome.message}"
            self._count(f"path a deadline was missed: {outcome.status}")
        if isinstance(outcome, RequestFailed) and outcome.code == "attempts_exhausted":
            seconds = self.process.now - client.planned.at
            apart = (self._sizes.losses_max - 1) * self._sizes.loss_seconds
            assert seconds > apart - ROUNDING, f"{rid}: given up after {seconds} s, for one event"
        shown = self.core.debug(rid)
        client.attempts = shown["attempts"] if shown else 0  # type: ignore[assignment]

    def end_session(self, peer: str, reason: str) -> None:
        self._journal(peer, reason)
        self._network.end_session(self, peer, reason)

    def paired(self) -> None:
        self._journal("", "paired")

    def _hear(self, client: SimulatedClient) -> None:
        """The client, or the text layer, has enough."""
        planned, heard = client.planned, len(client.output)
        if client.stopped and planned.stop_delay_seconds:
            self.process.after(planned.stop_delay_seconds, lambda: self._stop(client))
        elif client.stopped:
            self.core.stop(planned.rid, self.process.now)
        elif planned.abort_after_tokens is not None and heard >= planned.abort_after_tokens:
            self.core.cancel(planned.rid, self.process.now)

    def _set_timer(self, deadline: float | None) -> None:
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            self.process.at(deadline, lambda: self._tick(deadline))

    def _tick(self, at: float) -> None:
        if at == self._tick_at:
            self._tick_at = None
            self.core.tick(self.process.now)
            self._pass.run()
