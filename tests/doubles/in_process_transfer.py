"""Pages between workers of one process: a second transfer, for tests.

Copies real memory, by address, inside a fabric that knows which workers are alive. A read advances only when it is
polled, one span at a time, so a lease may end between two pages. `freeze`, `thaw` and `kill` do to a worker what
SIGSTOP, SIGCONT and SIGKILL do to a process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.transfer.counters import KvCounters
from shared.transfer.memory import PageMemory, WordTable
from shared.transfer.offer import describe_holder
from shared.transfer.reader import NotPostedError, ReadState, Span, word_span
from shared.wire.baton import Baton, Holder


def _move_memory(span: Span) -> None:
    ctypes.memmove(span.target, span.source, span.size_bytes)


@dataclass(slots=True)
class _Member:
    """What the fabric knows of a worker."""

    frozen: bool = False


@dataclass(slots=True)
class InProcessFabric:
    """The workers that can reach each other, by agent name."""

    members: dict[str, _Member] = field(default_factory=dict)
    copy: Callable[[Span], None] = _move_memory  # by address
    unreachable: set[str] = field(default_factory=set)  # no new read of these agents can be posted

    def join(self, agent: str) -> None:
        """A worker comes up; its name has never been used before."""
        assert agent not in self.members, f"agent {agent} joined twice"
        self.members[agent] = _Member()

    def freeze(self, agent: str) -> None:
        """It answers no read until it is thawed."""
        self.members[agent].frozen = True

    def thaw(self, agent: str) -> None:
        self.members[agent].frozen = False

    def kill(self, agent: str) -> None:
        """Its memory is gone: reads of it fail."""
        del self.members[agent]


@dataclass(slots=True)
class _Read:
    agent: str
    spans: list[Span]
    state: ReadState = ReadState.READING


class InProcessReader:
    """One generation of reads. Implements `Reader`."""

    def __init__(self, fabric: InProcessFabric, slots: int):
        self._fabric = fabric
        self._words = WordTable(slots)
        self._reads: dict[int, _Read] = {}
        self._posted = 0

    def read_pages(self, baton: Baton, spans: Sequence[Span]) -> int:
        """See `Reader`."""
        return self._post(baton.holder, _Read(baton.holder.agent, list(spans)))

    def read_word(self, baton: Baton, slot: int) -> int:
        """See `Reader`."""
        self._words.clear(slot)
        span = word_span(baton, self._words.address_of(slot))
        return self._post(baton.holder, _Read(baton.holder.agent, [span]))

    def word(self, slot: int) -> int:
        """See `Reader`."""
        return self._words.read(slot)

    def state(self, handle: int) -> ReadState:
        """See `Reader`. Moves one span."""
        read = self._reads[handle]
        if read.state is ReadState.READING:
            self._move(read)
        return read.state

    def release(self, handle: int) -> None:
        """See `Reader`."""
        assert self._reads.pop(handle).state is ReadState.DONE, "a read was released while bytes may land"

    def new_transport(self) -> str:
        """See `Reader`."""
        return "memory"

    def close(self) -> None:
        """See `Reader`."""
        self._reads.clear()

    def _post(self, holder: Holder, read: _Read) -> int:
        if holder.agent not in self._fabric.members or holder.agent in self._fabric.unreachable:
            raise NotPostedError(f"{holder.name} cannot be read: it is gone")
        self._posted += 1
        self._reads[self._posted] = read
        return self._posted

    def _move(self, read: _Read) -> None:
        member = self._fabric.members.get(read.agent)
        if member is None:
            read.state = ReadState.FAILED
        elif not member.frozen:
            span = read.spans.pop(0)
            self._fabric.copy(span)
            if not read.spans:
                read.state = ReadState.DONE


class InProcessOffer:
    """Pages and lease words that workers of the same fabric may read. Implements `Offer`."""

    def __init__(
        self,
        fabric: InProcessFabric,
        uid: str,
        epoch: int,
        pages: PageMemory,
        lease_count: int,
        rank: int = 0,
    ):
        self._fabric = fabric
        self.words = WordTable(lease_count)
        self.counters = KvCounters()
        words_address = 0 if rank else self.words.address
        self.holder = describe_holder(uid, epoch, b"", pages, words_address, rank)
        fabric.join(self.holder.agent)

    def make_reader(self, slots: int) -> InProcessReader:
        """See `Offer`."""
        return InProcessReader(self._fabric, slots)

    def close(self) -> None:
        """See `Offer`. The fabric's `kill` makes reads fail."""
