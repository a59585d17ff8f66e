"""Mixtures of experts by compiled kernels: many rows have the same bits, and what is left out would be seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode
from shared.engine.cpu import native_weights
from shared.engine.cpu.native_weights import NativeWeights
from shared.engine.model import expert_banks
from shared.engine.model.names import DecoderWeights
from shared.engine.native import kernels
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES
from tests.unit.engine.experts.test_expert_families import (
    GPT_OSS,
    GROUPED,
    NORMALIZED,
    RELATIVE_GAP_MAX,
    Mistake,
)
from tests.unit.engine.tiny_models import VOCAB_SIZE, save_model

MOST_ROWS = 1024  # that are computed at once
NOT_NORMALIZED = "qwen3-moe, not normalized, a dense layer, window"


def test_more_rows_than_are_computed_at_once_have_the_same_bits(tmp_path: Path) -> None:
    save_model(EXPERT_FAMILIES[NORMALIZED], tmp_path)
    driver, prompts = Driver(tmp_path, slots=16), [tokens_of(slot, 190, VOCAB_SIZE) for slot in range(7)]
    assert sum(map(len, prompts)) > MOST_ROWS
    joins = [
        driver.join(slot, range(12 * slot, 12 * slot + 12), prompt_len=190) for slot in range(len(prompts))
    ]
    rows = [ExtendRow(slot, prompt, 0, True) for slot, prompt in enumerate(prompts)]
    driver.run(ForwardMode.EXTEND, joins=joins, extend=rows)
    for slot, prompt in enumerate(prompts):
        driver.prefill(7, prompt, range(96, 108))
        assert torch.equal(driver.logits[slot][0], driver.logits[7][-1])
    driver.close()


# ---- what would be seen ----------------------------------------------------------------------------------------------
def _structs_otherwise(struct: str, **changes: Any) -> Mistake:
    """Fields of a struct are these, whatever the model has."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        made: Callable[..., Any] = getattr(kernels, struct)
        changed = {struct: lambda **fields: made(**(fields | changes))}
        patch.setattr(native_weights, "kernels", SimpleNamespace(**(vars(kernels) | changed)))

    return plant


def _vectors_otherwise(name: str, change: Callable[[Tensor], Tensor]) -> Mistake:
    """A vector of the file is read otherwise."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        read = DecoderWeights.vector

        def changed(self: Any, full: str, *others: Any) -> Tensor:
            found = read(self, full, *others)
            return change(found) if full.endswith(name) else found

        patch.setattr(DecoderWeights, "vector", changed)

    return plant


def _banks_otherwise(change: Callable[[Any], tuple[Any, Any]]) -> Mistake:
    """An expert has other matrices; `change` is given those of all."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        read = expert_banks.read_bank

        def bank(*args: Any) -> Any:
            found: Any = read(*args)
            found.gate_up[:], found.down[:] = change(found)
            return found

        patch.setattr(native_weights, "read_bank", bank)

    return plant


def _without_shared(patch: pytest.MonkeyPatch) -> None:
    put = NativeWeights._put_mlp

    def others(self: NativeWeights, layer: Any, prefix: str, inner: int) -> None:
        if "shared" not in prefix:
            put(self, layer, prefix, inner)

    patch.setattr(NativeWeights, "_put_mlp", others)


MISTAKES: dict[str, tuple[str, Mistake]] = {
    "the shared expert is left out": (NORMALIZED, _without_shared),
    "weights are not normalized": (NORMALIZED, _structs_otherwise("NativeRouting", normalized=0)),
    "weights are normalized where the model does not": (
        NOT_NORMALIZED,
        _structs_otherwise("NativeRouting", normalized=1),
    ),
    "weights are not scaled": (NORMALIZED, _structs_otherwise("NativeRouting", scale=1.0)),
    "one expert too few": ("mixtral", _structs_otherwise("NativeRouting", chosen=1)),
    "groups are ignored": (GROUPED, _structs_otherwise("NativeRouting", groups=1, groups_chosen=1)),
    "a softmax where sigmoids are": (NORMALIZED, _structs_otherwise("NativeRouting", sigmoid=0)),
    "the bias of the choice is left out": (NORMALIZED, _structs_otherwise("NativeRouting", correction=None)),
    "an expert's bias of the choice is another's": (
        NORMALIZED,
        _vectors_otherwise("e_score_correction_bias", lambda bias: bias.roll(1)),
    ),
    "a router's bias is another expert's": (
        GPT_OSS,
        _vectors_otherwise("router.bias", lambda bias: bias.roll(1)),
    ),
    "an expert is another one": (
        "mixtral",
        _banks_otherwise(lambda bank: (bank.gate_up.roll(1, 0), bank.down.clone())),
    ),
    "gate and up are each other": (
        "mixtral",
        _banks_otherwise(lambda bank: (bank.gate_up.roll(bank.gate_up.shape[1] // 2, 1), bank.down.clone())),
    ),
    "sinks are left out": (GPT_OSS, _structs_otherwise("NativeLayer", sinks=None)),
    "a head has the sink of another": (GPT_OSS, _vectors_otherwise("sinks", lambda sinks: sinks.flip(0))),
    "the gate is not clamped": (GPT_OSS, _structs_otherwise("NativeExperts", limit=1e9)),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_mistake_is_seen(mistake: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, plant = MISTAKES[mistake] if mistake else (NORMALIZED, lambda _patch: None)
    model: Any = save_model(EXPERT_FAMILIES[family], tmp_path)
    plant(monkeypatch)
    driver, prompt = Driver(tmp_path, kv_cache_dtype="float32"), tokens_of(7, 70, VOCAB_SIZE)
    gap = 0.0
    for slot, length in enumerate(range(20, 70, 7)):
        driver.prefill(slot, prompt[:length], range(6 * slot, 6 * slot + 6))
        with torch.inference_mode():
            expected = model(torch.tensor([prompt[:length]])).logits[0, -1]
        gap = max(gap, float((driver.logits[slot][0] - expected).abs().max() / expected.abs().max()))
    driver.close()
    assert gap > 100 * RELATIVE_GAP_MAX if mistake else gap < RELATIVE_GAP_MAX
