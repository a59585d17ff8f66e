"""Words of eight 4-bit numbers, as three writers pack them, read into one form: see `Int4Weight`.

    awq       along outputs, in the order 0 2 4 6 1 3 5 7   qweight [inputs, outputs / 8]   scales [groups, outputs]
    gptq      along inputs                                  qweight [inputs / 8, outputs]   scales [groups, outputs]
    packed    along inputs                                  weight_packed [outputs, inputs / 8]
                                                            weight_scale [outputs, groups]

Zeros are packed along outputs by all three. The first number lies in a word's lowest bits. GPTQ stores zeros less one,
but for `gptq_v2`. compressed-tensors adds 8 to numbers and zeros, which are from -8 to 7: the difference is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.quantized.int4_formats import WORD, Int4Format, Packing
from shared.engine.weight_source import WeightSource
from shared.primitives.errors import ModelError

MIDDLE = 8  # the zero of a format without zeros
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of its eight outputs


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight in 4 bits: `(number - zero) * scale`."""

    values: Tensor  # uint8 [outputs, inputs / 2], two inputs in a byte, the first in the upper half
    scales: Tensor  # float32 [outputs, groups]
    zeros: Tensor  # uint8 [outputs, groups]: 0 … 16

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 2 * self.values.shape[1] // self.scales.shape[1]

    def dequantized(self) -> Tensor:
        """float32 [outputs, inputs]: what every way to compute is compared with."""
        outputs, groups = self.scales.shape
        wide = unpacked(self.values).view(outputs, groups, -1).float()
        return wide.sub_(self.zeros.unsqueeze(-1)).mul_(self.scales.unsqueeze(-1)).view(outputs, -1)


def take(source: WeightSource, form: Int4Format, name: str, outputs: int, inputs: int) -> Int4Weight:
    """Read the linear of this name; `ModelError` names the tensor that is missing, misshapen or of another type."""
    form.check(name, outputs, inputs)
    read = _compressed if form.packing is Packing.COMPRESSED else _by_input
    return _spread(read(source, form, name, outputs, inputs), form.kept_group(inputs))


def _by_input(source: WeightSource, form: Int4Format, name: str, outputs: int, inputs: int) -> Int4Weight:
    groups = form.groups(inputs)
    scales = source.take(f"{name}.scales", (groups, outputs), torch.float32)
    zeros = _numbers(source.take(f"{name}.qzeros", (groups, outputs // WORD), torch.int32))
    if form.packing is Packing.AWQ:
        by_input = _numbers(source.take(f"{name}.qweight", (inputs, outputs // WORD), torch.int32))
        numbers, zeros = _awq_order(by_input).t(), _awq_order(zeros)
    else:
        _check_order(source, form, name, inputs)
        numbers = _numbers(source.take(f"{name}.qweight", (inputs // WORD, outputs), torch.int32).t())
        zeros = zeros + 1 if form.packing is Packing.GPTQ else zeros
    return Int4Weight(packed(numbers), scales.t().contiguous(), zeros.t().contiguous())


def _compressed(source: WeightSource, form: Int4Format, name: str, outputs: int, inputs: int) -> Int4Weight:
    groups = form.groups(inputs)
    numbers = _numbers(source.take(f"{name}.weight_packed", (outputs, inputs // WORD), torch.int32))
    scales = source.take(f"{name}.weight_scale", (outputs, groups), torch.float32)
    if form.symmetric:
        zeros = torch.full_like(scales, MIDDLE, dtype=torch.uint8)
    else:
        words = source.take(f"{name}.weight_zero_point", (outputs // WORD, groups), torch.int32)
        zeros = _numbers(words.t()).t().contiguous()
    return Int4Weight(packed(numbers), scales, zeros)


def _spread(weight: Int4Weight, group: int) -> Int4Weight:
    """Scales for each `group` inputs: where one is all of a row's, it is that of each of its groups."""
    times = weight.group // group
    scales, zeros = (each.repeat_interleave(times, dim=1) for each in (weight.scales, weight.zeros))
    return Int4Weight(weight.values, scales, zeros)


def _check_order(source: WeightSource, form: Int4Format, name: str, inputs: int) -> None:
    """Groups must be neighbours: with desc_act they are not."""
    if f"{name}.g_idx" not in source:
        return
    found = source.take(f"{name}.g_idx", (inputs,), torch.int32)
    size = inputs // form.groups(inputs)
    if not torch.equal(found, torch.arange(inputs, dtype=torch.int32, device=found.device) // size):
        raise ModelError(
            f"{name}.g_idx scatters groups over the inputs (desc_act), which is not supported; expected groups of "
            f"{size} neighbours, as desc_act false of config.json says"
        )


def _numbers(words: Tensor) -> Tensor:
    """int32 [rows, words] → uint8 [rows, 8 · words], lowest bits first."""
    octets = words.contiguous().view(torch.uint8)  # [rows, 4 · words], lowest first
    return torch.stack((octets & 0x0F, octets >> 4), dim=-1).flatten(-2)


def _awq_order(numbers: Tensor) -> Tensor:
    return numbers.view(len(numbers), -1, WORD)[..., _AWQ_PLACES].flatten(-2)


def packed(numbers: Tensor) -> Tensor:
    """uint8 [rows, size], 0 … 15 → uint8 [rows, size / 2], the first of two in the upper half."""
    return (numbers[:, 0::2] << 4) | numbers[:, 1::2]


def unpacked(values: Tensor) -> Tensor:
    """uint8 [rows, size / 2] → uint8 [rows, size]."""
    return torch.stack((values >> 4, values & 0x0F), dim=-1).flatten(-2)


def joined(parts: Sequence[Int4Weight]) -> Int4Weight:
    """One linear for several that share their input."""
    return Int4Weight(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.zeros for part in parts]),
    )
