"""The device of a follower: it does on its share what rank 0's device does, as orders come.

    rank 0      stage → tell │ upload → write words → layers → choose ──gather──┐
    followers   order → plan │ upload → write words → layers ────────────take tokens

A follower has no mirror of slots, no sampler and no masks: what a step writes, plans and computes stands in its order,
and its tokens are rank 0's. So it cannot come to another choice. It copies an order's words to a buffer of its own,
from which its GPU reads, and gives the order back at once: rank 0 never waits for its steps.

All ranks capture the same graphs in the same order, since graphs hold collectives.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.engine.attention.protocol import PlannedAttention
from shared.engine.checkpoint.memory_plan import context_bound
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.model_impl import read_config
from shared.engine.config import EngineConfig
from shared.engine.cuda.assembly import assemble_parts, dtypes_for, platform_for
from shared.engine.cuda.counters import DeviceCounters
from shared.engine.cuda.eager_extends import EagerExtends, ExtendSizes
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.extend_graphs import ExtendGraphs
from shared.engine.cuda.graphs import DecodeGraphs
from shared.engine.cuda.kernels.step_kernels import SlotWord
from shared.engine.cuda.staging import place_of
from shared.engine.cuda.step_memory import step_memory
from shared.engine.model.weights import Weights, stored_dtype
from shared.engine.parallel.orders import Operation, Order, OrderKind, Words, operations_of
from shared.engine.parallel.shares import HeldHeads, ModelShare, Share
from shared.engine.streams import Mark, Work
from shared.primitives.errors import InvariantError


def load_follower(folder: Path, config: EngineConfig, share: Share, meeting: Path) -> FollowerDevice:
    """Load a rank's share of a model beside the other ranks. Raises what `shared.engine.engine.load` does."""
    shape = read_config(folder, "segue")
    assert isinstance(shape, ModelConfig)
    context_len, _ = context_bound(shape, config.context_len)
    of_share = ModelShare(shape.at_context(context_len), share)
    shape = of_share.whole
    platform = platform_for(config, share, meeting)
    dtypes = dtypes_for(platform, config, shape, stored_dtype(folder))
    with Weights(folder, str(platform.device)) as weights:
        parts, capacity, _ = assemble_parts(platform, shape, weights, dtypes, config)
    return FollowerDevice(parts, capacity, of_share.held_heads)


class FollowerDevice:
    """One of several ranks, but the first. All calls come from one thread."""

    def __init__(self, parts: EngineParts, capacity: Capacity, heads: HeldHeads) -> None:
        """Captures the graphs of DECODE and EXTEND, as all ranks do at once."""
        self._parts = parts
        self.cache, self.heads = parts.cache, heads
        self._forward = forward = parts.forward
        self._words, self._staging = step_memory(parts, capacity)
        slots = capacity.slots
        self._logits = torch.zeros(slots, capacity.vocab_size, device=self._words.words.device)
        self._tokens = torch.zeros(slots, dtype=torch.int32, device=self._words.words.device)
        forward.synchronize()  # weights and all that was made above lie on another stream
        counters = DeviceCounters()
        self._decode = DecodeGraphs(parts, self._words, self._staging, self._logits, counters)
        self._extend = ExtendGraphs(parts, self._staging, capacity, counters)
        self._eager = EagerExtends(parts, self._staging, self._decode)
        self._warm_up()
        self._last = forward.record()  # behind the newest step

    @property
    def order_words(self) -> int:
        """Words of the longest order."""
        return self._staging.order_words

    def step(self, order: Order) -> None:
        """Launch what an order says; its words are not needed any more."""
        self._staging.begin()
        self._staging.fill(order.words)
        works = [self._planned(kind, numbers) for kind, numbers in operations_of(order.operations)]
        self._staging.upload()
        for work in works:
            self._forward.run(work)
        self._last = self._forward.record()
        self._staging.end(self._last)

    def copy(self, order: Order) -> None:
        """Copy pages behind the steps so far."""
        pages, host_pages = np.split(order.words, 2)
        copies, cache = self._parts.copies, self._parts.cache
        copies.wait_for(self._last)
        if order.kind is OrderKind.BACKUP:
            copies.run(partial(cache.backup, pages.tolist(), host_pages.tolist()))
        else:
            copies.run(partial(cache.restore, host_pages.tolist(), pages.tolist()))

    def record(self, *, copies: bool = False) -> Mark:
        """A mark behind all steps so far, or behind all copies."""
        return self._parts.copies.record() if copies else self._last

    def close(self) -> None:
        """Finish what was launched, and give up the streams."""
        for stream in (self._forward, self._parts.copies):
            stream.close()

    def _planned(self, kind: Operation, numbers: Words) -> Work:
        """Plan an operation whose words are staged; returns its work on the device."""
        if kind is Operation.DECODE:
            return self._decode.planned(int(numbers[0]), numbers[1:])
        place, *rest = map(int, numbers)
        match kind:
            case Operation.WRITE:
                (count,) = rest
                _, staged = self._staging.at(place, 2 * count)
                return partial(self._parts.kernels.write_words, staged.view(count, 2), self._words.words)
            case Operation.EXTEND:
                *sizes, first = rest
                asked = ExtendSizes(*sizes)
                ids, attention, at = self._eager.planned(place, asked)
                logits = None if first < 0 else self._rows(first, asked.needed)
                return partial(self._compute, ids, attention, at, logits)
            case Operation.EXTEND_GRAPH:
                tokens, (place, words, needed, first) = place, rest
                return self._extend.planned(tokens, place, words, self._rows(first, needed))
            case Operation.TAKE_TOKENS:
                (count,) = rest
                return partial(self._take_tokens, self._staging.at(place, count)[1])

    def _rows(self, first: int, count: int) -> Tensor:
        if not 0 <= first <= first + count <= len(self._logits):
            raise InvariantError(f"{count} rows of logits from {first} on, there are {len(self._logits)}")
        return self._logits[first : first + count]

    def _warm_up(self) -> None:
        """See `CudaDevice`: what it does together with others."""
        page = len(self._parts.cache.store) - 1
        sizes = ExtendSizes(requests=1, pages=1, tokens=1, needed=1)
        self._staging.begin()
        _, staged = self._staging.put(np.array([0, 1, 0, 1, page, 1, 0, 0, 0, 0], dtype=np.int32))
        ids, attention, at = self._eager.planned(place_of(staged), sizes)
        self._staging.upload()
        self._forward.run(partial(self._compute, ids, attention, at, self._logits[:1]))
        self._staging.end(self._forward.record())
        self._forward.synchronize()

    # ---- the device's part ---------------------------------------------------------------------------------------

    def _compute(
        self, token_ids: Tensor, attention: PlannedAttention, at: Tensor, logits: Tensor | None
    ) -> None:
        self._parts.model.run(token_ids, attention, at, logits)

    def _take_tokens(self, slots: Tensor) -> None:
        """The tokens that rank 0 has chosen become the last ones of these slots."""
        tokens = self._parts.ops.gather(self._tokens[: len(slots)])[0]
        self._words.state[:, SlotWord.LAST_TOKEN].index_copy_(0, slots.long(), tokens)
