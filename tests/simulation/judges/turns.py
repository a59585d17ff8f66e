"""The oracle for turns of a decode worker: who leaves for a retracted request, when, and who resumes.

- Retracted requests resume in the order in which they came into line.
- Nobody leaves for the first in line before it has run for a turn and got a token, by an account of its own.
- When some leave, the first in line has the pages it needs once they have gone.
- While the first in line waits and the turns of all are over, somebody leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import inf

from decode.lifecycle import DecodeState
from decode.retraction import Retraction
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PageState
from shared.primitives.state_table import StateName

IN_LINE = (DecodeState.RETRACTED, DecodeState.QUEUED)
RESUMED = (DecodeState.RESTORING, DecodeState.EXTENDING, DecodeState.JOINING)
OUT = (
    DecodeState.RETRACTING,
    DecodeState.BACKING_UP,
    *IN_LINE,
    DecodeState.RESTORING,
    DecodeState.EXTENDING,
)
PATIENCE_PLANS = 3  # in a row that nobody leaves for the first in line, although all could


class TurnJudge:
    """Keeps its own account of who runs and waits since when. `now` in seconds."""

    def __init__(self, turn_seconds: float, judged: Counter[str]):
        self._turn_seconds = turn_seconds
        self._judged = judged
        self._line: dict[Req, float] = {}  # and since when each waits
        self._began: dict[Req, float] = {}
        self._tokens: dict[Req, int] = {}  # known when its turn began
        self._nobody_left = 0

    def came_in_line(self, reqs: Collection[Req]) -> None:
        """A copy is done, or there was no room for one. It waits from when its worker next looks who is in line."""
        self._line |= {req: inf for req in reqs if req.state in IN_LINE and req not in self._line}

    def resumed(self) -> None:
        """Requests have resumed: the first in line."""
        resumed = [req for req in self._line if req.state in RESUMED]
        line = [req for req in self._line if req.state in (*RESUMED, *IN_LINE)]
        self._judged["the first in line resumes"] += len(resumed)
        assert resumed == line[: len(resumed)], (
            f"{[req.rid for req in resumed]} resume before {[req.rid for req in line]}"
        )
        self._line = {req: since for req, since in self._line.items() if req.state in IN_LINE}

    def look(self, running: Collection[Req], states: Collection[StateName | None], now: float) -> None:
        """Note who runs and waits now, before any of them leaves; `states` are of all that are here."""
        self._line = {req: min(since, now) for req, since in self._line.items()}
        out = sum(state in OUT for state in states)
        self._began = {req: self._began.get(req, now) for req in running} if out else {}
        self._tokens = {req: self._tokens.get(req, len(req.token_ids)) for req in self._began}
        rotation = 4 * self._turn_seconds * max(1, len(running)) / max(1, out)
        self._turn_min = min(self._turn_seconds, rotation)

    def left(self, leaving: Collection[Req], staying: Collection[Req], memory: KvMemory, now: float) -> None:
        """Some have left for the first in line; `staying` are all others that hold pages."""
        self._nobody_left = 0
        head = self._head
        assert head is not None, f"{[req.rid for req in leaving]} leave, but nobody is in line"
        for req in leaving:
            ran = now - self._began[req]
            assert ran >= self._turn_min - 1e-9, f"{req.rid} leaves after {ran:g} of {self._turn_min:g} s"
            assert self._has_gone_on(req), f"{req.rid} leaves without a token"
        held = {page for req in staying for page in req.pages}
        free = memory.pool.total - memory.pool.count(PageState.QUARANTINED) - len(held)
        _, cached = memory.cache.probe(head.token_ids[: head.kv_len], head.extra_key)
        missing = memory.pages_for(head.kv_len) - cached // memory.page_size
        self._judged["those whose turn is over leave"] += 1
        assert missing <= free or not staying, (
            f"{head.rid} lacks {missing} pages of {free} when they have left"
        )

    def nobody_left(self, running: Collection[Req], retraction: Retraction, now: float) -> None:
        """Nobody has left, although `running` are all that hold pages and nothing is under way."""
        head, memory, seconds = self._head, retraction.memory, retraction.turns.seconds
        stays = head is None or not running or now - self._line[head] < seconds
        stays = stays or any(now - self._began[req] < seconds for req in running)
        stays = stays or any(req.launched_len >= req.final_kv_len for req in running)
        stays = stays or not all(map(self._has_gone_on, running))
        copied = not retraction.prompts.enabled
        if stays or (
            copied and sum(memory.pages_for(req.launched_len) for req in running) > retraction.host.free
        ):
            self._nobody_left = 0
            return
        assert head is not None
        self._nobody_left += 1
        assert self._nobody_left < PATIENCE_PLANS, (
            f"{head.rid} waits in line, and the turns of {[req.rid for req in running]} are over"
        )

    def _has_gone_on(self, req: Req) -> bool:
        return len(req.token_ids) > self._tokens[req]

    @property
    def _head(self) -> Req | None:
        return next((req for req in self._line if req.state in IN_LINE), None)
