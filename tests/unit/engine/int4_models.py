"""Tiny models whose linears are stored in 4 bits, packed number by number as each writer packs, and transformers' own.

A published checkpoint of each format has these names, shapes and settings. The model that is returned multiplies with
what was stored, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.unit.engine.fp8_models import linears
from tests.unit.engine.tiny_models import SIZES, save_model

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = tuple(range(8))
WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}


@dataclass(frozen=True)
class Numbers:
    """A weight in 4 bits: `(numbers - zeros) * scales`, [outputs, inputs], by groups of inputs."""

    numbers: Tensor  # 0 … 15
    zeros: Tensor  # [outputs, groups]
    scales: Tensor  # float16 [outputs, groups]

    @property
    def exact(self) -> Tensor:
        """float32 [outputs, inputs]."""
        return (self.numbers - self._wide(self.zeros)).float() * self._wide(self.scales.float())

    @property
    def rounded(self) -> Tensor:
        """What the kernel of a GPU multiplies with: scales, zeros and what they make are each rounded to bfloat16."""
        scales = self.scales.bfloat16().double()
        zeros = ((8 - self.zeros) * scales).bfloat16().double()
        return ((self.numbers - 8) * self._wide(scales) + self._wide(zeros)).bfloat16().float()

    def _wide(self, by_group: Tensor) -> Tensor:
        return by_group.repeat_interleave(self.numbers.shape[1] // self.scales.shape[1], 1)


def numbers_of(weight: Tensor, group: int | None, *, symmetric: bool) -> Numbers:
    """The nearest numbers, with scales and zeros that reach the smallest and the largest of each group."""
    outputs, inputs = weight.shape
    parts = weight.view(outputs, -1, group or inputs)
    if symmetric:
        scales = (parts.abs().amax(2) / 7.5).half()
        zeros = torch.full_like(scales, 8, dtype=torch.int32)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15).int()
    numbers = (parts / scales.float().unsqueeze(2)).round().int() + zeros.unsqueeze(2)
    return Numbers(numbers.clamp(0, 15).view(outputs, inputs), zeros, scales)


def words(rows: Tensor, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """[rows, size] → int32 [rows, size / 8]: bits 4 i to 4 i + 3 of a word are its number `order[i]`."""
    count = rows.shape[1] // 8
    found = torch.zeros(len(rows), count, dtype=torch.int64)
    for word in range(count):
        for place, number in enumerate(order):
            found[:, word] |= rows[:, 8 * word + number].long() << 4 * place
    return torch.where(found < 2**31, found, found - 2**32).int()


def awq(weight: Numbers) -> dict[str, Tensor]:
    """As AutoAWQ's WQLinear_GEMM: along outputs, in an order of its own."""
    return {
        "qweight": words(weight.numbers.t(), AWQ_ORDER),
        "qzeros": words(weight.zeros.t(), AWQ_ORDER),
        "scales": weight.scales.t().contiguous(),
    }


def gptq(weight: Numbers) -> dict[str, Tensor]:
    """As AutoGPTQ's QuantLinear: along inputs, zeros along outputs and less one."""
    inputs, groups = weight.numbers.shape[1], weight.scales.shape[1]
    return {
        "qweight": words(weight.numbers).t().contiguous(),
        "qzeros": words(weight.zeros.t() - 1),
        "scales": weight.scales.t().contiguous(),
        "g_idx": torch.arange(inputs).int() // (inputs // groups),
    }


def gptq_v2(weight: Numbers) -> dict[str, Tensor]:
    """As GPTQModel's, format gptq_v2: zeros as they are."""
    return gptq(weight) | {"qzeros": words(weight.zeros.t())}


def compressed(weight: Numbers) -> dict[str, Tensor]:
    """As compressed-tensors' pack-quantized: along inputs, zeros along outputs."""
    return {
        "weight_packed": words(weight.numbers),
        "weight_scale": weight.scales,
        "weight_zero_point": words(weight.zeros.t()).t().contiguous(),
        "weight_shape": torch.tensor(weight.numbers.shape),
    }


def compressed_symmetric(weight: Numbers) -> dict[str, Tensor]:
    """Zeros are not stored."""
    found = compressed(weight)
    del found["weight_zero_point"]
    return found


def _packed(**weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "dynamic": False, "symmetric": True, "actorder": None} | weights
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _gptq(**settings: Any) -> dict[str, Any]:
    usual = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True, "lm_head": False}
    return usual | settings


AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


@dataclass(frozen=True)
class WrittenInt4:
    """How a checkpoint stores its linears."""

    config: dict[str, Any]  # quantization_config
    write: Callable[[Numbers], dict[str, Tensor]]
    group: int | None
    name: str  # in descriptions
    symmetric: bool = False


INT4_FORMATS = {
    "awq": WrittenInt4(AWQ | {"group_size": 64}, awq, 64, "int4-awq-64"),
    "awq, rows": WrittenInt4(AWQ | {"group_size": -1}, awq, None, "int4-awq-channel"),
    "gptq, sym": WrittenInt4(_gptq(group_size=128), gptq, 128, "int4-gptq-128", symmetric=True),
    "gptq, asym": WrittenInt4(_gptq(group_size=32, sym=False), gptq, 32, "int4-gptq-32"),
    "gptq_v2": WrittenInt4(
        _gptq(group_size=32, sym=False, checkpoint_format="gptq_v2"), gptq_v2, 32, "int4-gptq_v2-32"
    ),
    "packed": WrittenInt4(
        _packed(strategy="group", group_size=128),
        compressed_symmetric,
        128,
        "int4-packed-128-symmetric",
        symmetric=True,
    ),
    "packed, asym": WrittenInt4(
        _packed(strategy="group", group_size=32, symmetric=False), compressed, 32, "int4-packed-32"
    ),
    "packed, channel": WrittenInt4(
        _packed(strategy="channel"),
        compressed_symmetric,
        None,
        "int4-packed-channel-symmetric",
        symmetric=True,
    ),
}


def _llama() -> PreTrainedModel:
    switches: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    return LlamaForCausalLM(LlamaConfig(**WIDE, **switches))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**WIDE, head_dim=32, tie_word_embeddings=True))


def _phi3() -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**WIDE, pad_token_id=0))


INT4_FAMILIES = {"llama": _llama, "qwen3": _qwen3, "phi3": _phi3}


def tiny_int4(
    name: str, family: str, folder: Path, kept: tuple[str, ...] = (), *, rounded: bool = False
) -> PreTrainedModel:
    """Save a model of this family in this format but for the linears that are `kept`; returns the dequantized one.

    `rounded`: as the kernel of a GPU dequantizes.
    """
    model = save_model(INT4_FAMILIES[family], folder)
    store_in_int4(name, model, folder, kept, rounded=rounded)
    return model


def store_in_int4(
    name: str, model: PreTrainedModel, folder: Path, kept: tuple[str, ...] = (), *, rounded: bool = False
) -> None:
    """Store a model that was saved to `folder` in this format; its own linears become the dequantized ones."""
    form = INT4_FORMATS[name]
    weights = load_file(folder / "model.safetensors")
    for linear, module in linears(model).items():
        if linear in kept:
            continue
        found = numbers_of(module.weight.detach(), form.group, symmetric=form.symmetric)
        del weights[f"{linear}.weight"]
        weights |= {f"{linear}.{part}": tensor for part, tensor in form.write(found).items()}
        module.weight.data = found.rounded if rounded else found.exact
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    entry = "ignore" if "ignore" in form.config else "modules_to_not_convert"
    left_out = {entry: [*(form.config.get(entry) or ()), *kept]} if kept else {}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.config | left_out}))
