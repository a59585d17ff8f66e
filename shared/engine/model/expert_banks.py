"""Reads the experts of a layer, as families store them, into one bank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import ExpertsConfig, Storage
from shared.engine.model.names import DecoderWeights
from shared.engine.model.ops import Bank, ExpertBank, PackedBank
from shared.engine.quantized import fp8, mxfp4
from shared.engine.quantized.fp8 import Fp8Weight
from shared.engine.quantized.fp8_formats import Fp8Format
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
        gate_up, down = _fp8(weights.source, form, prefix, experts, hidden)
        return PackedBank(gate_up, down, dtype)
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
    names, inner = experts.names, experts.inner
    gate_up, down = (
        _Fp8Rows(experts.routing.experts, form.scale_rows(inner, inner)),
        _Fp8Rows(experts.routing.experts, form.scale_rows(hidden)),
    )
    damaged: dict[str, Tensor] = {}
    for number in range(experts.routing.experts):
        taken = {
            full: fp8.take(source, form, full, *shape)
            for full, shape in (
                (f"{prefix}.{number}.{names.gate}", (inner, hidden)),
                (f"{prefix}.{number}.{names.up}", (inner, hidden)),
                (f"{prefix}.{number}.{names.down}", (hidden, inner)),
            )
        }
        damaged |= {full: weight.has_nan() for full, weight in taken.items()}
        gate, up, last = taken.values()
        gate_up.put(number, [gate, up])
        down.put(number, [last])
    _require_numbers(damaged)
    return gate_up.matrices(), down.matrices()


def _require_numbers(damaged: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` for the first linear that is damaged; waits once for all."""
    flags = torch.stack(list(damaged.values()))
    for name, found in zip(damaged, [] if flags.is_meta else flags.tolist(), strict=False):
        if found:
            raise ModelError(
                f"{name}.weight holds codes that are no numbers (NaN), expected numbers of 8 bits: it is damaged; "
                "download the folder again"
            )


class _Fp8Rows:
    """Puts matrices in 8 bits behind each other."""

    def __init__(self, count: int, scale_rows: int) -> None:
        self._count, self._scale_rows = count, scale_rows
        self._kept: tuple[Tensor, Tensor] | None = None

    def put(self, number: int, parts: Sequence[Fp8Weight]) -> None:
        """The matrix of this number, in parts."""
        values = torch.cat([part.values for part in parts])
        scales = torch.cat([part.scales[:: self._scale_rows] for part in parts])
        if self._kept is None:  # on the device of what was read
            self._kept = (
                values.new_empty(self._count, *values.shape),
                scales.new_empty(self._count, *scales.shape),
            )
        self._kept[0][number], self._kept[1][number] = values, scales

    def matrices(self) -> PackedMatrices:
        """All of them."""
        assert self._kept is not None, "a routing has experts"
        return PackedMatrices(PackedFormat.FP8, *self._kept, self._scale_rows)


def _gate_first(in_turns: Tensor) -> Tensor:
    """Rows of gate and up in turns, [experts, 2 · inner, …] → all of the gate, then all of up."""
    return torch.cat((in_turns[:, 0::2], in_turns[:, 1::2]), dim=1)
