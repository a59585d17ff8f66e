"""Products of experts from packed weights: by `packed_experts.cu` for few rows, by `packed_many.cu` for many."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.cuda.kernels.compiled_kernels import Launch, compiled, run_kernel
from shared.engine.model.experts import (
    ExpertRows,
    GroupedExperts,
    PackedExperts,
    UnpackedProducts,
    has_grouped,
    outputs_at_once,
)
from shared.engine.model.ops import Bank, ExpertProducts, Gated, PackedBank
from shared.engine.quantized.packed_matrices import PackedMatrices

SOURCE = Path(__file__).with_name("packed_experts.cu")
MANY_SOURCE = Path(__file__).with_name("packed_many.cu")
EXPERTS_MAX = 1024  # of a layer
WIDTHS = (8, 16, 32)  # rows of a tile, where they are few …
MANY_WIDTHS = (32, 64)  # … and where they are many
_THREADS = 128
_PLAN_THREADS = 1024
_UNPACK_THREADS = _WEIGH_THREADS = 256
_EACH = 8  # numbers that a thread sums at once
_OUTPUTS, _MANY_OUTPUTS = 32, 128  # of a block
_CHUNK = 32  # numbers that a thread unpacks
_TILE_WORDS = 3
_ALIGNED = 16  # bytes


def tiles_max(rows: int, experts: int, width: int) -> int:
    """Tiles that so many rows need at most, whichever experts they chose."""
    return min(rows, rows // width + min(rows, experts))


def width_of(rows: int, experts: int, widths: tuple[int, ...] = WIDTHS) -> int:
    """Rows of a tile: what an expert has on average, so that most experts are read once."""
    return next((width for width in widths if rows <= width // 2 * experts), widths[-1])


class PackedKernels:
    """See `PackedProducts`. All depends on shapes alone, so it can be captured as a CUDA graph."""

    def __init__(self, few: Launch, many: Launch) -> None:
        self._launch, self._many = few, many

    @classmethod
    def compiled(cls, device: torch.device) -> PackedKernels:
        """Compiled for this GPU. Raises `StartError` if it cannot be."""
        return cls(*(compiled(source, device, waits=True) for source in (SOURCE, MANY_SOURCE)))

    def plan(
        self, chosen: Tensor, experts: int, *, many: bool = False, widths: tuple[int, ...] = ()
    ) -> ExpertRows:
        """See `PackedProducts`; `widths` of tiles to choose from, if others than those that are taken."""
        assert experts <= EXPERTS_MAX
        assert chosen.is_contiguous()
        rows = chosen.numel()
        width = width_of(rows, experts, widths or (MANY_WIDTHS if many else WIDTHS))
        count = tiles_max(rows, experts, width)
        order = torch.empty(rows, dtype=torch.int32, device=chosen.device)
        tiles = torch.empty(count, _TILE_WORDS, dtype=torch.int32, device=chosen.device)
        numbers = (ctypes.c_int(each) for each in (rows, experts, width, count))
        run_kernel(self._launch, "plan_experts", 1, _PLAN_THREADS, chosen, *numbers, order, tiles)
        return ExpertRows(order, tiles, width, many)

    def multiply(self, x: Tensor, rows: ExpertRows, weights: PackedMatrices, bias: Tensor | None) -> Tensor:
        """See `PackedProducts`; x of bfloat16."""
        count, inputs = len(rows.order), weights.inputs
        assert x.shape[1] == inputs
        assert count % len(x) == 0
        assert x.stride(1) == 1
        assert x.stride(0) % (_ALIGNED // x.itemsize) == 0
        assert x.data_ptr() % _ALIGNED == weights.values.data_ptr() % _ALIGNED == 0
        assert x.dtype == torch.bfloat16
        y = x.new_empty(count, weights.outputs)
        launch, kind, outputs = (
            (self._many, "many", _MANY_OUTPUTS) if rows.many else (self._launch, "multiply", _OUTPUTS)
        )
        run_kernel(
            launch,
            f"{kind}_{weights.packing.value}_{rows.width}",
            len(rows.tiles) * -(-weights.outputs // outputs),
            _THREADS,
            x,
            ctypes.c_longlong(x.stride(0)),
            ctypes.c_int(count // len(x)),
            rows.order,
            rows.tiles,
            *_packed(weights),
            bias,
            ctypes.c_int(inputs),
            ctypes.c_int(weights.outputs),
            y,
        )
        return y

    def weigh(self, rows: Tensor, weights: Tensor) -> Tensor:
        """See `PackedProducts`; rows of bfloat16, their size a multiple of 8."""
        (tokens, chosen), size = weights.shape, rows.shape[1]
        assert rows.is_contiguous()
        assert size % _EACH == 0
        y = rows.new_empty(tokens, size)
        run_kernel(
            self._launch,
            "weigh_rows",
            -(-tokens * size // (_EACH * _WEIGH_THREADS)),
            _WEIGH_THREADS,
            rows,
            weights.contiguous(),
            *(ctypes.c_int(each) for each in (tokens, chosen, size)),
            y,
        )
        return y

    def unpack(self, matrices: PackedMatrices, first: int, wide: Tensor) -> None:
        """See `shared.engine.quantized.packed_matrices.unpack`; wide of bfloat16, contiguous."""
        assert wide.dtype == torch.bfloat16
        assert wide.is_contiguous()
        chunks = wide.numel() // _CHUNK
        run_kernel(
            self._launch,
            f"unpack_{matrices.packing.value}",
            -(-chunks // _UNPACK_THREADS),
            _UNPACK_THREADS,
            *_packed(matrices),
            ctypes.c_int(matrices.inputs),
            ctypes.c_int(matrices.outputs),
            ctypes.c_int(first),
            ctypes.c_int(wide.shape[1]),
            ctypes.c_longlong(chunks),
            wide,
        )


def _packed(matrices: PackedMatrices) -> tuple[Tensor, Tensor, Tensor | None, ctypes.c_int, ctypes.c_int]:
    return (
        matrices.values,
        matrices.scales,
        matrices.zeros,
        ctypes.c_int(matrices.scale_rows),
        ctypes.c_int(matrices.scales.shape[2]),
    )


class GpuExperts:
    """Products of banks on a GPU, packed or not. What is packed needs kernels, which are made for the first one."""

    def __init__(self, kernels: Callable[[], PackedKernels], capability: tuple[int, int]) -> None:
        self._kernels = kernels
        self._grouped = has_grouped(capability)
        self._packed: tuple[PackedKernels, UnpackedProducts] | None = None

    def __call__(self, bank: Bank, gated: Gated) -> ExpertProducts:
        """See `Ops.experts`."""
        if not isinstance(bank, PackedBank):
            return GroupedExperts(bank, gated)
        if self._packed is None:
            kernels = self._kernels()
            self._packed = kernels, UnpackedProducts(kernels.unpack)
        few, unpacked = self._packed
        return PackedExperts(
            bank, gated, few, GroupedExperts(bank, gated, unpacked) if self._grouped else None
        )


def unpacked_bytes(config: ModelConfig) -> int:
    """Memory that packed experts are unpacked into, on a GPU with a grouped product."""
    hidden = config.hidden_size
    numbers = (
        experts.here * outputs_at_once(experts.here, outputs, inputs) * inputs
        for layer, experts in enumerate(config.experts)
        if experts and config.packed_in(layer)
        for outputs, inputs in ((2 * experts.inner, hidden), (hidden, experts.inner))
    )
    return 2 * max(numbers, default=0)
