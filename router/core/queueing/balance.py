"""Where decode pods fill unevenly: streams leave a pod that is about to retract some for one that has room.

Nobody knows how long an output will be, so one pod fills up while another one empties. A stream that is retracted
stands still for a turn or more; one that migrates pauses for as long as its pages take. So whatever runs at a pod must
have pages for its next `balance_steps` steps there. Where it has not, or something is retracted, the youngest streams
leave, as those would be retracted first: as many as are lacking, by this router's share of what runs there. Where
sixteen of them find no room, smaller ones may. What a worker keeps for tenants below their share (`tenant_share_max`)
is not for those that run: it retracts before it takes that.

    headroom = free pages - those kept - those on their way - balance_steps of all that are there
    headroom < 0, or something is retracted: a stream of p pages goes where
        headroom there - p - its own steps >= 0   and   p <= half of the difference between the two

So the two do not change places. While streams wait for decode there is no room to spare, and nobody moves. A stream is
moved `MOVES` times in its life, and never back to a pod that it has left within `BACK_SECONDS`: two pods that are both
nearly full would pass it to and fro. One that has got no token lately is left alone: it may be retracted already, and
its pages in host memory stay where they are. So are the choices of one request, which share the pages of their prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from router.config import RouterConfig
from router.core.fleet import placement
from router.core.fleet.worker import Worker
from router.core.fleet.workers import Fleet
from router.core.queueing.foresight import own_share
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.placement_policies import Placement
from shared.scheduling.tenant_shares import share_of

MOVES = 2  # of one request
TRIES_AT_A_TIME = 16  # of the youngest streams of one worker that find no room
SMALLER_TRIES = 4  # … and then of the smallest of the others, before the rest waits for the next pass
BACK_SECONDS = 30.0  # for so long it does not return to a worker that it has left
MOVES_AT_A_TIME = 4  # from one worker: those that leave are read by others meanwhile
MARGIN = 0.05  # of a pool, that is left where a stream goes; what is kept for tenants counts
LARGEST_SHARE = 0.25  # of a pool: a larger one is refused where others have to grow, and waits for long
FRESH_SECONDS = 0.5  # since its last token: what has waited longer may not run any more


class Balance:
    """Chooses the streams that leave a pressed decode worker, and where they go. `now` in seconds."""

    def __init__(self, settings: RouterConfig, fleet: Fleet, live: Mapping[str, LiveRequest]):
        self._settings = settings
        self._fleet = fleet
        self._live = live

    def is_pressed(self, worker: Worker) -> bool:
        """Whether the worker may soon have to retract one of several requests, or has done so."""
        return (
            self._settings.balance_steps > 0
            and worker.hello.role == "decode"
            and worker.load_number > 0
            and not worker.draining
            and worker.hello.limits.page_size > 0
            and worker.load.running > 1
            and (not worker.load.accepting or self._headroom(worker) < 0)
        )

    def pressed(self) -> list[Worker]:
        """The workers that some of their streams had better leave."""
        return [worker for worker in self._fleet.of_role("decode") if self.is_pressed(worker)]

    def share(self) -> float:
        """The part of the room at other workers that is for this router's streams."""
        return own_share(self._fleet.of_role("decode"))

    def tokens_max(self, share: float) -> float:
        """Tokens of the largest stream that some worker may have room for."""
        return max(
            (
                share * self._room(worker) * worker.hello.limits.page_size
                for worker in self._fleet.of_role("decode")
                if worker.hello.limits.page_size > 0 and worker.load.accepting
            ),
            default=0.0,
        )

    def leaving(self, source: Worker, tokens_max: float, now: float) -> Iterator[LiveRequest]:
        """Streams to find another place for, the next one each time, until enough are on their way.

        None that is larger than `tokens_max`.
        """
        lacking, pages = self._lacking(source), self._pages_leaving(source, now)
        count, leaving = len(pages), sum(pages)
        if tokens_max <= 0 or count >= MOVES_AT_A_TIME or leaving >= lacking:
            return
        streams = map(self._live.__getitem__, source.assigned)
        movable = [live for live in streams if _is_movable(live, now) and _tokens(live) <= tokens_max]
        movable.sort(key=lambda live: (len(live.output), -live.need.tokens, live.arrival))
        for live in _in_turn(movable, source):
            if count >= MOVES_AT_A_TIME or leaving >= lacking:
                return
            yield live
            if live.target is not None:
                count, leaving = count + 1, leaving + _pages(live, source)

    def place(
        self, live: LiveRequest, workers: Sequence[Worker], share: float, now: float, *, evens: bool = True
    ) -> Placement[Worker] | None:
        """The worker with most headroom among those that have room; None: it stays where it is.

        `evens`: only where the two differ by twice its pages, so that they do not change places.
        """
        source = live.waits_on
        least = self._headroom(source) if evens and source is not None else -inf
        able = [
            (headroom, worker)
            for worker in placement.roomy(live.need, workers, self._settings, now)
            if worker is not source
            and worker.hello.limits.page_size > 0
            and worker.load.accepting
            and (pages := _pages(live, worker)) <= LARGEST_SHARE * worker.hello.limits.pages
            and not was_left(live, worker.peer, now)
            and share * (headroom := self._room(worker, evens=evens)) >= pages
            and 2 * pages <= headroom - least
        ]
        if not able:
            return None
        headroom, best = max(able, key=lambda each: (each[0], -each[1].arrival))
        return Placement(best, f"its worker lacks pages, {headroom:.0f} are left here", "headroom")

    def _headroom(self, worker: Worker) -> float:
        """Pages that are left at a decode worker when all that is there has gone on for `balance_steps`.

        Requests that are retracted lack as much as the others hold. What is kept for other tenants is not left.
        """
        load = worker.load
        coming = worker.unreported.pages + sum(worker.reserved.values()) + sum(worker.foreseen.values())
        requests = worker.requests + len(worker.reserved) + len(worker.foreseen)
        held = worker.pages_for(load.running_tokens) / max(1, load.running)
        retracted = 0.0 if load.accepting else load.queued * held
        return load.free_pages - self._kept(worker) - coming - retracted - requests * self._growth(worker)

    def _room(self, worker: Worker, *, evens: bool = True) -> float:
        """Pages that one more stream may have there; `evens`: with a margin."""
        margin = max(0.0, MARGIN * worker.hello.limits.pages - self._kept(worker)) if evens else 0.0
        return self._headroom(worker) - self._growth(worker) - margin

    def _kept(self, worker: Worker) -> int:
        """Pages that it keeps for tenants below their share, and retracts for, as `Admission` reckons it there."""
        pages = worker.hello.limits.pages
        return pages - share_of(pages, self._settings.tenant_share_max)

    def _growth(self, worker: Worker) -> float:
        """Pages that one request takes within `balance_steps`."""
        return self._settings.balance_steps / worker.hello.limits.page_size

    def _lacking(self, source: Worker) -> float:
        """Pages that this router's streams should give back there: a share, since other routers see the same."""
        share = len(source.assigned) / max(1, source.requests)
        return max(0.0 if source.load.accepting else 1.0, -share * self._headroom(source))

    def _pages_leaving(self, source: Worker, now: float) -> list[int]:
        """Pages of each stream that is about to leave, or whose pages are read by others."""
        own = map(self._live.__getitem__, source.assigned)
        asked = [live for live in own if live.target is not None and is_fresh(live, now)]
        leased = [self._live[rid] for rid in source.leases if self._live[rid].migrating]
        return [_pages(live, source) for live in (*asked, *leased)]


