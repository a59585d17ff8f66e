"""Reads the experts of a layer, as families store them, into one bank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import ExpertsConfig, Storage
from shared.engine.model.names import DecoderWeights
from shared.engine.model.ops import Bank, ExpertBank, PackedBank
from shared.engine.quantized import fp8, int4_packings, mxfp4
from shared.engine.quantized.fp8_formats import Fp8Format
from shared.engine.quantized.int4_formats import Int4Format
from shared.engine.quantized.packed_matrices import PackedFormat, PackedMatrices
from shared.engine.weight_source import WeightSource
from shared.primitives.errors import ModelError

_ALIGNED = 16  # bytes


def read_bank(
    weights: DecoderWeights, prefix: str, experts: ExpertsConfig, hidden: int, dtype: torch.dtype
) -> Bank:
    """The weights below `prefix`, as in model.layers.0.mlp.experts; `ModelError` where one is missing or misshapen.

    What is packed stays so, where kernels can read it.
    """
    if experts.storage is Storage.MXFP4:
        return _mxfp4(weights.source, prefix, experts, hidden, dtype)
    if experts.storage is Storage.STACKED:
        return _stacked(weights.source, prefix, experts, hidden, dtype)
    if form := weights.experts_format(prefix, experts):
        if isinstance(form, Fp8Format):
            gate_up, down = _fp8(weights.source, form, prefix, experts, hidden)
        else:
            gate_up, down = _int4(weights.source, form, prefix, experts, hidden)
        return PackedBank(gate_up, down, dtype)
    return _separate(weights, prefix, experts, hidden, dtype)


def _separate(
    weights: DecoderWeights, prefix: str, experts: ExpertsConfig, hidden: int, dtype: torch.dtype
) -> ExpertBank:
    count, inner = experts.routing.experts, experts.inner
    bank: ExpertBank | None = None
    for number in range(count):
        gate, up, down = (
            weights.dequantized(full, *shape, dtype)
            for full, shape in _linears(f"{prefix}.{number}", experts, hidden)
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
        return weights.take(f"{prefix}.{name}", (count, inputs, outputs), dtype).transpose(1, 2)

    return ExpertBank(
        _gate_first(matrices("gate_up_proj", 2 * inner, hidden)),
        matrices("down_proj", hidden, inner).contiguous(),
        *_biases(weights, prefix, experts, hidden, dtype),
    )


def _mxfp4(
    weights: WeightSource, prefix: str, experts: ExpertsConfig, hidden: int, dtype: torch.dtype
) -> PackedBank:
    count, inner = experts.routing.experts, experts.inner
    gate_up = mxfp4.take(weights, f"{prefix}.gate_up_proj", (count, 2 * inner, hidden))
    down = mxfp4.take(weights, f"{prefix}.down_proj", (count, hidden, inner))
    return PackedBank(
        PackedMatrices(PackedFormat.MXFP4, _gate_first(gate_up[0]), _gate_first(gate_up[1])),
        PackedMatrices(PackedFormat.MXFP4, _aligned(down[0]), down[1]),
        dtype,
        *_biases(weights, prefix, experts, hidden, dtype),
    )


def _aligned(values: Tensor) -> Tensor:
    """Values that begin where kernels can read several at once: a file's own memory may begin anywhere."""
    return values.clone() if values.data_ptr() % _ALIGNED else values


def _biases(
    weights: WeightSource, prefix: str, experts: ExpertsConfig, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    count, inner = experts.routing.experts, experts.inner
    gate_up = weights.take(f"{prefix}.gate_up_proj_bias", (count, 2 * inner), dtype)
    return _gate_first(gate_up), weights.take(f"{prefix}.down_proj_bias", (count, hidden), dtype)


def _fp8(
    source: WeightSource, form: Fp8Format, prefix: str, experts: ExpertsConfig, hidden: int
) -> tuple[PackedMatrices, PackedMatrices]:
    """Gate and up, and down. Inputs are not rounded, so their scales are not kept.

    `ModelError` for a code that is no number: kernels take it for 480.
    """
    inner = experts.inner
    rows, rows_down = form.scale_rows(inner, inner), form.scale_rows(hidden)
    gate_up, down = _Stack(experts.routing.experts), _Stack(experts.routing.experts)
    damaged: dict[str, Tensor] = {}
    for number in range(experts.routing.experts):
        taken = {
            full: fp8.take(source, form, full, *shape)
            for full, shape in _linears(f"{prefix}.{number}", experts, hidden)
        }
        damaged |= {full: weight.has_nan() for full, weight in taken.items()}
        gate, up, last = taken.values()
        scales = torch.cat([gate.scales[::rows], up.scales[::rows]])
        gate_up.put(number, torch.cat([gate.values, up.values]), scales)
        down.put(number, last.values, last.scales[::rows_down])
    _require_numbers(damaged)
    return _fp8_matrices(rows, *gate_up.tensors), _fp8_matrices(rows_down, *down.tensors)


def _fp8_matrices(scale_rows: int, values: Tensor, scales: Tensor) -> PackedMatrices:
    return PackedMatrices(PackedFormat.FP8, values, scales, scale_rows)


def _int4(
    source: WeightSource, form: Int4Format, prefix: str, experts: ExpertsConfig, hidden: int
) -> tuple[PackedMatrices, PackedMatrices]:
    """Gate and up, and down."""
    gate_up, down = _Stack(experts.routing.experts), _Stack(experts.routing.experts)
    for number in range(experts.routing.experts):
        gate, up, last = (
            int4_packings.take(source, form, full, *shape)
            for full, shape in _linears(f"{prefix}.{number}", experts, hidden)
        )
        both = int4_packings.joined([gate, up])
        gate_up.put(number, both.values, both.scales, both.zeros)
        down.put(number, last.values, last.scales, last.zeros)
    return _int4_matrices(*gate_up.tensors), _int4_matrices(*down.tensors)


def _int4_matrices(values: Tensor, scales: Tensor, zeros: Tensor) -> PackedMatrices:
    return PackedMatrices(PackedFormat.INT4, values, scales, zeros=zeros)


def _linears(prefix: str, experts: ExpertsConfig, hidden: int) -> list[tuple[str, tuple[int, int]]]:
    """Gate, up and down of one expert: names, outputs and inputs."""
    names, inner = experts.names, experts.inner
    return [
        (f"{prefix}.{names.gate}", (inner, hidden)),
        (f"{prefix}.{names.up}", (inner, hidden)),
        (f"{prefix}.{names.down}", (hidden, inner)),
    ]


def _require_numbers(damaged: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` for the first linear that is damaged; waits once for all."""
    flags = torch.stack(list(damaged.values()))
    for name, found in zip(damaged, [] if flags.is_meta else flags.tolist(), strict=False):
        if found:
            raise ModelError(
                f"{name}.weight holds codes that are no numbers (NaN), expected numbers of 8 bits: it is damaged; "
                "download the folder again"
            )


class _Stack:
    """Puts the tensors of each expert behind each other, in memory that is taken once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.tensors: list[Tensor] = []  # [experts, …]

    def put(self, number: int, *parts: Tensor) -> None:
        """Keep what the expert of this number has."""
        if not self.tensors:  # on the device of what was read
            self.tensors = [part.new_empty(self._count, *part.shape) for part in parts]
        for whole, part in zip(self.tensors, parts, strict=True):
            whole[number] = part


def _gate_first(in_turns: Tensor) -> Tensor:
    """Rows of gate and up in turns, [experts, 2 · inner, …] → all of the gate, then all of up."""
    return torch.cat((in_turns[:, 0::2], in_turns[:, 1::2]), dim=1)
