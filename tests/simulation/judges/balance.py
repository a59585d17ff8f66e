"""The oracle for balance: streams leave a decode worker that lacks pages, for one that has them.

- Who leaves runs at a worker where something is retracted, or not all can go on for `balance_steps`.
- Who comes finds pages beside `balance_steps` of all that are there, and the difference is twice its pages.
- What workers keep for tenants below their share is for neither: a worker retracts before it takes that.
- Nobody is moved more than twice, or back within half a minute. The account of that is kept here.
- Where a stream could leave and none does, enough are leaving already, or streams wait for room.

What workers have told and what lives is put together here once more; the router's sums are not asked.
"""

from __future__ import annotations

from collections import Counter

from router.core.dispatch import RouterCore
from router.core.fleet import placement
from router.core.fleet.worker import Worker
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest

MOVES_MAX = 2
BACK_SECONDS = 30.0
AT_A_TIME_MAX = 4
TRIES_MIN = 16  # as many streams of a worker are tried in each pass
SLACK_PAGES = 1.0  # rounding


class BalanceJudge:
    """Judges what one router does. `now` in seconds."""

    def __init__(self, core: RouterCore, judged: Counter[str]):
        self._core = core
        self._judged = judged
        self._left: dict[str, list[tuple[str, float]]] = {}  # workers by request, and when it left them

    def moved(self, before: dict[str, Worker | None], now: float) -> None:
        """Requests have been asked to leave; `before` are the targets that there were."""
        for rid, live in self._core._requests.live.items():
            if live.target is not None and before.get(rid) is None:
                self._judged["a stream leaves a worker that lacks pages"] += 1
                self._judge_move(live, live.target, now)

    def leased(self, live: LiveRequest, source: str, now: float) -> None:
        """It has left a worker, for whatever cause."""
        if live.migration_cause == "balance":
            left = self._left.setdefault(live.rid, [])
            left.append((source, now))
            assert len(left) <= MOVES_MAX, f"{live.rid} is moved {len(left)} times: {left}"

    def placed(self, live: LiveRequest, now: float) -> None:
        """It is given to a worker that is to read its pages."""
        back = live.worker is not None and self._was_left(live, live.worker.peer, now)
        others = [each for each in placement.decode_workers(live.need, self._core.fleet) if not each.draining]
        can_stay_away = any(
            not self._was_left(live, each.peer, now)
            and each is not live.holder
            and each.peer not in live.unread_by
            for each in others
        )
        if live.migrating and live.migration_cause == "balance":
            self._judged["a stream comes to a worker with pages"] += 1
            assert not (back and can_stay_away), f"{live.rid} is back at once: {self._left[live.rid]}"

    def look(self, now: float) -> None:
        """All has been placed. No stream could leave a worker that lacks pages, but for those that are too many."""
        for source in self._core.fleet.of_role("decode"):
            if not self.is_pressed(source) or self._enough_leave(source):
                continue
            if self._core._backpressure.seconds_before_decode(source.kv_group, now) > 0:
                continue  # streams wait for decode
            if len(source.assigned) > TRIES_MIN:
                continue  # some of them have waited for the next pass
            for rid in source.assigned:
                live = self._core._requests.live[rid]
                if self._may_leave(live, now) and (targets := self._targets(live, source, now)):
                    raise AssertionError(f"{rid} stays at {source.peer}, and {targets} have pages for it")

    # ---- what is asked ----

    def _judge_move(self, live: LiveRequest, target: Worker, now: float) -> None:
        source = live.worker
        assert source is not None, live.rid
        assert self.is_pressed(source), f"{live.rid} leaves {source.peer}, which has pages"
        assert not self._was_left(live, target.peer, now), f"{live.rid} is to go back to {target.peer}"
        assert len(self._left.get(live.rid, ())) < MOVES_MAX, f"{live.rid} is to move once more"
        pages = target.pages_for(len(live.request.token_ids) + len(live.output))
        there = self._headroom(target) + SLACK_PAGES  # its own pages are reserved already …
        assert there >= 0, f"{live.rid} goes to {target.peer}, which lacks {-there} pages then"
        reserved = list(target.reserved)
        behind = reserved[reserved.index(live.rid) + 1 :]  # … and those of streams that were asked after it
        there += sum(target.reserved[rid] + self._growth(target) for rid in behind)
        here = self._headroom(source)
        assert pages <= there - here + SLACK_PAGES, (
            f"{live.rid} makes {target.peer} fuller than {source.peer}"
        )

    def _was_left(self, live: LiveRequest, peer: str, now: float) -> bool:
        return any(left == peer and now < at + BACK_SECONDS for left, at in self._left.get(live.rid, ()))

    def _may_leave(self, live: LiveRequest, now: float) -> bool:
        """Surely: it has just got a token, and has a move left."""
        return (
            live.state is RequestState.DECODING
            and live.joined
            and live.target is None
            and not live.request.rid.count("-")  # siblings stay together
            and live.sampling_group is None
            and len(self._left.get(live.rid, ())) < MOVES_MAX
            and now < live.token_at + 0.5
        )

    def _targets(self, live: LiveRequest, source: Worker, now: float) -> list[str]:
        """Workers that surely have room for it."""
        core, pages_for = self._core, len(live.request.token_ids) + len(live.output)
        if len(core.fleet.of_role("decode")) > core.settings.candidates_max:
            return []
        able = placement.roomy(live.need, placement.decode_workers(live.need, core.fleet), core.settings, now)
        here = self._headroom(source)
        share = self._own_share()
        return [
            each.peer
            for each in able
            if each is not source
            and each.hello.limits.page_size
            and each.load.accepting
            and not self._was_left(live, each.peer, now)
            and not core._unreachable_pairs.cut_off(source, core.fleet, now)
            and next(core._unreachable_pairs.readers(source, [each], now), [])
            and share * (self._headroom(each) - 2 * self._growth(each) - 0.1 * each.hello.limits.pages)
            >= each.pages_for(pages_for) + SLACK_PAGES
            and 4 * each.pages_for(pages_for) <= each.hello.limits.pages
            and 2.2 * each.pages_for(pages_for) + SLACK_PAGES
            <= self._headroom(each) - 2 * self._growth(each) - 0.1 * each.hello.limits.pages - here
        ]

    def is_pressed(self, worker: Worker) -> bool:
        """Whether some of its streams may leave it, since it lacks pages."""
        steps, load = self._core.settings.balance_steps, worker.load
        if not (steps and worker.load_number and worker.hello.limits.page_size) or worker.draining:
            return False
        return load.running > 1 and (not load.accepting or self._headroom(worker) < 0)

    def _enough_leave(self, source: Worker) -> bool:
        """Whether so many are leaving that one more may be too many."""
        live = self._core._requests.live
        asked = [live[rid] for rid in source.assigned if live[rid].target is not None]
        leased = [live[rid] for rid in source.leases]
        pages = [
            source.pages_for(len(each.request.token_ids) + len(each.output)) for each in (*asked, *leased)
        ]
        share = len(source.assigned) / max(1, source.requests)
        lacking = -share * self._headroom(source)
        enough = len(pages) >= AT_A_TIME_MAX or sum(pages) >= lacking
        return lacking <= 0 or (bool(pages) and enough)

    def _headroom(self, worker: Worker) -> float:
        """Pages that are left when all that is at the worker, or comes there, has gone on."""
        load, page_size = worker.load, worker.hello.limits.page_size
        new = [each for each in worker.assigned.values() if each.load_number == worker.load_number]
        foreseen = [e for e in self._core._requests.live.values() if e.foreseen_at is worker]
        coming = sum(each.pages for each in new) + sum(worker.reserved.values())
        coming += sum(worker.foreseen[each.rid] for each in foreseen)
        ended = worker.ended.requests
        told = load.queued + load.running + len(new) - ended
        requests = max(len(worker.assigned), told) + len(worker.reserved) + len(foreseen)
        held = -(-load.running_tokens // page_size) / max(1, load.running)
        retracted = 0.0 if load.accepting else load.queued * held
        pages = worker.hello.limits.pages
        usable = max(1, round(pages * self._core.settings.tenant_share_max))
        return load.free_pages - (pages - usable) - coming - retracted - requests * self._growth(worker)

    def _growth(self, worker: Worker) -> float:
        return self._core.settings.balance_steps / worker.hello.limits.page_size

    def _own_share(self) -> float:
        workers = self._core.fleet.of_role("decode")
        own = sum(len(worker.assigned) for worker in workers)
        return own / max(own, 1, sum(worker.load.running + worker.load.queued for worker in workers))