def was_left(live: LiveRequest, peer: str, now: float) -> bool:
    """Whether the request was moved away from the worker lately."""
    return any(left == peer and now < at + BACK_SECONDS for left, at in live.moved_from)


def _is_movable(live: LiveRequest, now: float) -> bool:
    return (
        live.state is RequestState.DECODING
        and live.joined
        and live.target is None
        and live.sampling_group is None
        and len(live.moved_from) < MOVES
        and is_fresh(live, now)
    )


def _in_turn(movable: Sequence[LiveRequest], source: Worker) -> Iterator[LiveRequest]:
    """The youngest first. Where enough of them find no room, the smallest of the others, which need fewer pages."""
    tries, fewest = 0, inf
    for place, live in enumerate(movable):
        if tries == TRIES_AT_A_TIME:
            smaller = [each for each in movable[place:] if _pages(each, source) < fewest]
            yield from sorted(smaller, key=_tokens)[:SMALLER_TRIES]
            return
        yield live
        if live.target is None:
            tries, fewest = tries + 1, min(fewest, _pages(live, source))


def is_fresh(live: LiveRequest, now: float) -> bool:
    """Whether it has got a token lately: else it may be retracted, and not leave for long."""
    return now < live.token_at + FRESH_SECONDS


def _pages(live: LiveRequest, worker: Worker) -> int:
    return worker.pages_for(_tokens(live))


def _tokens(live: LiveRequest) -> int:
    return len(live.request.token_ids) + len(live.output)
