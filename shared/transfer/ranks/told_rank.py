"""Another rank of this worker as rank 0 knows it: told what to offer and to read, in a process of its own.

    Transfer ── make_reader ──► ToldRank ── commands ──►  RankService   in the follower's process
    Fetches  ── read, state ──► ToldReader ◄─ reports ──

A read is READING until its end is reported. A rank that could not post it reports that; nothing of such a read is under
way, so it has ended (`ReadState.REFUSED`). The fence is an answer: `close` returns when the rank has reported that its
reader is gone, and a rank that does not answer ends the worker, for else its pages would never be free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

import msgspec
import structlog

from shared.primitives.errors import RankError, TransferError
from shared.primitives.tally import is_worth_a_line
from shared.transfer.counters import KvCounters
from shared.transfer.rank_reader import PartReader, at_rank
from shared.transfer.ranks.commands import (
    CloseOffer,
    CloseReader,
    Command,
    Counted,
    MakeReader,
    Offered,
    OfferPages,
    PartOfPages,
    ReadEnded,
    ReaderClosed,
    ReaderMade,
    ReadKnownPage,
    ReadPages,
    Report,
    decode_report,
    encode,
)
from shared.transfer.reader import NotPostedError, ReadState
from shared.transfer.slices import SlicePart
from shared.wire.baton import Baton, HolderRank

ANSWER_SECONDS_MAX = 30.0  # for an offer, a reader or its end: some seconds where a NIC pins a GPU's memory
LOOK_SECONDS = 0.05  # between two looks while an answer is waited for

log = structlog.get_logger(__name__)


class RankPort(Protocol):
    """What joins rank 0 to the others. Commands arrive in order. May be used from any thread."""

    command_bytes_max: int

    def tell(self, rank: int, command: bytes) -> None:
        """Send a command. `RankError`: a rank has ended."""

    def reports(self, rank: int) -> list[bytes]:
        """What the rank has reported since the last call. `RankError`: it has ended."""

    def wait(self, rank: int, seconds: float) -> None:
        """Return when it may have reported, or after so long."""


class ToldRank:
    """Implements `FurtherRank`: offers a rank's pages, and reads into them."""

    def __init__(self, port: RankPort, rank: int):
        self._port = port
        self._rank = rank
        self._generation = 0
        self._refused = 0  # reads
        self._counters = KvCounters()
        self._offered: Offered | None = None
        self._made: dict[int, ReaderMade] = {}
        self._closed: set[int] = set()
        self._ended: dict[int, dict[int, ReadState]] = {}  # by generation, of reads
        self._absorbing = threading.Lock()  # a reader may be made on a thread of its own

    def ask_offer(self, offer: OfferPages) -> None:
        """Tell it to offer its pages; `described` waits for its answer. `TransferError`: it cannot be told."""
        try:
            self.tell(offer)
        except NotPostedError as error:
            raise TransferError(str(error)) from None

    @property
    def described(self) -> HolderRank:
        """See `FurtherRank`. `TransferError` in one sentence if its pages cannot be offered."""
        self._wait_for(lambda: self._offered is not None, "offered its pages")
        assert self._offered is not None
        if self._offered.rank is None:
            raise TransferError(f"rank {self._rank}: {self._offered.refusal}")
        return self._offered.rank

    def make_reader(self) -> PartReader:
        """See `FurtherRank`."""
        self._generation += 1
        generation = self._generation
        self.tell(MakeReader(generation))
        self._wait_for(lambda: generation in self._made, "made a reader")
        if refusal := self._made.pop(generation).refusal:
            raise TransferError(f"rank {self._rank}: {refusal}")
        self._ended[generation] = {}  # before its first read is told
        return ToldReader(self, generation)

    @property
    def counters(self) -> KvCounters:
        """See `FurtherRank`."""
        self.absorb()
        return self._counters

    def close(self) -> None:
        """See `FurtherRank`. Not waited for: this process ends, and the rank with it."""
        self.tell(CloseOffer())

    # ---- for its readers -----------------------------------------------------------------------------------------

    def tell(self, command: Command) -> None:
        """Send a command. `NotPostedError` if it is longer than the port can take."""
        told = encode(command)
        if len(told) > self._port.command_bytes_max:
            raise NotPostedError(
                f"a command of {len(told)} bytes to rank {self._rank}: at most {self._port.command_bytes_max}"
            )
        self._port.tell(self._rank, told)

    def absorb(self) -> None:
        """Take over what the rank has reported."""
        with self._absorbing:
            for told in self._port.reports(self._rank):
                self._take_over(decode_report(told))

    def ended(self, generation: int) -> dict[int, ReadState]:
        """How reads of a generation have ended, as far as was taken over."""
        return self._ended[generation]

    def await_closed(self, generation: int) -> None:
        """Return when nothing of this generation lands any more, which it was told."""
        self._wait_for(lambda: generation in self._closed, "closed a reader")
        self._closed.discard(generation)
        del self._ended[generation]

    def _wait_for(self, done: Callable[[], bool], what: str) -> None:
        deadline = monotonic() + ANSWER_SECONDS_MAX
        self.absorb()
        while not done():
            if monotonic() > deadline:
                raise RankError(f"rank {self._rank} has not {what} within {ANSWER_SECONDS_MAX:.0f} s")
            self._port.wait(self._rank, LOOK_SECONDS)
            self.absorb()

    def _take_over(self, report: Report) -> None:
        match report:
            case Counted():
                self._counters = KvCounters.of_numbers(report.numbers)
            case Offered():
                self._offered = report
            case ReaderMade():
                self._made[report.generation] = report
            case ReaderClosed():
                self._closed.add(report.generation)
            case ReadEnded():
                self._note_end(report)

    def _note_end(self, report: ReadEnded) -> None:
        if report.refusal:
            self._refused += 1
            if is_worth_a_line(
                self._refused
            ):  # a peer that a rank cannot read costs each of its fetches some
                reason, times = report.refusal, self._refused
                log.warning("transfer.rank_refused", rank=self._rank, reason=reason, times=times)
        if (ended := self._ended.get(report.generation)) is not None:
            ended[report.read] = report.state


