"""One-sided reads of pages between workers, with everything that NIXL and UCX may do to them.

    start ──── page ── page ──────── page ──── word read ── Landed | Stale
                 each page is copied at a time of its own, out of memory as it is then
    start ──── page ── error: Failed ────── page (bytes land after the error) ── Ended, much later or never

A page of a worker of several ranks comes in slices, each copied at a time of its own; the word is read after the last.

Half of the worlds read by the TLS transport: there a holder is asked, and answers by the rules of `grants`, for
either version of a reader. NIXL asks nobody.

A frozen holder leaves its readers waiting; a dead one makes them fail, some bytes later; a restarted one is another
agent, which no reader finds under the old name. A reader that gave up gets `FetchEnded` only when it is true: of
several ranks each ends at a time of its own, and the last one counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.transfer.grants import Grants, Shown, Verdict
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, FetchStale
from shared.wire.baton import Baton, Holder
from tests.simulation.oracle.device import ALL_SLICES, Pages
from tests.simulation.world.timeline import Action, TimelineProcess

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFaults:
    """How reads behave: seconds and probabilities."""

    page_seconds: float = 0.004  # mean of each page's own time
    slow: float = 0.0  # share of fetches that take `slow_seconds`
    slow_seconds: float = 1.2
    late_word: float = 0.0  # share of fetches whose word is read up to a second after the pages
    tls: bool = False  # holders are asked
    renewal: float = 0.0  # share of fetches over TLS before which the reader makes its connection anew
    error: float = 0.0  # share of fetches that fail by themselves
    unproven: float = 0.5  # share of the failed and abandoned whose bytes still land
    endless: float = 0.0  # share of the unproven that never end
    partition: tuple[str, str] | None = None  # uids of a holder and a reader that cannot reach each other


class FabricWords(Grants):
    """The leases of one worker, as its readers see them."""

    def __init__(self, process: TimelineProcess, leases: int, new_nonce: Callable[[], int]):
        super().__init__(leases, new_nonce)
        self.process = process

    @property
    def values(self) -> list[int]:
        """The words."""
        return [self.read(lease) for lease in range(len(self))]


@dataclass(slots=True, eq=False)
class Read:
    """One fetch under way."""

    fetch_id: int
    baton: Baton
    agent: str
    into: tuple[int, ...]
    pending: list[int]  # pages that have not landed, by part: what one rank reads from another
    begun_at: float
    word_asked: bool = False
    given_up: bool = False  # failed or abandoned: bytes may land, only `FetchEnded` follows
    ended: bool = False  # nothing lands any more, or so the reader is told
    unproven: set[int] = field(default_factory=set)  # the parts that may land though it was given up


@dataclass(slots=True)
class Fabric:
    """All agents by name; the network between the workers' memories."""

    faults: FabricFaults
    rng: random.Random
    count: Callable[[str], None]  # notes that something happened, by name
    renewals: random.Random = field(default_factory=lambda: random.Random(0))
    slices: random.Random = field(
        default_factory=lambda: random.Random(0)
    )  # when those of further ranks are read
    endings: random.Random = field(
        default_factory=lambda: random.Random(0)
    )  # when each of several ranks ends
    agents: dict[str, Agent] = field(default_factory=dict)

    def lose_rank(self, agent: str) -> None:
        """One rank has ended, and its memory is gone: reads from it will fail, though the others live."""
        self.agents[agent].unreadable = True
        for reader in self.agents.values():
            reader.lose(agent)

    def died(self, agent: str) -> None:
        """A process has ended: its memory is gone, and reads from it will fail."""
        del self.agents[agent]
        for reader in self.agents.values():
            reader.lose(agent)


