"""Which prompt prefixes each worker has probably cached, judged by what was sent to it.

Prompts are cut into blocks, each named by a digest of itself and all before it, so a prefix is as long as the
leading names that are known, and every router has the same names. One index holds the blocks of all workers, so one
walk along a prompt finds the hits of all of them. Approximate on purpose: the worker evicts by rules of its own, and a
wrong guess costs a recomputation, never a wrong token.

Each worker's blocks are bounded by what its pool can hold, and by an equal share of one bound for all workers; the
least recently used go first. When a worker turns out to have evicted some that were thought to be there, as many of
its oldest are forgotten: they are the likeliest to be gone too.

A step may break off at any line (`worker_faults`). So a block is in the worker's own list for as long as the index
knows the worker as a holder of it, and a worker goes last: `down` then takes all of it out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import msgspec

BLOCK_TOKENS = 64  # fine enough for system prompts, coarse enough for one digest each 64 tokens
NAME_BYTES = 8
FOUND_OF = 32  # prompts over which shares of what was found are taken, about
MODELS_MAX = 128  # pairs of model and role of which it is remembered what was found

_encode = msgspec.msgpack.Encoder().encode  # the fastest way from a tuple to bytes


def block_names(token_ids: Sequence[int], extra_key: str, known: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
    """One name for each whole block of `token_ids`; equal in every process.

    `known` are the names of its first blocks, which are not computed again.
    """
    start = len(known) * BLOCK_TOKENS
    if len(token_ids) - start < BLOCK_TOKENS:
        return known
    name = known[-1] if known else blake2b(extra_key.encode(), digest_size=NAME_BYTES).digest()
    names = list(known)
    for at in range(start, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = _encode(token_ids[at : at + BLOCK_TOKENS])
        name = blake2b(block, digest_size=NAME_BYTES, salt=name).digest()
        names.append(name)
    return tuple(names)


@dataclass(slots=True)
class Found:
    """What caches had of prompts to compute although nobody was known to have it: other routers sent it there."""

    prompts: float = 0.5  # share of prompts of which something was there
    tokens: float = 0.5  # share of the tokens of all prompts

    def add(self, *, found: bool, share: float) -> None:
        """One more prompt."""
        self.prompts += (found - self.prompts) / FOUND_OF
        self.tokens += (share - self.tokens) / FOUND_OF


class PrefixIndex:
    """The blocks sent to each worker, `blocks_max` for all workers together. A worker is known by its link peer."""

    def __init__(self, blocks_max: int):
        self._blocks_max = blocks_max
        self._found: OrderedDict[tuple[str, str], Found] = OrderedDict()  # by model and role
        self._workers: dict[str, _WorkerBlocks] = {}
        self._peers: dict[int, str] = {}  # by bit
        self._roles: Counter[str] = Counter()  # the bits of the workers of each
        self._holders: dict[bytes, int] = {}  # block name: the bits of the workers that have it

    def __len__(self) -> int:
        """Blocks of all workers; one that two workers have counts twice."""
        return sum(len(worker.blocks) for worker in self._workers.values())

    def __contains__(self, peer: str) -> bool:
        """Whether the worker is indexed."""
        return peer in self._workers

    def up(self, peer: str, pool_tokens: int, role: str = "") -> None:
        """Index a worker whose pool holds so many tokens; 0: not known. `Hits.best` is asked by role."""
        bit = next(bit for bit in range(len(self._peers) + 1) if bit not in self._peers)
        self._peers[bit] = peer
        self._roles[role] |= 1 << bit
        self._workers[peer] = _WorkerBlocks(bit, pool_tokens // BLOCK_TOKENS if pool_tokens else None)
        for worker in self._workers.values():
            self._shrink(worker, self._bound(worker))

    def down(self, peer: str) -> None:
        """Forget a worker, if it is indexed."""
        worker = self._workers.get(peer)
        if worker is not None:
            self._shrink(worker, 0)
            for role in self._roles:
                self._roles[role] &= ~(1 << worker.bit)
            self._peers.pop(worker.bit, None)
            del self._workers[peer]

    def hits(self, names: Sequence[bytes]) -> Hits:
        """Which workers know how much of a prompt."""
        having = self._holders.get(names[0], 0) if names else 0
        steps: list[tuple[int, int]] = []
        for known, name in enumerate(names):
            if not having:
                break
            still = having & self._holders.get(name, 0)
            if still != having:
                steps.append((known * BLOCK_TOKENS, having))
            having = still
        if having:
            steps.append((len(names) * BLOCK_TOKENS, having))
        return Hits(steps[::-1], self._peers, self._workers, self._roles)

    def insert(self, peer: str, names: Sequence[bytes]) -> None:
        """Note a prompt. Its head becomes the most recent: a tail without its head would be useless."""
        worker = self._workers.get(peer)
        if worker is None:
            return
        bound = self._bound(worker)
        mark = 1 << worker.bit
        for name in reversed(names[:bound]):
            worker.blocks[name] = None
            worker.blocks.move_to_end(name)
            self._holders[name] = self._holders.get(name, 0) | mark
        self._shrink(worker, bound)

    def forget_oldest(self, peer: str, tokens: int) -> None:
        """The worker has evicted so many tokens that were expected in its cache."""
        worker = self._workers.get(peer)
        if worker is not None:
            self._shrink(worker, max(0, len(worker.blocks) - tokens // BLOCK_TOKENS))

    def found(self, model: str, role: str) -> Found:
        """What own workers of the role had lately of prompts that nobody was known to have, and that they compute.

        The role "fetched" is that of decode workers which fetch what they do not have.
        """
        return self._found.get((model, role)) or _at_first(role)

    def looked(self, model: str, role: str, *, found: bool, share: float) -> None:
        """A prompt that nobody was known to have was, or was not, in the cache of its own worker. See `found`."""
        self._found.setdefault((model, role), _at_first(role)).add(found=found, share=share)
        self._found.move_to_end((model, role))
        if len(self._found) > MODELS_MAX:
            self._found.popitem(last=False)

    def _bound(self, worker: _WorkerBlocks) -> int:
        share = max(1, self._blocks_max // len(self._workers))
        return share if worker.blocks_max is None else min(share, worker.blocks_max)

    def _shrink(self, worker: _WorkerBlocks, bound: int) -> None:
        while len(worker.blocks) > bound:
            name = next(iter(worker.blocks))
            left = self._holders.get(name, 0) & ~(1 << worker.bit)
            if left:
                self._holders[name] = left
            else:
                self._holders.pop(name, None)
            del worker.blocks[name]


class Hits:
    """Tokens of the longest known prefix, by worker. Found for a few workers without a look at all that know some."""

    def __init__(
        self,
        steps: list[tuple[int, int]],
        peers: dict[int, str],
        workers: dict[str, _WorkerBlocks],
        roles: Mapping[str, int],
    ):
        # tokens, and the bits of the workers that have so many or more; the longest first
        self._steps = steps
        self._peers = peers
        self._workers = workers
        self._roles = roles

    def tokens(self, peer: str) -> int:
        """Tokens of the prompt that one worker has cached; 0 where nothing is known."""
        worker = self._workers.get(peer) if self._steps else None
        if worker is None:
            return 0
        for tokens, bits in self._steps:
            if bits >> worker.bit & 1:
                return tokens
        return 0

    def best(self, role: str, count: int, seed: int) -> list[str]:
        """Up to `count` workers of a role with the longest prefixes; `seed` says which among equals."""
        found: dict[str, None] = {}
        of_role = self._roles.get(role, 0)
        for _, having in self._steps:
            bits = having & of_role
            if not bits:
                continue
            turn = seed % bits.bit_length()
            for bit in (*islice(_bits(bits >> turn << turn), count), *islice(_bits(bits), count)):
                found[self._peers[bit]] = None
                if len(found) == count:
                    return list(found)
        return list(found)

    def all(self) -> dict[str, int]:
        """Cached tokens by worker, of all workers that have some."""
        return {self._peers[bit]: tokens for tokens, bits in reversed(self._steps) for bit in _bits(bits)}


class _WorkerBlocks:
    """What one worker has, least recently used first."""

    __slots__ = ("bit", "blocks", "blocks_max")

    def __init__(self, bit: int, blocks_max: int | None):
        self.bit = bit
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.blocks_max = blocks_max


def _at_first(role: str) -> Found:
    """What is expected before anything was looked for: of fetches nothing, since one router knows all turns."""
    return Found(0.0, 0.0) if role == "fetched" else Found()


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
