"""The oracle for pauses at a router: `Paused` counts for the attempt that its sender has, and for nothing else.

Whoever is told to be paused shows it as the cause of the gap before its next token. What is said of another attempt,
or by another worker, changes nothing of any request. Who has what is taken from the books of `silences`, which also
prove that a request is not given up while its worker says that it is paused.
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.requests.request_table import PAUSE_SECONDS_MIN
from shared.links.events import LinkEvent, Received
from shared.wire.messages import Migrating, Paused
from tests.simulation.judges.fairness import JudgedRouterCore
from tests.simulation.judges.silences import JudgedSilences


class JudgedPauses:
    """What one router has heard of pauses. Times in seconds."""

    def __init__(self, core: JudgedRouterCore, silences: JudgedSilences):
        self._core = core
        self._silences = silences
        self._paused: dict[str, int] = {}  # attempts, by rid: nothing else has been heard of them since
        self._token_at: dict[str, float] = {}

    def take(self, event: LinkEvent, link: Callable[[], None]) -> None:
        """Let the core take an event."""
        match event:
            case Received(peer, Paused() as paused):
                self._take(peer, paused, link)
            case Received(_, Migrating(rid=rid)):
                self._paused.pop(rid, None)  # then it waits for another worker
                link()
            case _:
                link()

    def tokens(self, rid: str, attempt: int, now: float) -> None:
        """The stream goes on."""
        gap = now - self._token_at.get(rid, now)
        self._token_at[rid] = now
        if self._paused.pop(rid, 0) == attempt and gap > PAUSE_SECONDS_MIN:
            self._core.judged["a pause is told by its cause"] += 1
            assert gap in self._core.counters.pauses_retracted, (
                f"{rid} was paused for {gap:g} s, and none is told"
            )

    def _take(self, peer: str, paused: Paused, link: Callable[[], None]) -> None:
        before = {rid: (live.heard_at, live.held_up_by) for rid, live in self._core._requests.live.items()}
        counts = paused.rid in before and self._silences.may_pause(
            peer, paused
        )  # one that has ended pauses nowhere
        link()
        if peer not in self._core.fleet.workers:  # the core has failed: all that the worker had is lost
            return
        if counts:
            self._paused[paused.rid] = paused.attempt
            del before[paused.rid]
        else:
            self._core.judged["a pause of another worker or attempt"] += 1
        for rid, claims in before.items():
            live = self._core._requests.live[rid]
            assert (live.heard_at, live.held_up_by) == claims, f"{rid} is changed by {paused} of {peer}"
