"""Reads the experts of a layer, as families store them, into one bank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import ExpertsConfig, Storage
from shared.engine.model.names import DecoderWeights
from shared.engine.model.ops import Bank, ExpertBank, PackedBank
from shared.engine.quantized import fp8, int4_packings, mxfp4
from shared.engine.quantized.fp8_formats import Fp8Format
from shared.engine.quantized.int4_formats import Int4Format
from shared.engine.quantized.packed_matrices import PackedFormat, PackedMatrices
from shared.engine.quantized.weight_source import Part
from shared.primitives.errors import ModelError

_ALIGNED = 16  # bytes


def read_bank(
    weights: DecoderWeights,
    prefix: str,
    experts: ExpertsConfig,
    hidden: int,
    dtype: torch.dtype,
    held: range | None = None,
) -> Bank:
    """The weights below `prefix`, as in model.layers.0.mlp.experts; `ModelError` where one is missing or misshapen.

    What is packed stays so, where kernels can read it. `held`: the experts that this rank has; None: all.
    """
    below = _Below(weights, prefix, experts, hidden, held)
    if experts.storage is Storage.MXFP4:
        bank: Bank = _mxfp4(below, dtype)
    elif experts.storage is Storage.STACKED:
        bank = _stacked(below, dtype)
    elif form := weights.experts_format(prefix, experts):
        both = _fp8(below, form) if isinstance(form, Fp8Format) else _int4(below, form)
        bank = PackedBank(*both, dtype)
    else:
        bank = _separate(below, dtype)
    return bank if held is None else replace(bank, layer_experts=experts.routing.experts)


@dataclass(frozen=True, slots=True)
class _Below:
    """What is below a prefix."""

    weights: DecoderWeights
    prefix: str
    experts: ExpertsConfig
    hidden: int
    held: range | None

    @property
    def numbers(self) -> range:
        """Experts that are read."""
        return range(self.experts.routing.experts) if self.held is None else self.held

    @property
    def part(self) -> Part | None:
        """What is read of weights of all experts."""
        return None if self.held is None else Part(self.held.start, self.held.stop)

    def linears(self) -> Iterator[list[tuple[str, tuple[int, int]]]]:
        """Gate, up and down of each expert that is read: names, outputs and inputs."""
        names, inner, hidden = self.experts.names, self.experts.inner, self.hidden
        for number in self.numbers:
            yield [
                (f"{self.prefix}.{number}.{names.gate}", (inner, hidden)),
                (f"{self.prefix}.{number}.{names.up}", (inner, hidden)),
                (f"{self.prefix}.{number}.{names.down}", (hidden, inner)),
            ]

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A weight of all experts, each of this shape."""
        whole = (self.experts.routing.experts, *shape)
        return self.weights.source.take(f"{self.prefix}.{name}", whole, dtype, self.part)


def _separate(below: _Below, dtype: torch.dtype) -> ExpertBank:
    count, inner, hidden = len(below.numbers), below.experts.inner, below.hidden
    bank: ExpertBank | None = None
    for place, linears in enumerate(below.linears()):
        gate, up, down = (below.weights.dequantized(name, *shape, dtype) for name, shape in linears)
        if bank is None:  # on the device of what was read
            bank = ExpertBank(gate.new_empty(count, 2 * inner, hidden), gate.new_empty(count, hidden, inner))
        bank.gate_up[place, :inner], bank.gate_up[place, inner:], bank.down[place] = gate, up, down
    assert bank is not None, "a routing has experts"
    return bank


def _stacked(below: _Below, dtype: torch.dtype) -> ExpertBank:
    hidden, inner = below.hidden, below.experts.inner
    return ExpertBank(
        _gate_first(below.take("gate_up_proj", (hidden, 2 * inner), dtype).transpose(1, 2)),
        below.take("down_proj", (inner, hidden), dtype).transpose(1, 2).contiguous(),
        *_biases(below, dtype),
    )


def _mxfp4(below: _Below, dtype: torch.dtype) -> PackedBank:
    count, inner, hidden = below.experts.routing.experts, below.experts.inner, below.hidden
    source = below.weights.source
    gate_up = mxfp4.take(source, f"{below.prefix}.gate_up_proj", (count, 2 * inner, hidden), below.part)
    down = mxfp4.take(source, f"{below.prefix}.down_proj", (count, hidden, inner), below.part)
    return PackedBank(
        PackedMatrices(PackedFormat.MXFP4, _gate_first(gate_up[0]), _gate_first(gate_up[1])),
        PackedMatrices(PackedFormat.MXFP4, _aligned(down[0]), down[1]),
        dtype,
        *_biases(below, dtype),
    )


def _aligned(values: Tensor) -> Tensor:
    """Values that begin where kernels can read several at once: a file's own memory may begin anywhere."""
    return values.clone() if values.data_ptr() % _ALIGNED else values


def _biases(below: _Below, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = below.take("gate_up_proj_bias", (2 * below.experts.inner,), dtype)
    return _gate_first(gate_up), below.take("down_proj_bias", (below.hidden,), dtype)


def _fp8(below: _Below, form: Fp8Format) -> tuple[PackedMatrices, PackedMatrices]:
    """Gate and up, and down. Inputs are not rounded, so their scales are not kept.

    `ModelError` for a code that is no number: kernels take it for 480.
    """
    inner, source = below.experts.inner, below.weights.source
    rows, rows_down = form.scale_rows(inner, inner), form.scale_rows(below.hidden)
    gate_up, down = _Stack(len(below.numbers)), _Stack(len(below.numbers))
    damaged: dict[str, Tensor] = {}
    for place, linears in enumerate(below.linears()):
        taken = {full: fp8.take(source, form, full, *shape) for full, shape in linears}
        damaged |= {full: weight.has_nan() for full, weight in taken.items()}
        gate, up, last = taken.values()
        scales = torch.cat([gate.scales[::rows], up.scales[::rows]])
        gate_up.put(place, torch.cat([gate.values, up.values]), scales)
        down.put(place, last.values, last.scales[::rows_down])
    _require_numbers(damaged)
    return _fp8_matrices(rows, *gate_up.tensors), _fp8_matrices(rows_down, *down.tensors)


def _fp8_matrices(scale_rows: int, values: Tensor, scales: Tensor) -> PackedMatrices:
    return PackedMatrices(PackedFormat.FP8, values, scales, scale_rows)


def _int4(below: _Below, form: Int4Format) -> tuple[PackedMatrices, PackedMatrices]:
    """Gate and up, and down."""
    gate_up, down = _Stack(len(below.numbers)), _Stack(len(below.numbers))
    for place, linears in enumerate(below.linears()):
        gate, up, last = (
            int4_packings.take(below.weights.source, form, full, *shape) for full, shape in linears
        )
        both = int4_packings.joined([gate, up])
        gate_up.put(place, both.values, both.scales, both.zeros)
        down.put(place, last.values, last.scales, last.zeros)
    return _int4_matrices(*gate_up.tensors), _int4_matrices(*down.tensors)


def _int4_matrices(values: Tensor, scales: Tensor, zeros: Tensor) -> PackedMatrices:
    return PackedMatrices(PackedFormat.INT4, values, scales, zeros=zeros)


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
