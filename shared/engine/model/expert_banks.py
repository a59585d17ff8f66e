"""Reads the experts of a layer, as families store them, into one bank."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import ExpertsConfig, Storage
from shared.engine.model.names import DecoderWeights
from shared.engine.model.ops import ExpertBank
from shared.engine.quantized import mxfp4
from shared.engine.weight_source import WeightSource


def read_bank(
    weights: DecoderWeights, prefix: str, experts: ExpertsConfig, hidden: int, dtype: torch.dtype
) -> ExpertBank:
    """The weights below `prefix`, as in model.layers.0.mlp.experts; `ModelError` where one is missing or misshapen."""
    if experts.storage is not Storage.SEPARATE:
        return _stacked(weights.source, prefix, experts, hidden, dtype)
    return _separate(weights, prefix, experts, hidden, dtype)


def _separate(
    weights: DecoderWeights, prefix: str, experts: ExpertsConfig, hidden: int, dtype: torch.dtype
) -> ExpertBank:
    count, inner, names = experts.routing.experts, experts.inner, experts.names
    bank: ExpertBank | None = None
    for number in range(count):
        gate, up, down = (
            weights.dequantized(f"{prefix}.{number}.{name}", *shape, dtype)
            for name, shape in (
                (names.gate, (inner, hidden)),
                (names.up, (inner, hidden)),
                (names.down, (hidden, inner)),
            )
        )
        if bank is None:  # on the device of what was read
            bank = ExpertBank(gate.new_empty(count, 2 * inner, hidden), gate.new_empty(count, hidden, inner))
        bank.gate_up[number, :inner], bank.gate_up[number, inner:], bank.down[number] = gate, up, down
    assert bank is not None, "a routing has experts"
    return bank


def _stacked(
    weights: WeightSource, prefix: str, experts: ExpertsConfig, hidden: int, dtype: torch.dtype
) -> ExpertBank:
    count, inner = experts.routing.experts, experts.inner

    def matrices(name: str, outputs: int, inputs: int) -> Tensor:
        if experts.storage is Storage.MXFP4:
            return mxfp4.take(weights, f"{prefix}.{name}", (count, outputs, inputs), dtype)
        return weights.take(f"{prefix}.{name}", (count, inputs, outputs), dtype).transpose(1, 2)

    def biases(name: str, outputs: int) -> Tensor:
        return weights.take(f"{prefix}.{name}_bias", (count, outputs), dtype)

    return ExpertBank(
        _gate_first(matrices("gate_up_proj", 2 * inner, hidden)),
        matrices("down_proj", hidden, inner).contiguous(),
        _gate_first(biases("gate_up_proj", 2 * inner)),
        biases("down_proj", hidden),
    )


def _gate_first(in_turns: Tensor) -> Tensor:
    """Rows of gate and up in turns, [experts, 2 · inner, …] → all of the gate, then all of up."""
    return torch.cat((in_turns[:, 0::2], in_turns[:, 1::2]), dim=1)