@dataclass(slots=True, eq=False)
class Agent:
    """The `Fetcher` of one worker process, and its memory as others see it."""

    fabric: Fabric
    process: TimelineProcess
    holder: Holder
    pages: Pages
    words: FabricWords
    seconds_max: float  # then a fetch is given up
    on_event: Action  # wakes the worker
    newer: bool = True  # of the version that binds leases to pages
    ranks: int = 1
    unreadable: bool = False  # a rank is lost, and its memory with it
    endless_pages: list[int] = field(default_factory=list)  # targets of reads that will never end
    _reads: dict[int, Read] = field(default_factory=dict)
    _events: list[FetchEvent] = field(default_factory=list)
    _shown: dict[str, Shown] = field(default_factory=dict)  # on the connection to each holder

    def start(self, fetch_id: int, baton: Baton, start_page: int, into: Sequence[int]) -> None:
        if self.fabric.renewals.random() < self.fabric.faults.renewal:
            self._shown.pop(baton.holder.agent, None)
        now, faults, rng = self.process.now, self.fabric.faults, self.fabric.rng
        source = baton.pages[start_page:]
        if len(source) < len(into):
            raise AssertionError(f"fetch of {len(into)} pages out of {len(source)}")
        found = self.fabric.agents.get(baton.holder.agent)
        parts = max(self.ranks, found.ranks if found else 1)
        read = Read(fetch_id, baton, baton.holder.agent, tuple(into), [len(into)] * parts, now)
        self._reads[fetch_id] = read
        self.fabric.count("fetch started")
        if found is None:
            self.fabric.count("fetch from a dead agent")
            self.process.after(rng.uniform(0.001, 0.5), lambda: self._err(read, "no such agent"))
            return
        name = found.holder.name
        assert name == baton.holder.name, f"{name} is read in the name of {baton.holder.name}"
        if parts > 1:
            self.fabric.count("path a fetch in slices")
        latest = 2 * faults.page_seconds * (1 + len(into))
        if rng.random() < faults.slow:
            self.fabric.count("fetch slow")
            latest = faults.slow_seconds * rng.uniform(0.5, 2)
        if latest > self.seconds_max:
            self.fabric.count("fetch that may take too long")
        if faults.partition == (baton.holder.uid, self.holder.uid):
            self.fabric.count("fetch across a partition")
            self.process.after(rng.uniform(0.001, 0.5), lambda: self._err(read, "no route"))
            return
        self._read_pages_later(read, source, latest)
        if not into:
            self._read_word_later(read)
        self.process.at(now + self.seconds_max, lambda: self._err(read, "fetch_seconds_max"))
        if rng.random() < faults.error:
            self.process.at(now + rng.uniform(0, latest), lambda: self._err(read, "injected error"))

    def _read_pages_later(self, read: Read, source: Sequence[int], latest: float) -> None:
        """Each at a time of its own, and of several ranks each part."""
        for page, target in zip(source, read.into, strict=False):
            for part in range(len(read.pending)):
                rng = self.fabric.slices if part else self.fabric.rng
                self.process.at(
                    self.process.now + rng.uniform(0, latest),
                    lambda page=page, target=target, part=part: self._read_page(read, page, target, part),  # type: ignore[misc]
                )

    def abandon(self, fetch_id: int) -> None:
        read = self._reads.get(fetch_id)
        if read is None or read.given_up:
            self._replace_unpolled(fetch_id)
            return
        self.fabric.count("fetch abandoned")
        read.given_up = True
        self._end_some_day(read)

    def poll(self) -> list[FetchEvent]:
        events, self._events = self._events, []
        return events

    def lose(self, agent: str) -> None:
        """The process behind `agent` is dead; each read from it fails after a while."""
        for read in self._reads.values():
            if read.agent == agent and not read.given_up:
                seconds = self.fabric.rng.uniform(0.001, 1.0)
                self.process.after(seconds, lambda read=read: self._err(read, "holder died"))  # type: ignore[misc]

    @property
    def idle(self) -> bool:
        return not self._reads and not self._events

    def batons_of_reads(self) -> list[Baton]:
        """Those that others read from here with, now."""
        readers = self.fabric.agents.values()
        return [
            read.baton for each in readers for read in each._reads.values() if read.agent == self.holder.agent
        ]

    def _tell(self, event: FetchEvent) -> None:
        self._events.append(event)
        self.on_event()

    def _with_holder(self, read: Read, action: Callable[[Agent], None]) -> None:
        """Do something at the holder's memory as soon as both processes run; never if the holder is dead."""
        holder = self.fabric.agents.get(read.agent)
        if holder is None or holder.unreadable:
            return
        if holder.process.frozen:
            holder.process.do(lambda: self.process.do(lambda: self._with_holder(read, action)))
        else:
            action(holder)

    def _read_page(self, read: Read, page: int, target: int, part: int) -> None:
        def copy(holder: Agent) -> None:
            if not self._may_land(read, part):
                return
            if read.given_up:
                self.fabric.count("bytes landed after the end of interest")
            verdict = self._ask_for_page(holder, read.baton, page)
            if verdict is Verdict.BEYOND:
                self._err(read, "pages that are not the lease's")
                return
            if verdict is Verdict.GONE:
                self.fabric.count("page left out")  # what the target held before stays
            else:
                self._copy_part(holder, page, target, self._slices_of(part, len(read.pending)))
            read.pending[part] -= 1
            if self._has_arrived(read) and not read.given_up and not read.word_asked:
                self._read_word_later(read)

        if self._may_land(read, part):
            self._with_holder(read, copy)

    def _copy_part(self, holder: Agent, page: int, target: int, slices: range) -> None:
        if slices == ALL_SLICES:
            self.pages.copy(target, holder.pages, page)
        else:
            self.pages.copy(target, holder.pages, page, slices)

    def _slices_of(self, part: int, parts: int) -> range:
        count = len(ALL_SLICES)
        return ALL_SLICES[part * count // parts : (part + 1) * count // parts]

    def _may_land(self, read: Read, part: int) -> bool:
        return part in read.unproven or not (read.given_up or read.ended)

    def _has_arrived(self, read: Read) -> bool:
        """Whether the reads of all ranks have ended."""
        return not any(read.pending)

    def _ask_for_page(self, holder: Agent, baton: Baton, page: int) -> Verdict:
        if not self.fabric.faults.tls:
            return Verdict.GIVEN
        if holder.newer:
            shown = self._shown.setdefault(baton.holder.agent, {})
            return holder.words.pages(shown, baton.lease, baton.nonce, (range(page, page + 1),))
        return Verdict.GIVEN if holder.words.read(baton.lease) == baton.nonce else Verdict.GONE

    def _ask_for_word(self, holder: Agent, baton: Baton) -> bool:
        """Whether the lease holds: a reader of the version before is told the word by one of this."""
        if not (self.fabric.faults.tls and holder.newer):
            return holder.words.read(baton.lease) == baton.nonce
        shown = self._shown.setdefault(baton.holder.agent, {})
        if self.newer:
            return holder.words.holds(shown, baton.lease, baton.nonce)
        self.fabric.count("path a word was told to an older reader")
        return holder.words.tell(shown, baton.lease) == baton.nonce

    def _read_word_later(self, read: Read) -> None:
        read.word_asked = True
        late = self.fabric.rng.random() < self.fabric.faults.late_word
        seconds = self.fabric.rng.uniform(0, 1.0 if late else 0.002)
        self.process.after(
            seconds, lambda: self._with_holder(read, lambda holder: self._read_word(read, holder))
        )

    def _read_word(self, read: Read, holder: Agent) -> None:
        if read.given_up or read.ended:
            return
        baton = read.baton
        self._forget(read)
        if not self._ask_for_word(holder, baton):
            self.fabric.count("fetch stale")
            self._tell(FetchStale(read.fetch_id))
        else:
            self.fabric.count("fetch landed")
            self._tell(
                FetchLanded(read.fetch_id, len(read.into) * PAGE_BYTES, self.process.now - read.begun_at)
            )

    def _err(self, read: Read, reason: str) -> None:
        if read.given_up or read.ended:
            return
        read.given_up = True
        ended = self.fabric.rng.random() >= self.fabric.faults.unproven
        self.fabric.count("fetch failed" if ended else "fetch failed unproven")
        self._tell(FetchFailed(read.fetch_id, reason, ended))
        if ended:
            self._forget(read)
        else:
            self._end_some_day(read)

    def _end_some_day(self, read: Read) -> None:
        """Until then the remaining pages land when their time comes, or not at all."""
        rng, faults = self.fabric.rng, self.fabric.faults
        parts = list(range(len(read.pending)))
        read.unproven = set(parts)
        last = parts.pop(self.fabric.endings.randrange(len(parts)))
        seconds = 2.0
        if rng.random() < faults.endless:
            self.fabric.count("fetch endless")
            self.endless_pages += read.into
            del self._reads[read.fetch_id]
        else:
            late = rng.random() < faults.unproven
            seconds = rng.uniform(0.1, 2.0) if late else 0.001
            self.process.after(seconds, lambda: self._end(read, last))
        for part in parts:
            sooner = self.fabric.endings.uniform(0, seconds)
            self.process.after(sooner, lambda part=part: self._end(read, part))  # type: ignore[misc]

    def _end(self, read: Read, part: int) -> None:
        """Nothing of this part lands any more."""
        read.unproven.remove(part)
        if read.ended or not self._has_ended(read):
            return
        read.ended = True
        self._reads.pop(read.fetch_id, None)
        self.fabric.count("fetch ended late")
        self._tell(FetchEnded(read.fetch_id))

    def _has_ended(self, read: Read) -> bool:
        """Whether the reads of all ranks are proven to have ended, of a fetch that was given up."""
        return not read.unproven

    def _forget(self, read: Read) -> None:
        read.ended = True
        del self._reads[read.fetch_id]

    def _replace_unpolled(self, fetch_id: int) -> None:
        """Abandoned when its last event waits to be polled: the reader gets `FetchEnded` instead."""
        unpolled = [event for event in self._events if event.fetch_id == fetch_id]
        if not unpolled or isinstance(unpolled[-1], FetchEnded):
            return
        self._events = [event for event in self._events if event not in unpolled]
        if fetch_id not in self._reads:
            self._events.append(FetchEnded(fetch_id))
