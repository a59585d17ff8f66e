"""KV pages over NIXL: one-sided reads through UCX, out of DRAM or VRAM.

The only file that imports nixl. The steps of a fetch are in `fetches`; here is how NIXL does them. The reasons were
measured (docs/decisions/0001-nixl-over-ucx.md):

- There are two kinds of agent. One *offers* this worker's pages and lease words and lives as long as the worker; batons
  name it. The others *read*, one generation at a time, and may be destroyed: destruction is the fence.
- NIXL's bindings are used directly. `nixl_agent` gives the progress thread no pause, so an idle agent burns a core;
  with a pause the thread sleeps in poll() and still wakes for every message. Its handles also release themselves when
  collected, and a read that was released before it is DONE can no longer be followed while its bytes still land.
- Without the progress thread a busy holder would answer no reads over TCP, where its CPU answers them.

A transfer belongs to one thread, the worker's loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import msgspec

from shared.primitives.errors import TransferError
from shared.transfer.counters import KvCounters
from shared.transfer.memory import PageMemory, WordTable
from shared.transfer.offer import describe_holder
from shared.transfer.reader import PEERS_MAX, NotPostedError, ReadState, Span, word_span
from shared.transfer.ucx import TransportLog, configure_ucx
from shared.wire.baton import Baton, Holder, HolderIdentity

PROGRESS_PAUSE_MICROSECONDS = 100_000  # how long an idle progress thread sleeps at most; messages wake it


@dataclass(frozen=True, slots=True)
class _Nixl:
    """NIXL's bindings, and the errors they raise, which have no common base class."""

    bindings: Any
    errors: tuple[type[Exception], ...]
    transport_log: TransportLog

    def segment(self, kind: str) -> Any:
        return self.bindings.VRAM_SEG if kind == "VRAM" else self.bindings.DRAM_SEG


@cache
def load_nixl() -> _Nixl:
    """NIXL's bindings, or a `TransferError` that says what to install."""
    transport_log = TransportLog()
    for variable in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):
        os.environ.setdefault(variable, "FATAL")  # a lost peer is an event here, not a screen of errors
    try:
        bindings = import_module("nixl._bindings")
    except ImportError as error:
        raise TransferError(f"NIXL cannot be imported ({error}): install nixl") from error
    kinds = (kind for name, kind in vars(bindings).items() if name.endswith("Error"))
    # The last is what they raise for a number of more than 64 bits, which a peer's addresses may come to.
    return _Nixl(bindings, (*kinds, RuntimeError), transport_log)


class _Agent:
    """A NIXL agent with the UCX backend and some memory registered."""

    def __init__(self, nixl: _Nixl, name: str, memory: Sequence[tuple[str, int, int, int]]):
        config = nixl.bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = nixl.bindings.NIXL_THREAD_SYNC_NONE
        config.pthrDelay = PROGRESS_PAUSE_MICROSECONDS
        self.nixl = nixl
        try:
            self.agent = nixl.bindings.nixlAgent(name, config)
            self.backends = [self.agent.createBackend("UCX", {})]
            for kind, address, size_bytes, device_id in memory:
                span = nixl.bindings.nixlRegDList(nixl.segment(kind), [(address, size_bytes, device_id, "")])
                self.agent.registerMem(span, self.backends)
        except nixl.errors as error:
            raise TransferError(f"NIXL agent {name} cannot be made: {error}") from error

    def close(self) -> None:
        del self.agent  # the last reference: the destructor joins the thread and closes the endpoints


@dataclass(slots=True)
class _NixlPeer:
    """A holder whose metadata is loaded, under the name of its agent."""

    identity: HolderIdentity
    reads_outstanding: int = 0


