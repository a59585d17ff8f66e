"""Which streams leave their decode worker for another, and who asks them to.

    drain     a worker ends: all of its streams go where there is room
    balance   a worker lacks pages: its youngest streams go where there are more (`balance`)
    packed    prompts wait for the time of decode workers: streams make room for them (`stream_packing`)

The other worker keeps room for the stream (`Worker.reserved`), and the one that has it is asked for a lease of its
pages. Once that is there, the stream stands in the queue of ready ones, and who reads the pages is chosen anew: in
`dispatch`, among those that `untried` leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.config import RouterConfig
from router.core.fleet import placement
from router.core.fleet.unreachable_pairs import UnreachablePairs
from router.core.fleet.worker import Worker
from router.core.fleet.workers import Fleet
from router.core.queueing.backpressure import Backpressure
from router.core.queueing.balance import TRIES_AT_A_TIME, Balance, is_fresh, was_left
from router.core.queueing.stream_packing import LEAVING_STREAMS, StreamPacking
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_table import RequestTable
from router.placement_policies import Placement

# The decode worker that reads the pages of a request, and whether any fits it, full or not
FindReader = Callable[[LiveRequest, float], tuple[Placement[Worker] | None, bool]]


class StreamMigrations:
    """Asks streams to leave. `now` in seconds."""

    def __init__(
        self,
        settings: RouterConfig,
        fleet: Fleet,
        requests: RequestTable,
        backpressure: Backpressure,
        balance: Balance,
        stream_packing: StreamPacking,
        unreachable_pairs: UnreachablePairs,
    ):
        self._settings = settings
        self._fleet = fleet
        self._requests = requests
        self._backpressure = backpressure
        self._balance = balance
        self._stream_packing = stream_packing
        self._unreachable_pairs = unreachable_pairs

    # ---- who leaves --------------------------------------------------------------------------------------------

    def leave_draining(self, find_reader: FindReader, now: float) -> None:
        """Requests migrate from draining workers to others that have room; one that fits nowhere blocks no other."""
        for worker in [worker for worker in self._fleet.of_role("decode") if worker.draining]:
            for live in [self._requests.live[rid] for rid in worker.assigned]:
                if (live.joined or live.state is RequestState.EXTENDING) and live.target is None:
                    live.refresh_need()
                    choice, _ = find_reader(live, now)
                    if choice is not None:
                        self._requests.request_migration(live, choice)

    def rebalance(self, now: float) -> None:
        """Streams leave workers that are about to retract some, for others that have room."""
        pressed = self._balance.pressed()
        share = self._balance.share() if pressed else 0.0
        tokens_max = self._balance.tokens_max(share) if pressed else 0.0
        for source in pressed:
            if self._backpressure.seconds_before_decode(source.kv_group, now) > 0:
                continue  # streams wait for room already: there is none to spare
            for live in self._balance.leaving(source, tokens_max, now):
                live.refresh_need()
                handful = next(placement.decode_rounds(live.need, self._fleet, self._settings))
                readers = next(self._unreachable_pairs.readers(source, handful, now))
                if (choice := self._balance.place(live, readers, share, now)) is not None:
                    self._requests.request_migration(live, choice, "balance")

    def pack_begun(self, now: float) -> None:
        """Where prompts wait, streams whose prompt a decode worker has just computed leave it for another."""
        begun, self._requests.begun_whole = self._requests.begun_whole, []
        for live in begun:
            here = live.worker if live.state is RequestState.DECODING and live.joined else None
            if here is not None and self._stream_packing.is_wanted(here.kv_group, now):
                self.ask_to_leave(live, now)

    def gather_streams(self, now: float) -> None:
        """Where prompts wait beside few streams, these leave for the worker with most, each once."""
        for worker in self._stream_packing.to_empty(now):
            self._gather_from(worker, now)

    def _gather_from(self, worker: Worker, now: float) -> None:
        streams = [live for live in map(self._requests.live.__getitem__, worker.assigned) if live.joined]
        room = LEAVING_STREAMS - sum(live.target is not None for live in streams)
        may_leave = [
            live
            for live in streams
            if live.target is None
            and not live.made_room
            and live.sampling_group is None
            and is_fresh(live, now)
        ]
        for live in may_leave[:TRIES_AT_A_TIME]:
            if room > 0:
                self.ask_to_leave(live, now)
                room -= live.target is not None

    def ask_to_leave(self, live: LiveRequest, now: float) -> None:
        """Once: if another decode worker has more streams and room, this one goes on there.

        The choices of one request stay together: they share the pages of their prompt.
        """
        here = live.worker
        if here is None or live.target is not None or live.made_room or live.sampling_group is not None:
            return
        live.refresh_need()
        workers = placement.decode_workers(live.need, self._fleet)
        readers = next(self._unreachable_pairs.readers(here, workers, now))
        choice = self._stream_packing.place_elsewhere(live, here, readers, now)
        if choice is not None:
            live.made_room = True
            self._requests.request_migration(live, choice, "packed")

    # ---- where one that has left goes --------------------------------------------------------------------------

    def untried(self, live: LiveRequest, workers: Sequence[Worker], now: float) -> Sequence[Worker]:
        """Decode workers that have not failed to fetch its pages.

        A stream that moves does not go back to where it comes from, unless all others are about to end.
        """
        if live.unread_by:
            workers = [worker for worker in workers if worker.peer not in live.unread_by]
        if live.migrating and self._can_move_on(live, now):
            workers = [worker for worker in workers if _is_away(live, worker, now)]
        return workers

    def cornered(self, live: LiveRequest, now: float) -> str:
        """Why a stream that moves, and finds no room, must give up its pages; empty: it waits.

        It can go nowhere but back to the worker that it left. Where that drains, its pages must not keep the worker
        from its end: but for the move it had gone on there till then. Where that has nothing else, what takes its room
        is its own pages.
        """
        holder = live.holder if live.migrating else None
        if holder is None or self._can_move_on(live, now):
            return ""
        if holder.draining:
            return "holder_drains" if live.migration_cause != "drain" else ""
        return "holder_full" if holder.is_empty() else ""

    def _can_move_on(self, live: LiveRequest, now: float) -> bool:
        """Whether a stream that moves may wait for a worker that it does not come from."""
        workers = placement.decode_workers(live.need, self._fleet)
        return any(
            not worker.draining and worker.peer not in live.unread_by and _is_away(live, worker, now)
            for worker in workers
        )


def _is_away(live: LiveRequest, worker: Worker, now: float) -> bool:
    """Whether a stream that moves does not come from the worker."""
    if live.migration_cause == "balance" and was_left(live, worker.peer, now):
        return False
    return worker is not live.holder