class ToldReader:
    """One generation of reads of a rank in another process. Implements `PartReader`."""

    def __init__(self, rank: ToldRank, generation: int):
        self._rank = rank
        self._generation = generation
        self._posted = 0
        self._closing = False

    def read_pages(
        self, baton: Baton, part: SlicePart, sources: Sequence[int], targets: Sequence[int]
    ) -> int:
        """See `PartReader`."""
        own, pages = self._alone(baton, part), (tuple(sources), tuple(targets))
        return self._post(lambda read: ReadPages(self._generation, read, own, PartOfPages.of(part), *pages))

    def read_known_page(self, baton: Baton, part: SlicePart, target: int) -> int:
        """See `PartReader`."""
        own = self._alone(baton, part)
        return self._post(
            lambda read: ReadKnownPage(self._generation, read, own, PartOfPages.of(part), target)
        )

    def look(self) -> None:
        """See `PartReader`."""
        self._rank.absorb()

    def state(self, handle: int) -> ReadState:
        """See `PartReader`."""
        return self._rank.ended(self._generation).get(handle, ReadState.READING)

    def release(self, handle: int) -> None:
        """See `PartReader`. The rank has forgotten it when it reported its end."""
        del self._rank.ended(self._generation)[handle]

    def settle(self) -> None:
        """See `PartReader`. The rank did that before it reported an end."""

    def begin_close(self) -> None:
        """See `PartReader`."""
        self._closing = True
        self._rank.tell(CloseReader(self._generation))

    def close(self) -> None:
        """See `PartReader`. `RankError` if the rank does not answer."""
        if not self._closing:
            self.begin_close()
        self._rank.await_closed(self._generation)

    def _alone(self, baton: Baton, part: SlicePart) -> Baton:
        return msgspec.structs.replace(at_rank(baton, part.source), pages=())

    def _post(self, command: Callable[[int], Command]) -> int:
        self._posted += 1
        self._rank.tell(command(self._posted))
        return self._posted
