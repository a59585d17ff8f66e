"""A `CudaDevice` over a tiny model whose heads FlashInfer has kernels for, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch, SlotJoin
from shared.engine.checkpoint.dtypes import dtypes_on_cuda
from shared.engine.checkpoint.model_config import read_model_config
from shared.engine.config import EngineConfig
from shared.engine.cuda.loading import DecoderSource, assemble
from shared.engine.cuda.platform import Platform
from shared.engine.model.weights import Weights
from shared.wire.sampling_params import SamplingParams
from tests.unit.engine.driver import tokens_of
from tests.unit.engine.late_requests import EOS, ToyMatchers
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

FAMILY = "qwen3, 128 · 2 of 2"
PAGE_SIZE = 16
PAGES_EACH = 4  # of a slot: page p of slot s is 4 s + p
PROMPT_LEN = 20
DRAWN = SamplingParams(max_new_tokens=64, seed=5, temperature=0.8)


class SmallDevice:
    """Slot i has its own prompt and pages; what is sampled is kept by slot, with the logits."""

    def __init__(self, platform: Platform, folder: Path, slots: int, *, context_len: int = 64) -> None:
        tiny_model(FAMILY, folder)
        config = read_model_config(folder)
        dtypes = dtypes_on_cuda("auto", "auto", stored=torch.float32, capability=platform.capability)
        sized = EngineConfig(
            slots * PAGES_EACH + 8,
            PAGE_SIZE,
            slots,
            host_fraction=0.5,
            context_len=context_len,
            extend_tokens=slots * 32,
        )
        with Weights(folder, str(platform.device)) as weights:
            self.device, self.cache, _ = assemble(
                platform,
                DecoderSource(config, weights, dtypes, EOS, ToyMatchers()),
                sized,
                on_logits=self._keep,
            )
        self.cache.store[: self.cache.pages] = torch.nan  # what is read before it was written shows
        platform.forward.synchronize()
        self.slots = slots
        self.step = 0
        self.tokens: dict[int, list[int]] = {slot: [] for slot in range(slots)}
        self.logits: dict[int, list[Tensor]] = {slot: [] for slot in range(slots)}

    def _keep(self, _step: int, slots: tuple[int, ...], logits: Tensor) -> None:
        for slot, row in zip(slots, logits, strict=True):
            self.logits[slot].append(row)

    def launch(self, mode: ForwardMode, **batch: object) -> int:
        """Launch a step; returns its number."""
        self.step += 1
        self.device.launch(ScheduleBatch(self.step, mode, **batch))  # type: ignore[arg-type]
        return self.step

    def run(self, mode: ForwardMode, slots: Sequence[int], **batch: object) -> None:
        """Launch a step and wait; `slots` sample."""
        for slot, token in zip(slots, self.device.wait(self.launch(mode, **batch)).token_ids, strict=True):
            self.tokens[slot].append(token)

    def prompt(self, slot: int) -> list[int]:
        """The slot's prompt."""
        return tokens_of(slot, PROMPT_LEN, VOCAB_SIZE)

    def join(
        self, slot: int, kv_len: int = 0, last_token: int | None = None, params: SamplingParams = DRAWN
    ) -> SlotJoin:
        """The slot with its pages, at this length."""
        pages = tuple(range(PAGES_EACH * slot, PAGES_EACH * (slot + 1)))
        return SlotJoin(slot, pages, kv_len, params, PROMPT_LEN, last_token=last_token)

    def prefill(self, slots: Sequence[int]) -> None:
        """The prompts of these slots in one step."""
        rows = tuple(ExtendRow(slot, self.prompt(slot), 0, True) for slot in slots)
        joins = tuple(self.join(slot) for slot in slots)
        self.run(ForwardMode.EXTEND, slots, joins=joins, extend=rows)

    def decode(self, slots: Sequence[int], **batch: object) -> None:
        """A DECODE step."""
        self.run(ForwardMode.DECODE, slots, decode_slots=tuple(slots), **batch)