class NixlReader:
    """One generation of reads: a NIXL agent of its own. Implements `Reader`."""

    def __init__(self, nixl: _Nixl, name: str, pages: PageMemory, slots: int):
        self._nixl = nixl
        self._words = WordTable(slots)
        self._pages = pages
        target = (pages.memory, pages.address, pages.size_bytes, pages.device_id)
        self._agent = _Agent(nixl, name, [target, ("DRAM", self._words.address, self._words.size_bytes, 0)])
        self._peers_max = PEERS_MAX * pages.slices.peer_ranks_max
        self._peers: dict[str, _NixlPeer] = {}  # by agent name, as NIXL has them; least recently used first
        self._reads: dict[int, str] = {}
        self._broken: set[int] = set()

    def read_pages(self, baton: Baton, spans: Sequence[Span]) -> int:
        """See `Reader`."""
        pages, holder = self._pages, baton.holder
        return self._post(holder, spans, (pages.memory, pages.device_id), (holder.memory, holder.device_id))

    def read_word(self, baton: Baton, slot: int) -> int:
        """See `Reader`."""
        self._words.clear(slot)
        span = word_span(baton, self._words.address_of(slot))
        return self._post(baton.holder, [span], ("DRAM", 0), ("DRAM", 0))

    def word(self, slot: int) -> int:
        """See `Reader`."""
        return self._words.read(slot)

    def state(self, handle: int) -> ReadState:
        """See `Reader`. An error proves nothing: NIXL reports the first one while other parts may be under way."""
        if handle in self._broken:
            return ReadState.FAILED
        try:
            status = self._agent.agent.getXferStatus(handle)
        except self._nixl.errors:
            self._broken.add(handle)
            return ReadState.FAILED
        done = status == self._nixl.bindings.NIXL_SUCCESS
        return ReadState.DONE if done else ReadState.READING

    def release(self, handle: int) -> None:
        """See `Reader`."""
        self._peers[self._reads.pop(handle)].reads_outstanding -= 1
        self._agent.agent.releaseXferReq(handle)

    def new_transport(self) -> str:
        """See `Reader`."""
        return self._nixl.transport_log.newest()

    def close(self) -> None:
        """See `Reader`."""
        self._agent.close()

    def _post(
        self, holder: Holder, spans: Sequence[Span], local: tuple[str, int], remote: tuple[str, int]
    ) -> int:
        nixl, agent = self._nixl, self._agent.agent
        targets = [(span.target, span.size_bytes, local[1]) for span in spans]
        sources = [(span.source, span.size_bytes, remote[1]) for span in spans]
        try:
            self._connect_if_needed(holder)
            handle: int = agent.createXferReq(
                nixl.bindings.NIXL_READ,
                nixl.bindings.nixlXferDList(nixl.segment(local[0]), targets),
                nixl.bindings.nixlXferDList(nixl.segment(remote[0]), sources),
                holder.agent,
                b"",  # no notification: the holder would not use it
                self._agent.backends,
            )
        except nixl.errors as error:
            raise NotPostedError(f"{holder.name} cannot be read: {error}") from error
        self._reads[handle] = holder.agent
        self._peers[holder.agent].reads_outstanding += 1
        try:
            agent.postXferReq(handle, b"")
        except nixl.errors:
            self._broken.add(handle)  # parts of it may have been posted
        return handle

    def _connect_if_needed(self, holder: Holder) -> None:
        """Load the peer's metadata into the agent; above `PEERS_MAX` peers remove the least recently used idle one.

        NIXL knows peers by the name of the agent alone, so that name must be the holder's own, or one of its ranks'.
        """
        if not holder.has_agent_of_a_rank:
            raise NotPostedError(f"{holder.name} names the agent {holder.agent!r}, which is not its own")
        peer = self._peers.pop(holder.agent, None)
        if peer is None:
            name = self._agent.agent.loadRemoteMD(holder.metadata)
            name = name.decode() if isinstance(name, bytes) else name
            if name != holder.agent:
                raise NotPostedError(f"metadata of agent {name!r} came under the name {holder.agent!r}")
            peer = _NixlPeer(holder.identity)
        self._peers[holder.agent] = peer
        if peer.identity != holder.identity:
            raise NotPostedError(f"{holder.name} was read with other metadata before")
        idle = [
            name
            for name, other in self._peers.items()
            if not other.reads_outstanding and name != holder.agent
        ]
        if len(self._peers) > self._peers_max and idle:  # one with a read under way is never removed
            del self._peers[idle[0]]
            self._agent.agent.invalidateRemoteMD(idle[0])


class NixlOffer:
    """Offers this worker's pages and lease words over NIXL. Implements `Offer`.

    `interface` and `ports` say where UCX may listen ("lo", "20000-20999"); empty leaves it to UCX. `devices` are those
    of RDMA ("mlx5_0:1"). Of a worker of several ranks, 0 alone offers words; others have an agent and pages.
    `TransferError` when NIXL is not there or refuses the memory.
    """

    def __init__(
        self,
        uid: str,
        epoch: int,
        pages: PageMemory,
        lease_count: int,
        *,
        interface: str,
        ports: str,
        tcp: bool,
        devices: Sequence[str] = (),
        rank: int = 0,
    ):
        configure_ucx(interface, ports, tcp=tcp, devices=devices)
        self._nixl = load_nixl()
        self._generation = 0
        self._pages = pages
        self.counters = KvCounters()
        self.words = WordTable(lease_count)
        words_address = 0 if rank else self.words.address
        alone = describe_holder(uid, epoch, b"", pages, words_address, rank)
        self._name = alone.agent
        memory = [(pages.memory, pages.address, pages.size_bytes, pages.device_id)]
        if words_address:
            memory.append(("DRAM", words_address, self.words.size_bytes, 0))
        self._agent = _Agent(self._nixl, self._name, memory)
        self.holder = msgspec.structs.replace(alone, metadata=self._agent.agent.getLocalMD())

    def make_reader(self, slots: int) -> NixlReader:
        """See `Offer`."""
        self._generation += 1
        return NixlReader(self._nixl, f"{self._name}-r{self._generation}", self._pages, slots)

    def close(self) -> None:
        """See `Offer`. Let reads end first: over TCP the holder of a read under way may not survive it."""
        self._agent.close()
