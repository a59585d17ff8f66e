"""Each family of experts computes what transformers computes, and what is left out of it would be seen.

Measured largest gap of any logit: 5.7e-6 of the largest logit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform
from shared.engine.checkpoint.experts_config import Routing
from shared.engine.checkpoint.model_config import read_model_config
from shared.engine.model import experts, loading, torch_ops
from shared.engine.model.expert_banks import read_bank
from shared.engine.model.gated_mlp import clamped
from shared.engine.model.loading import load_decoder
from shared.engine.model.ops import ExpertBank
from shared.engine.model.routing import Router
from shared.engine.model.torch_ops import MakeLinear, PackedLinear, TorchOps, plain_linear
from tests.unit.engine.checkpoint.published_models import MetaWeights
from tests.unit.engine.driver import COMPILED_KERNELS, Driver, skip_unless_runnable, tokens_of
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES
from tests.unit.engine.precision import logits_of, token_errors
from tests.unit.engine.test_fallback import assert_exact_in_chunks_cached_and_moved
from tests.unit.engine.tiny_models import VOCAB_SIZE, save_model

RELATIVE_GAP_MAX = 4e-5
TOKENS = tokens_of(7, 200, VOCAB_SIZE)
STEPS = (50, 1, 33, 107, 1, 1, 7)
DEVICES: tuple[dict[str, str], ...] = ({}, {"kernels": "torch"}, {"device": "cuda-on-cpu"})


@pytest.fixture(params=EXPERT_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("settings", DEVICES, ids=str)
def test_logits_are_those_of_transformers_in_chunks_cached_and_moved(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = save_model(EXPERT_FAMILIES[family], tmp_path)
    driver = Driver(tmp_path, slots=8, **settings)
    assert "transformers" not in driver.engine.determinism
    assert_exact_in_chunks_cached_and_moved(model, driver)
    assert len({token for tokens in driver.tokens.values() for token in tokens}) > 2
    driver.close()


@pytest.mark.parametrize("name", ["torch", *COMPILED_KERNELS])
def test_a_row_has_the_same_bits_alone_in_a_crowd_and_on_two_threads(
    family: str, name: str, tmp_path: Path
) -> None:
    skip_unless_runnable(name)
    save_model(EXPERT_FAMILIES[family], tmp_path)
    prompt = tokens_of(1, 140, VOCAB_SIZE)
    alone, crowded = (
        Driver(tmp_path, kernels=name, threads=threads, kv_cache_dtype="float32") for threads in (1, 2)
    )
    alone.prefill(0, prompt, range(12))
    alone.decode([0], 6)
    for slot in (1, 2, 3):
        crowded.prefill(slot, tokens_of(slot, 30 * slot, VOCAB_SIZE), range(12 * slot, 12 * slot + 12))
    crowded.prefill(0, prompt, range(48, 60), chunk=33)
    crowded.decode([3, 0, 1, 2], 6)
    assert len(alone.logits[0]) == 7
    for one, other in zip(alone.logits[0], crowded.logits[0], strict=True):
        assert torch.equal(one, other)
    for driver in (alone, crowded):
        driver.close()


def test_half_of_the_tokens_are_as_near_to_float32_as_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    """In bfloat16. Of half: where two experts are nearly equal rounding takes one or the other, and all differs."""
    save_model(EXPERT_FAMILIES[family], tmp_path)
    found = logits_of(tmp_path, TOKENS, STEPS, TorchOps(), dtype=torch.bfloat16)
    ours, theirs = token_errors(tmp_path, TOKENS, found, torch.bfloat16)
    assert float(ours.median()) <= 1.5 * float(theirs.median())


def test_all_weights_are_read_once_and_planned_for(family: str, tmp_path: Path) -> None:
    model = save_model(EXPERT_FAMILIES[family], tmp_path)
    config, weights = read_model_config(tmp_path), MetaWeights()
    load_decoder(config.at_context(16), weights, TorchOps(), context_len=16, dtype=torch.float32)
    corrections = sum(each.numel() for name, each in model.named_buffers() if "correction" in name)
    of_transformers = sum(parameter.numel() for parameter in model.parameters()) + corrections
    assert config.parameters == sum(weights.taken.values()) == of_transformers
    assert config.computed < config.parameters


# ---- what would be seen: each mistake in a family that can show it ---------------------------------------------------
Mistake = Callable[[pytest.MonkeyPatch], None]


def _routed_otherwise(change: Callable[[Routing], Routing]) -> Mistake:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            torch_ops, "Router", lambda routing, bias, device: Router(change(routing), bias, device)
        )

    return plant


def _corrected_otherwise(change: Callable[[Tensor], Tensor | None]) -> Mistake:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            torch_ops, "Router", lambda routing, bias, device: Router(routing, change(bias), device)
        )

    return plant


def _bank_otherwise(change: Callable[[Any], tuple[Tensor, Tensor]]) -> Mistake:
    """`change` returns gate and up, and the bias of down."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def bank(*args: Any) -> ExpertBank:
            found = read_bank(*args)
            assert isinstance(found, ExpertBank)
            gate_up, down_bias = change(found)
            return replace(found, gate_up=gate_up, down_bias=down_bias)

        patch.setattr(loading, "read_bank", bank)

    return plant


