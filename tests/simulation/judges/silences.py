"""The oracle for silent workers: who is found silent was so, by all that this router has sent and heard, and in time.

It keeps books of its own: what each worker was sent and has not ended, when it last said something of that, what load
it reported, and all answers of others since the start. So a verdict is judged by the rules, whatever the core
remembers. And by the truth: who lives and has neither lied, swallowed nor forgotten anything is never found silent,
however slow, crowded, frozen or cut off it is. A router that was frozen may judge a dead worker before it hears of the
death.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from router.core.worker_events.silent_workers import COMPARED_MIN, LOOKS
from shared.batch.effects import Note
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.wire.messages import (
    Cancel,
    Decode,
    Failed,
    Finished,
    Generated,
    Joined,
    Load,
    Message,
    Migrating,
    Paused,
    Prefill,
    Prefilled,
    Refused,
    Row,
    Scored,
    Serve,
)
from tests.simulation.adversaries.lies import Lies
from tests.simulation.judges.fairness import JudgedRouterCore

ROUNDING = 1e-6  # seconds
About = Prefilled | Scored | Joined | Row | Migrating | Finished | Refused | Failed | Paused


@dataclass(slots=True)
class Sent:
    """A request that a worker has."""

    peer: str
    attempt: int
    at: float  # seconds
    tokens: int
    reported: bool  # the worker reports it: no grammar must be compiled before
    kv_group: tuple[str, str]
    whole: bool  # it does not end with its first token
    answered_at: float | None = None
    heard_at: float = 0.0  # when the worker said something of it last


class JudgedSilences:
    """What one router has sent and heard. Times in seconds."""

    def __init__(self, core: JudgedRouterCore, lies: Lies):
        self._core = core
        self._lies = lies
        self._open: defaultdict[str, dict[str, Sent]] = defaultdict(dict)  # by peer and rid, the oldest first
        self._heard: dict[str, float] = {}
        self._loads: dict[str, Load] = {}
        self._found: dict[str, float] = {}  # when, by peer
        self._changed: dict[str, float] = {}  # when a request of it ended last, by peer
        self._answers: defaultdict[tuple[str, tuple[str, str]], list[Sent]] = defaultdict(list)

    def sent(self, peer: str, message: Message, now: float) -> None:
        """This router sends something."""
        if isinstance(message, Prefill | Decode | Serve):
            worker = self._core.fleet.workers[peer]
            tokens = len(message.token_ids) if isinstance(message, Prefill) else 0
            reported = message.params.grammar is None
            whole = isinstance(message, Serve)
            sent = Sent(peer, message.attempt, now, tokens, reported, worker.kv_group, whole)
            self._prove_may_have(peer, now)
            self._open[peer][message.rid] = sent
        elif isinstance(message, Cancel):
            self._end(peer, message.rid, message.attempt, now)

    def held_by(self, peer: str) -> dict[str, int]:
        """The attempts that a worker has, by rid."""
        return {rid: sent.attempt for rid, sent in self._open[peer].items()}

    def may_pause(self, peer: str, paused: Paused) -> bool:
        """Whether the worker has the attempt and decodes it: prompts do not pause, wherever they are computed."""
        worker, sent = self._core.fleet.workers.get(peer), self._open[peer].get(paused.rid)
        if worker is None or worker.hello.role == "prefill" or sent is None or sent.attempt != paused.attempt:
            return False
        return not sent.whole or sent.answered_at is not None

    def hear(self, event: LinkEvent, now: float) -> None:
        """A worker says something, comes or goes."""
        match event:
            case PeerUp(peer, _) | PeerDown(peer, _):
                for books in (self._open, self._heard, self._loads, self._found):
                    books.pop(peer, None)
            case Received(peer, _) if peer not in self._core.fleet.workers:
                pass  # it was dropped, and its session ends: nothing that it still says counts
            case Received(peer, Load() as load):
                self._loads[peer] = load
            case Received(peer, Generated(rows)):
                for row in rows:
                    self._hear_about(peer, row, now)
            case Received(peer, message) if isinstance(message, About):
                self._hear_about(peer, message, now)

    def noted(self, note: Note, now: float) -> None:
        """The core has found a worker silent, or given up a request of one."""
        peer = str(note.fields.get("worker", ""))
        if note.event == "fleet.worker_silent":
            self._core.judged["a worker is silent"] += 1
            self._prove_silent(peer, now)
            self._found[peer] = now
        elif note.event == "request.stalled":
            self._prove_stalled(peer, str(note.fields["rid"]), now)
        if note.event == "request.stalled" and peer in self._lies.swallowed:
            self._core.judged["a silent worker is alone, or not yet found"] += 1
            last_look = now - self._core.settings.silent_seconds / LOOKS - ROUNDING
            if self._changed.get(peer, 0.0) < last_look:
                assert not self._was_silent(peer, last_look, surely=True), (
                    f"{peer} is silent and was not found"
                )

    def _hear_about(self, peer: str, message: About, now: float) -> None:
        sent = self._open[peer].get(message.rid)
        if sent is None or sent.attempt != message.attempt:
            return
        if isinstance(message, Paused) and not self.may_pause(peer, message):
            return
        self._heard[peer] = sent.heard_at = now
        self._found.pop(peer, None)
        if isinstance(message, Prefilled | Row) and sent.answered_at is None:
            sent.answered_at = now
            if isinstance(message, Prefilled):
                sent.tokens -= message.cached_tokens
            role = self._core.fleet.workers[peer].hello.role
            self._answers[role, sent.kv_group].append(sent)
        goes_on = (
            sent.whole and isinstance(message, Prefilled) and message.finish is None and message.baton is None
        )
        if not (goes_on or isinstance(message, Row | Joined | Scored | Paused)):
            self._end(peer, message.rid, message.attempt, now)

    def _end(self, peer: str, rid: str, attempt: int, now: float) -> None:
        sent = self._open[peer].get(rid)
        if sent is not None and sent.attempt <= attempt:
            del self._open[peer][rid]
            self._changed[peer] = now

    def _prove_stalled(self, peer: str, rid: str, now: float) -> None:
        """Its worker has said nothing of it for long, nor that it is paused."""
        sent = self._open[peer][rid]
        quiet = now - max(sent.at, sent.heard_at)
        assert quiet > self._core.settings.stall_seconds - ROUNDING, (
            f"{rid} is given up at {peer}, {quiet:g} s after it was spoken of"
        )

    def _prove_silent(self, peer: str, now: float) -> None:
        lies = self._lies
        silent = lies.swallowed | lies.forgetful | lies.liars | lies.dead
        assert peer in silent, f"{peer} is honest and was found silent"
        assert self._was_silent(peer, now + ROUNDING), f"{peer} was found silent too early, or alone"

    def _prove_may_have(self, peer: str, now: float) -> None:
        """Who was found silent rests; then it is given one request at a time, until it has said something."""
        rested = self._core.settings.silent_seconds - ROUNDING
        if peer in self._found:
            assert now - self._found[peer] > rested, f"{peer} was found silent, and is given more"
            assert not self._open[peer], f"{peer} was found silent, and is given more than one"

    def _was_silent(self, peer: str, at: float, *, surely: bool = False) -> bool:
        """Whether it had been silent for long enough by then, and enough others had answered what was sent later.

        `surely`: by answers that certainly count. Their prompts were no shorter, for nobody expects more of a cache
        than a prompt has; and whoever gave them has not lied, so all that it said could be used.
        """
        load, seconds = self._loads.get(peer, Load()), self._core.settings.silent_seconds
        if load.queued or load.running or at - self._heard.get(peer, 0.0) < seconds:
            return False
        held = [sent for sent in self._open[peer].values() if sent.reported and at - sent.at >= seconds]
        return any(self._answered_later(sent, at, surely) for sent in held)

    def _answered_later(self, sent: Sent, at: float, surely: bool) -> bool:
        role = self._core.fleet.workers[sent.peer].hello.role
        compared = [
            other
            for other in self._answers[role, sent.kv_group]
            if other.peer != sent.peer
            and other.at > sent.at
            and (other.answered_at or 0.0) <= at
            and not (surely and (other.tokens < sent.tokens or other.peer in self._lies.liars))
        ]
        return len(compared) >= COMPARED_MIN
