"""A tiny gpt-oss whose experts are stored in MXFP4 by the format's own rule, and transformers with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shared.engine.quantized.mxfp4 import BLOCK

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[…, inputs] → blocks and scales, by the format's rule: the largest of a block gets the largest exponent."""
    by_block = weight.view(*weight.shape[:-1], -1, BLOCK)
    exponent = by_block.abs().amax(-1).log2().floor() - 2  # 6 is 1.5 · 2²
    scaled = by_block / exponent.exp2().unsqueeze(-1)
    nearest = (scaled.abs().unsqueeze(-1) - NUMBERS).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponent + 127).to(torch.uint8)


def store_in_mxfp4(model: Any, folder: Path) -> None:
    """Store the experts of the model in this folder in MXFP4; the model gets the numbers that are left of them."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = packed(weights.pop(name).transpose(1, 2).contiguous())
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = blocks, scales
        exact = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data.copy_(exact)
    save_file(weights, path, {"format": "pt"})
    change(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def change(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
