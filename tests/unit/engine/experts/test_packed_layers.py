"""Whole models by the kernels of packed experts, run on this CPU, beside the products of what was unpacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.cuda.kernels.expert_routing import SOURCE as ROUTING_SOURCE
from shared.engine.cuda.kernels.expert_routing import GpuRouting
from shared.engine.cuda.kernels.packed_experts import GpuExperts, PackedKernels
from shared.engine.model import experts
from shared.engine.model.ops import Bank, ExpertProducts, Gated, PackedBank
from shared.engine.model.torch_ops import TorchOps
from tests.unit.engine.cuda.kernels.host_kernels import HostLaunch, compile_for_host
from tests.unit.engine.driver import tokens_of
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES, sized
from tests.unit.engine.experts.packed_banks import host_kernels
from tests.unit.engine.experts.test_fp8_experts import tiny_fp8_experts
from tests.unit.engine.experts.test_int4_experts import mixtral, qwen3_moe, tiny_int4_experts
from tests.unit.engine.precision import logits_of
from tests.unit.engine.quantized.mxfp4_models import store_in_mxfp4
from tests.unit.engine.tiny_models import VOCAB_SIZE, save_model

TOKENS, STEPS = tokens_of(7, 30, VOCAB_SIZE), (20, 1, 7, 1, 1)
SIZES = {"hidden_size": 160, "intermediate_size": 64, "moe_intermediate_size": 64}


def _gpt_oss(folder: Path) -> Any:
    model = save_model(EXPERT_FAMILIES["gpt-oss, sinks, windows, biases"], folder)
    store_in_mxfp4(model, folder)
    return model


def _fp8(family: str, form: str) -> Callable[[Path], Any]:
    def made(folder: Path) -> Any:
        with sized(**SIZES):
            return tiny_fp8_experts(family, form, folder)

    return made


MODELS: dict[str, Callable[[Path], Any]] = {
    "gpt-oss in mxfp4": _gpt_oss,
    "qwen3-moe in fp8 by blocks": _fp8("qwen3-moe, 3 of 9, normalized", "block, compressed-tensors"),
    "mixtral in fp8 by tensor": _fp8("mixtral", "tensor"),
    "qwen3-moe in awq": lambda folder: tiny_int4_experts(qwen3_moe, "awq", folder, ["mlp.gate"]),
    "mixtral in gptq": lambda folder: tiny_int4_experts(mixtral, "gptq, asym", folder, []),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> PackedKernels:
    return host_kernels(tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> GpuRouting:
    launch = HostLaunch(compile_for_host(ROUTING_SOURCE, tmp_path_factory.mktemp("routing")))
    return GpuRouting(lambda: launch)


class KernelOps(TorchOps):
    """All but experts, and perhaps their choice, in plain torch."""

    def __init__(
        self, products: Callable[[Bank, Gated], ExpertProducts], routing: GpuRouting | None = None
    ) -> None:
        super().__init__()
        self.experts = products  # type: ignore[method-assign, assignment]
        if routing is not None:
            self.routing = routing  # type: ignore[method-assign]


def _gaps(folder: Path, ops: TorchOps, model: Any) -> Tensor:
    """Of each token, by the largest logit."""
    found = logits_of(folder, TOKENS, STEPS, ops, dtype=torch.bfloat16)
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    gaps: Tensor = (found - wanted).abs().amax(1) / wanted.abs().max()
    return gaps


@pytest.mark.parametrize("name", MODELS)
def test_few_rows_are_as_near_to_float32_as_what_is_unpacked(
    name: str, kernels: PackedKernels, routing: GpuRouting, tmp_path: Path
) -> None:
    model = MODELS[name](tmp_path)
    ours = _gaps(tmp_path, KernelOps(GpuExperts(lambda: kernels, (8, 0)), routing), model)
    beside = _gaps(tmp_path, TorchOps(), model)
    assert float(ours.median()) <= 1.5 * float(beside.median())


def test_many_rows_are_what_torch_makes_of_them_bit_for_bit(
    kernels: PackedKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of few outputs too: each is unpacked into the memory of the one before."""
    _gpt_oss(tmp_path)
    whole = logits_of(tmp_path, TOKENS, STEPS, TorchOps(), dtype=torch.bfloat16)
    monkeypatch.setattr(experts, "UNPACKED_ROWS", 0)
    monkeypatch.setattr(experts, "UNPACKED_NUMBERS", 10_000)
    many = KernelOps(GpuExperts(lambda: kernels, (9, 0)))
    assert torch.equal(logits_of(tmp_path, TOKENS, STEPS, many, dtype=torch.bfloat16), whole)


# ---- what would be seen ----------------------------------------------------------------------------------------------


def _other_bank(change: Callable[[PackedBank], PackedBank]) -> Callable[[PackedKernels], Any]:
    def products(kernels: PackedKernels) -> Any:
        right = GpuExperts(lambda: kernels, (8, 0))
        return lambda bank, gated: right(change(bank), gated)

    return products


def _turned(bank: PackedBank, part: str, **turns: int) -> PackedBank:
    matrices = getattr(bank, part)
    rolled = {name: getattr(matrices, name).view(torch.uint8).roll(by, 0) for name, by in turns.items()}
    return replace(bank, **{part: replace(matrices, **rolled)})


MISTAKES: dict[str, Callable[[PackedKernels], Any]] = {
    "an expert is another one": _other_bank(lambda bank: _turned(bank, "down", values=1, scales=1)),
    "scales are another expert's": _other_bank(lambda bank: _turned(bank, "gate_up", scales=1)),
    "biases are another expert's": _other_bank(
        lambda bank: replace(
            bank, gate_up_bias=None if bank.gate_up_bias is None else bank.gate_up_bias.roll(1, 0)
        )
    ),
    "biases are left out": _other_bank(lambda bank: replace(bank, down_bias=None)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, kernels: PackedKernels, tmp_path: Path) -> None:
    model = _gpt_oss(tmp_path)
    wrong = _gaps(tmp_path, KernelOps(MISTAKES[mistake](kernels)), model)
    beside = _gaps(tmp_path, TorchOps(), model)
    assert float(wrong.median()) > 1.5 * float(beside.median())
