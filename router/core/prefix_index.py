"""Which prompt prefixes a worker has probably cached, judged by what was sent to it.

Prompts are cut into blocks, each named by a hash of itself and all before it, so a prefix is as long as the
leading names that are known. Approximate on purpose: the worker evicts by rules of its own, and a wrong guess
costs a recomputation, never a wrong token. Bounded, least recently used first out.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 64  # fine enough for system prompts, coarse enough for one hash a 64 tokens


def block_names(token_ids: Sequence[int], extra_key: str) -> tuple[int, ...]:
    """One name for each whole block of `token_ids`; equal across processes and runs."""
    names = []
    name = zlib.crc32(extra_key.encode())
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        name = hash((name, tuple(token_ids[start : start + BLOCK_TOKENS])))
        names.append(name)
    return tuple(names)


class PrefixIndex:
    """The blocks sent to one worker."""

    def __init__(self, blocks_max: int):
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._blocks_max = blocks_max

    def __len__(self) -> int:
        return len(self._blocks)

    def hit_tokens(self, names: Sequence[int]) -> int:
        """Tokens of the longest known prefix."""
        for known, name in enumerate(names):
            if name not in self._blocks:
                return known * BLOCK_TOKENS
        return len(names) * BLOCK_TOKENS

    def insert(self, names: Sequence[int]) -> None:
        """Note a prompt. Its head becomes the most recent: a tail without its head would be useless."""
        for name in reversed(names[: self._blocks_max]):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)
