"""Tiny models whose linears are stored in 8 bits, each by its format's own formula, and transformers with the same.

A published checkpoint of each format has these names, shapes and settings. `reference` is transformers' model with the
dequantized weights, in float32; `rounding` lets its linears round what they read as kernels do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.unit.engine.tiny_models import FAMILIES, VOCAB_SIZE, save_model

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 128


def _by_channel(weight: Tensor) -> Tensor:
    return weight.abs().amax(dim=1, keepdim=True) / LARGEST


def _by_tensor(weight: Tensor) -> Tensor:
    return weight.abs().amax() / LARGEST


def _by_tensor_as_a_list(weight: Tensor) -> Tensor:
    return _by_tensor(weight).reshape(1)


def _by_block(weight: Tensor) -> Tensor:
    rows = [torch.split(part, BLOCK, dim=1) for part in torch.split(weight, BLOCK)]
    return torch.stack([torch.stack([each.abs().amax() for each in row]) for row in rows]) / LARGEST


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Scales for each number of a weight."""
    if (scale.dim() == 2 and scale.shape[1] != 1) or scale.shape[0:1] not in ((), (1,), (shape[0],)):
        wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return wide[: shape[0], : shape[1]]
    return scale.expand(shape)


def _compressed(strategy: str, inputs: dict[str, Any], **weights: Any) -> dict[str, Any]:
    eight: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": strategy, "dynamic": False} | weights,
        "input_activations": eight | inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


_BY_TOKEN = {"strategy": "token", "dynamic": True}
_STATIC = {"strategy": "tensor", "dynamic": False}
_BY_GROUP = {"strategy": "group", "dynamic": True, "group_size": 128}


@dataclass(frozen=True)
class Fp8Format:
    """How a checkpoint stores its linears."""

    config: dict[str, Any]  # quantization_config
    scales: Callable[[Tensor], Tensor]
    scale_name: str = "weight_scale"
    input_scale_name: str | None = None  # where inputs have one
    blocks: bool = False


FORMATS = {
    "channel": Fp8Format(_compressed("channel", _BY_TOKEN), _by_channel),
    "tensor": Fp8Format(_compressed("tensor", _BY_TOKEN), _by_tensor_as_a_list),
    "tensor, static": Fp8Format(
        _compressed("tensor", _STATIC), _by_tensor_as_a_list, input_scale_name="input_scale"
    ),
    "AutoFP8, static": Fp8Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        _by_tensor,
        input_scale_name="input_scale",
    ),
    "fp8 by tensor, dynamic": Fp8Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
        _by_tensor,
        "weight_scale_inv",
    ),
    "block": Fp8Format(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
        _by_block,
        "weight_scale_inv",
        blocks=True,
    ),
    "block, compressed-tensors": Fp8Format(
        _compressed("block", _BY_GROUP, block_structure=[128, 128]), _by_block, blocks=True
    ),
}


def linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linears in layers, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }


def tiny_fp8(name: str, family: str, folder: Path, kept: tuple[str, ...] = ()) -> PreTrainedModel:
    """Save a model of this family in this format but for the linears that are `kept`; returns the dequantized one."""
    model = save_model(FAMILIES[family], folder)
    store_in_fp8(name, model, folder, kept)
    return model


def store_in_fp8(name: str, model: PreTrainedModel, folder: Path, kept: tuple[str, ...] = ()) -> None:
    """Store a model that was saved to `folder` in this format; its own linears become the dequantized ones."""
    form = FORMATS[name]
    weights = load_file(folder / "model.safetensors")
    for linear, module in linears(model).items():
        if linear in kept:
            continue
        weight = module.weight.detach()
        scale = form.scales(weight)
        values = (weight / _spread(scale, weight.shape)).to(E4M3)
        weights |= {f"{linear}.weight": values, f"{linear}.{form.scale_name}": scale}
        module.weight.data = values.float() * _spread(scale, weight.shape)
    if form.input_scale_name:
        scales = input_scales(model)
        weights |= {
            f"{linear}.{form.input_scale_name}": scales[linear] for linear in scales if linear not in kept
        }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    entry = "ignore" if "ignore" in form.config else "modules_to_not_convert"
    quantization = form.config | ({entry: [*form.config.get(entry, ()), *kept]} if kept else {})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def input_scales(model: PreTrainedModel) -> dict[str, Tensor]:
    """Of each linear, as a calibration finds it: the largest input that it read becomes the largest of e4m3."""
    found: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _module, given, name=name: found.__setitem__(name, given[0].abs().amax() / LARGEST)
        )
        for name, module in linears(model).items()
    ]
    with torch.inference_mode():
        model(torch.arange(1, 200).unsqueeze(0) * 7 % VOCAB_SIZE)
    for hook in hooks:
        hook.remove()
    return {name: scale.clone() for name, scale in found.items()}


@contextmanager
def rounding(
    model: PreTrainedModel, scales: dict[str, Tensor] | None = None, kept: tuple[str, ...] = ()
) -> Iterator[None]:
    """Let linears, but those that are `kept`, read what is rounded to e4m3: by token, or with these scales."""
    hooks = [
        module.register_forward_pre_hook(
            lambda _module, given, name=name: (round_inputs(given[0], scales[name] if scales else None),)
        )
        for name, module in linears(model).items()
        if name not in kept
    ]
    yield
    for hook in hooks:
        hook.remove()


def round_inputs(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """x [..., size], each row rounded with its own scale unless one is given."""
    if scale is None:
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / LARGEST  # a padding token's row is zero
    return (x / scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * scale
