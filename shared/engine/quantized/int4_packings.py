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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.engine.quantized.int4_formats import WORD, Int4Format, Packing
from shared.engine.quantized.weight_source import Part, WeightSource
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


def take(
    source: WeightSource, form: Int4Format, name: str, outputs: int, inputs: int, part: Part | None = None
) -> Int4Weight:
    """Read the linear of this name; `ModelError` names the tensor that is missing, misshapen or of another type.

    A `part` begins and ends with whole words of outputs, or whole groups of inputs.
    """
    form.check(name, outputs, inputs)
    stored = _StoredInt4(source, form, name, outputs, inputs, part)
    weight = _compressed(stored) if form.packing is Packing.COMPRESSED else _by_input(stored)
    return _spread(weight, form.kept_group(2 * weight.values.shape[1]))


@dataclass(frozen=True, slots=True)
class _StoredInt4:
    """A linear in a file, and the part of it that is read."""

    source: WeightSource
    form: Int4Format
    name: str
    outputs: int
    inputs: int
    part: Part | None

    def words(self, name: str, *sides: _Side) -> Tensor:
        """The words of this name, int32, whose two sides are these."""
        return self._take(name, sides, torch.int32)

    def scales(self, name: str, *sides: _Side) -> Tensor:
        """The scales of this name."""
        return self._take(name, sides, torch.float32)

    def by_outputs(self, each: int = 1) -> _Side:
        """A side with one for so many outputs."""
        rows = self.part if self.part and self.part.dim == 0 else None
        return _Side(self.outputs // each, each, rows)

    def by_inputs(self, each: int = 1) -> _Side:
        """A side with one for so many inputs."""
        columns = self.part if self.part and self.part.dim == 1 else None
        return _Side(self.inputs // each, each, columns)

    def by_groups(self) -> _Side:
        """A side with one for each group of inputs. One that all share is read whole."""
        side = self.by_inputs(self.inputs // self.form.groups(self.inputs))
        return side if side.size > 1 else replace(side, cut=None)

    def _take(self, name: str, sides: tuple[_Side, ...], dtype: torch.dtype) -> Tensor:
        cut = next((side.cut.along(dim, side.each) for dim, side in enumerate(sides) if side.cut), None)
        return self.source.take(f"{self.name}.{name}", tuple(side.size for side in sides), dtype, cut)


@dataclass(frozen=True, slots=True)
class _Side:
    """A dimension of a stored tensor: its size, the outputs or inputs that one stands for, and those that are read."""

    size: int
    each: int
    cut: Part | None


def _by_input(stored: _StoredInt4) -> Int4Weight:
    form = stored.form
    scales = stored.scales("scales", stored.by_groups(), stored.by_outputs())
    zeros = _numbers(stored.words("qzeros", stored.by_groups(), stored.by_outputs(WORD)))
    if form.packing is Packing.AWQ:
        by_input = _numbers(stored.words("qweight", stored.by_inputs(), stored.by_outputs(WORD)))
        numbers, zeros = _awq_order(by_input).t(), _awq_order(zeros)
    else:
        _check_order(stored)
        numbers = _numbers(stored.words("qweight", stored.by_inputs(WORD), stored.by_outputs()).t())
        zeros = zeros + 1 if form.packing is Packing.GPTQ else zeros
    return Int4Weight(packed(numbers), scales.t().contiguous(), zeros.t().contiguous())


def _compressed(stored: _StoredInt4) -> Int4Weight:
    numbers = _numbers(stored.words("weight_packed", stored.by_outputs(), stored.by_inputs(WORD)))
    scales = stored.scales("weight_scale", stored.by_outputs(), stored.by_groups())
    if stored.form.symmetric:
        zeros = torch.full_like(scales, MIDDLE, dtype=torch.uint8)
    else:
        words = stored.words("weight_zero_point", stored.by_outputs(WORD), stored.by_groups())
        zeros = _numbers(words.t()).t().contiguous()
    return Int4Weight(packed(numbers), scales, zeros)


def _spread(weight: Int4Weight, group: int) -> Int4Weight:
    """Scales for each `group` inputs: where one is all of a row's, it is that of each of its groups."""
    times = weight.group // group
    scales, zeros = (each.repeat_interleave(times, dim=1) for each in (weight.scales, weight.zeros))
    return Int4Weight(weight.values, scales, zeros)


def _check_order(stored: _StoredInt4) -> None:
    """Groups must be neighbours: with desc_act they are not."""
    name = f"{stored.name}.g_idx"
    if name not in stored.source:
        return
    found = stored.words("g_idx", stored.by_inputs())
    size, cut = stored.inputs // stored.form.groups(stored.inputs), stored.by_inputs().cut
    first = cut.start if cut else 0
    places = torch.arange(first, first + len(found), dtype=torch.int32, device=found.device)
    if not torch.equal(found, places // size):
        raise ModelError(
            f"{name} scatters groups over the inputs (desc_act), which is not supported; expected groups of "
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
