"""The baton: the one value that lets another worker continue a request.

A worker that has a `Baton` may read the pages it names, straight out of the holder's memory, and can check afterwards
whether what it read was still valid: the pages are under a *lease*, and the lease has a *word* at the holder that
is the lease's nonce for as long as the pages are locked. Who knows the nonce was given the baton: the TLS transport
gives a lease's pages, and no others, to readers that bring it.

    holder   lock pages ── write nonce ───────────────────────────── zero word ── unlock pages
    reader                     read pages … all reads DONE ── read word
                                                              word == nonce: the lock held all along

The baton goes stale by itself and need not be revoked. It promises: below `kv_len` nothing is rewritten while
the lease holds; bytes beyond `kv_len` are unspecified. It does not carry the tokens: the router knows them, and
sends them beside it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared.wire.bounds import NUMBERS_MAX, Address, Bits64, Count, CountOrNone, Nonce, Pages

NAME_CHARACTERS_MAX = 1024
RANKS_MAX = 64  # GPUs of one worker
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]  # who receives one keeps it, and logs it
Numbers = Annotated[tuple[int, ...], msgspec.Meta(max_length=NUMBERS_MAX)]


def worker_name(uid: str, epoch: int) -> str:
    """`<uid>/<epoch as 16 hex digits>`, in logs, metrics and links: a worker restarted under its uid is another one."""
    return f"{uid}/{epoch:016x}"


def agent_name(uid: str, epoch: int) -> str:
    """`<uid>-<epoch as 16 hex digits>`: the name of a worker's transfer agent. No two workers share one."""
    return f"{uid}-{epoch:016x}"


def rank_agent_name(uid: str, epoch: int, rank: int) -> str:
    """`<uid>-<epoch as 16 hex digits>.<rank>` for ranks from 1 on: no worker's own name ends so."""
    return f"{agent_name(uid, epoch)}.{rank}"


HolderIdentity = tuple[str, int, bytes]


class HolderRank(msgspec.Struct, frozen=True):
    """A further GPU of a worker: which slices of each page it holds, and how to reach them.

    A page is cut into as many slices as the model has KV heads. A rank holds consecutive ones, in a memory of its own.
    """

    agent: Name
    metadata: bytes
    pages_address: Address
    first_slice: Count
    slices: Count
    device_id: Count = 0
    memory: Name = "DRAM"


class Holder(msgspec.Struct, frozen=True):
    """The worker whose memory holds the pages, and how to reach that memory.

    `metadata` is the transfer agent's own description (NIXL: the serialized agent metadata; tls: where it listens),
    opaque to all but `shared.transfer`. Addresses are in the holder's address space, in bytes. Of a worker with several
    GPUs the fields describe rank 0, and `ranks` the others.
    """

    uid: Name
    epoch: Bits64
    agent: Name  # as `agent_name` makes it of uid and epoch; any other name is refused
    metadata: bytes
    pages_address: Address
    page_bytes: Count
    words_address: Address  # the lease words lie in host memory, 8 bytes each; 0: no peer reads them there
    device_id: Count = 0
    memory: Name = "DRAM"  # DRAM or VRAM: where the pages lie
    known_page: CountOrNone = -1  # a page with the same bytes in every worker, to check reads with; -1: none
    slices: Count = 0  # of a page that rank 0 holds, the first ones; 0: the whole page
    ranks: Annotated[tuple[HolderRank, ...], msgspec.Meta(max_length=RANKS_MAX - 1)] = ()  # 1, 2 …

    @property
    def metadata_bytes(self) -> int:
        """The size of the metadata of all ranks together."""
        return len(self.metadata) + sum(len(rank.metadata) for rank in self.ranks)

    @property
    def name(self) -> str:
        """The worker's name, as `worker_name` spells it."""
        return worker_name(self.uid, self.epoch)

    @property
    def identity(self) -> HolderIdentity:
        """The uid, the epoch and where all ranks are: what a reader knows of one identity it believes of no other."""
        place = self.metadata + msgspec.msgpack.encode(self.ranks) if self.ranks else self.metadata
        return self.uid, self.epoch, place

    @property
    def has_own_agent(self) -> bool:
        """Whether the agent's name is that of this worker, and no other's."""
        return self.agent == agent_name(self.uid, self.epoch)

    @property
    def has_agent_of_a_rank(self) -> bool:
        """Whether it is that of this worker or of one of its ranks, as a reader sees them one by one."""
        own, _, rank = self.agent.rpartition(".")
        return self.has_own_agent or (own == agent_name(self.uid, self.epoch) and rank.isdecimal())


class Baton(msgspec.Struct, frozen=True):
    """Where the KV pages of one request lie, their layout, and the lease that proves them valid."""

    rid: Name
    attempt: Count
    holder: Holder
    kv_format: Name  # fingerprint of page size, layout, dtype: a reader fetches only its own format
    lease: Count  # index of the lease's word
    nonce: Nonce  # what the word holds while the lease lives; 64 bits nobody can guess, never 0
    kv_len: Count  # tokens whose KV lies in the pages
    prompt_len: Count  # tokens of the client's prompt; positions of sampling count from here
    pages: Pages  # page numbers in the holder's pool: pages[i] holds tokens i*page_size …