def _in_turns(gate_up: Tensor) -> Tensor:
    experts, rows, hidden = gate_up.shape
    return gate_up.view(experts, 2, rows // 2, hidden).transpose(1, 2).reshape(experts, rows, hidden)


def _heads_otherwise(change: Callable[[Tensor], Tensor | None]) -> Mistake:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def transform(sinks: Tensor, **others: Any) -> HeadTransform:
            return HeadTransform(**others, sinks=change(sinks))

        patch.setattr(loading, "HeadTransform", transform)

    return plant


def _without_shared(patch: pytest.MonkeyPatch) -> None:
    compute = experts.Experts.__call__
    patch.setattr(experts.Experts, "__call__", lambda self, x: compute(replace(self, shared=None), x))


def _weights_with_bias(patch: pytest.MonkeyPatch) -> None:
    def biased(
        routing: Routing, bias: Tensor, device: torch.device
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        router = Router(routing, bias, device)

        def routed(logits: Tensor) -> tuple[Tensor, Tensor]:
            chosen, _ = router(logits)
            weights = (logits.sigmoid() + bias).gather(1, chosen)
            return chosen, weights / weights.sum(-1, keepdim=True) * routing.scale

        return routed

    patch.setattr(torch_ops, "Router", biased)


NORMALIZED, GROUPED = "glm4-moe, shared, a dense layer", "glm4-moe, groups, not normalized, biases"
GPT_OSS = "gpt-oss, sinks, windows, biases"
MISTAKES: dict[str, tuple[str, Mistake]] = {
    "the shared expert is left out": (NORMALIZED, _without_shared),
    "weights are not normalized": (
        "qwen3-moe, 3 of 9, normalized",
        _routed_otherwise(lambda routing: replace(routing, normalized=False)),
    ),
    "weights are normalized where the model does not": (
        "qwen3-moe, not normalized, a dense layer, window",
        _routed_otherwise(lambda routing: replace(routing, normalized=True)),
    ),
    "weights are not scaled": (NORMALIZED, _routed_otherwise(lambda routing: replace(routing, scale=1.0))),
    "one expert too few": (
        "mixtral",
        _routed_otherwise(lambda routing: replace(routing, chosen=routing.chosen - 1)),
    ),
    "groups are ignored": (
        GROUPED,
        _routed_otherwise(lambda routing: replace(routing, groups=1, groups_chosen=1)),
    ),
    "an expert's bias is another expert's": (NORMALIZED, _corrected_otherwise(lambda bias: bias.roll(1))),
    "the bias is left out": (NORMALIZED, _corrected_otherwise(lambda _bias: None)),
    "weights have the bias": (NORMALIZED, _weights_with_bias),
    "an expert is another one": (
        "mixtral",
        _bank_otherwise(lambda bank: (bank.gate_up.roll(1, 0), bank.down_bias)),
    ),
    "gate and up are each other": (
        "mixtral",
        _bank_otherwise(lambda bank: (bank.gate_up.roll(bank.gate_up.shape[1] // 2, 1), bank.down_bias)),
    ),
    "a bias of an expert is another expert's": (
        GPT_OSS,
        _bank_otherwise(lambda bank: (bank.gate_up, bank.down_bias.roll(1, 0))),
    ),
    "gate and up are in turns": (
        GPT_OSS,
        _bank_otherwise(lambda bank: (_in_turns(bank.gate_up), bank.down_bias)),
    ),
    "sinks are left out": (GPT_OSS, _heads_otherwise(lambda _sinks: None)),
    "a head has the sink of another": (GPT_OSS, _heads_otherwise(lambda sinks: sinks.roll(1))),
    "the gate is not clamped": (
        GPT_OSS,
        lambda patch: patch.setattr(loading, "clamped", lambda gate: clamped(replace(gate, limit=1e9))),
    ),
}


@pytest.mark.parametrize("linear", [plain_linear, PackedLinear], ids=["grouped", "packed"])
@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_mistake_is_seen(
    mistake: str | None, linear: MakeLinear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, plant = MISTAKES[mistake] if mistake else (NORMALIZED, lambda _patch: None)
    model: Any = save_model(EXPERT_FAMILIES[family], tmp_path)
    plant(monkeypatch)
    found = logits_of(tmp_path, TOKENS, STEPS, TorchOps(linear), dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    gap = float((found - expected).abs().max() / expected.abs().max())
    assert gap > 100 * RELATIVE_GAP_MAX if mistake else gap < RELATIVE_GAP_MAX
