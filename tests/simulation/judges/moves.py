"""The oracle for streams that are asked to leave their decode workers: each time one is asked, it is judged.

What balance promises stands in `balance`, and what prompts that wait may ask of streams in `ways`.
"""

from __future__ import annotations

from collections import Counter

from router.core.dispatch import RouterCore
from router.core.queueing.migrations import StreamMigrations
from router.core.requests.live_request import LiveRequest
from tests.simulation.judges.balance import BalanceJudge
from tests.simulation.judges.ways import prove_moved_in_time

FRESH_SECONDS = 0.5


class JudgedMigrations(StreamMigrations):
    """Those of one router."""

    def __init__(self, core: RouterCore, balance_judge: BalanceJudge, judged: Counter[str]):
        super().__init__(
            core.settings,
            core.fleet,
            core._requests,
            core._backpressure,
            core._balance,
            core._stream_packing,
            core._unreachable_pairs,
        )
        self._core, self._balance_judge, self._judged = core, balance_judge, judged
        self._moved: set[str] = set()  # streams that left a worker to the prompts there

    def ask_to_leave(self, live: LiveRequest, now: float) -> None:
        before = live.target
        pressed = [each for each in self._fleet.of_role("decode") if self._balance_judge.is_pressed(each)]
        super().ask_to_leave(live, now)
        if live.target is not None and live.target is not before:
            assert live.target not in pressed, f"{live.rid} goes to {live.target.peer}, which lacks pages"
            assert not live.joined or now < live.token_at + FRESH_SECONDS, f"{live.rid} may be retracted"
            when = "later" if live.joined else "with its first token"
            self._judged[f"a stream leaves a worker to the prompts there {when}"] += 1
            prove_moved_in_time(self._core, live, self._moved)

    def put_back(self, live: LiveRequest) -> None:
        """It goes on where its pages are: it has not moved."""
        self._moved.discard(live.rid)

    def rebalance(self, now: float) -> None:
        before = {rid: live.target for rid, live in self._requests.live.items()}
        super().rebalance(now)
        self._balance_judge.moved(before, now)
        self._balance_judge.look(now)
