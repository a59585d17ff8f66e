"""Drives a loaded engine step by step, keeping the logits of every sampled row, as a scheduler would but by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch, SlotJoin
from shared.engine.config import EngineConfig
from shared.engine.engine import load
from shared.engine.native.build import INSTRUCTION_SETS, choose
from shared.engine.parts import Engine
from shared.primitives.errors import ConfigError
from shared.wire.sampling_params import SamplingParams
from shared.worker.follower import follow
from tests.unit.engine.parallel.rank_followers import Follow, TestRanks

RANKS = int(os.environ.get("SEGUE_TEST_RANKS", "1"))  # of a device of cuda-on-cpu, where a test does not say
COMPILED_KERNELS = [instruction_set.name for instruction_set in INSTRUCTION_SETS]
GREEDY = SamplingParams(max_new_tokens=64, seed=0, temperature=0.0)


class Driver:
    """An engine, its step counter and what it has sampled: `logits[slot]` and `tokens[slot]`, in order.

    `settings` are those of `EngineConfig`; `ranks`: of the device, this process is the first.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pages: int = 128,
        page_size: int = 16,
        slots: int = 16,
        ranks: int | None = None,
        body: Follow = follow,
        **settings: Any,
    ) -> None:
        """`body`: what the other ranks do."""
        self.logits: dict[int, list[Tensor]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.step = 0
        config = EngineConfig(
            pages=pages, page_size=page_size, slots=slots, **{"host_fraction": 0.25} | settings
        )
        if ranks is None:
            ranks = RANKS if config.device == "cuda-on-cpu" else 1
        self.ranks = TestRanks(ranks, folder, config, body) if ranks > 1 else None
        self.engine: Engine = load(
            folder,
            config,
            on_logits=self._record,
            followers=self.ranks.followers if self.ranks else None,
        )
        if settings.get("kernels") != "torch" and settings.get("device") != "cuda-on-cpu":
            assert "torch" not in self.engine.description, "there is no compiler: these tests need one"
        self.device = self.engine.device
        self.kv_cache_dtype = str(self.engine.cache.store.dtype).removeprefix("torch.")

    def _record(self, _step: int, slots: tuple[int, ...], logits: Tensor) -> None:
        for slot, row in zip(slots, logits, strict=True):
            self.logits.setdefault(slot, []).append(row)

    def join(
        self,
        slot: int,
        pages: Sequence[int],
        *,
        prompt_len: int,
        kv_len: int = 0,
        params: SamplingParams = GREEDY,
        token_ids: Sequence[int] = (),
        last_token: int | None = None,
    ) -> SlotJoin:
        """A join that also forgets what the slot had sampled."""
        self.logits[slot], self.tokens[slot] = [], []
        return SlotJoin(slot, tuple(pages), kv_len, params, prompt_len, token_ids, last_token)

    def run(
        self,
        mode: ForwardMode,
        *,
        joins: Sequence[SlotJoin] = (),
        extend: Sequence[ExtendRow] = (),
        decode_slots: Sequence[int] = (),
    ) -> list[int]:
        """Launch a step, wait for it, and keep its tokens."""
        self.step += 1
        batch = ScheduleBatch(
            self.step, mode, joins=tuple(joins), extend=tuple(extend), decode_slots=tuple(decode_slots)
        )
        self.device.launch(batch)
        sampled = self.device.wait(self.step).token_ids
        slots = [*decode_slots, *(row.slot for row in extend if row.samples)]
        for slot, token in zip(slots, sampled, strict=True):
            self.tokens[slot].append(token)
        return sampled

    def prefill(
        self,
        slot: int,
        token_ids: Sequence[int],
        pages: Sequence[int],
        chunk: int | None = None,
        chunks: Sequence[int] = (),
    ) -> None:
        """Extend a slot by a whole prompt: in chunks of these sizes, then in some of `chunk` tokens."""
        joins, start, sizes = [self.join(slot, pages, prompt_len=len(token_ids))], 0, iter(chunks)
        while start < len(token_ids):
            part = token_ids[start : start + next(sizes, chunk or len(token_ids))]
            row = ExtendRow(slot, part, start, start + len(part) == len(token_ids))
            self.run(ForwardMode.EXTEND, joins=joins, extend=[row])
            joins, start = [], start + len(part)

    def decode(self, slots: Sequence[int], steps: int) -> None:
        """Decode steps with all these slots in the batch."""
        for _ in range(steps):
            self.run(ForwardMode.DECODE, decode_slots=slots)

    def close(self) -> None:
        """End the forward thread, and other ranks."""
        self.device.close()
        if self.ranks is not None:
            self.ranks.close()


def skip_unless_runnable(*kernels: str) -> None:
    """Skip the test, with the reason, where the CPU lacks one of these instruction sets."""
    for name in set(kernels) - {"torch"}:
        try:
            choose(name)
        except ConfigError as error:
            pytest.skip(str(error))


def tokens_of(seed: int, length: int, vocab_size: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(vocab_size, (length,), generator=generator).tolist()]
