"""`HeadWriter` by `head_kernels.cu`: what lies between a layer's projections and its attention, in one launch."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform
from shared.engine.attention.protocol import PagedBatch
from shared.engine.cuda.kernels.compiled_kernels import Launch, compiled, run_kernel

SOURCE = Path(__file__).with_name("head_kernels.cu")
_WARP = 32
_THREADS = 128


class CudaHeadWriter:
    """See `HeadWriter`. q, k and v in 16 bits, cells too or in 8; their rows may lie apart, heads of a row may not."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    @classmethod
    def compiled(cls, device: torch.device) -> CudaHeadWriter:
        """Compiled for this GPU. Raises `StartError` if it cannot be."""
        return cls(compiled(SOURCE, device, waits=True))

    def write(
        self, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform, batch: PagedBatch, cells: Tensor
    ) -> Tensor:
        """See `HeadWriter`; q is overwritten, k is not."""
        rows, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        assert q.stride(1) == k.stride(1) == v.stride(1) == head_dim
        assert q.dtype == k.dtype == v.dtype
        types = dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in (q, cells))
        warps = rows * (heads + 2 * kv_heads)
        run_kernel(
            self._launch,
            f"write_heads_{'_'.join(types)}_{head_dim}",
            -(-warps * _WARP // _THREADS),
            _THREADS,
            *(part for each in (q, k, v) for part in (each, ctypes.c_longlong(each.stride(0)))),
            ctypes.c_int(rows),
            ctypes.c_int(heads),
            ctypes.c_int(kv_heads),
            transform.q_norm,
            transform.k_norm,
            ctypes.c_float(transform.epsilon),
            transform.cos_sin,
            ctypes.c_int(0 if transform.cos_sin is None else transform.cos_sin.shape[1]),
            batch.positions,
            batch.batch_indices,
            batch.kv_indptr,
            batch.kv_indices,
            ctypes.c_int(cells.shape[3]),
            cells,
            *(ctypes.c_longlong(cells.stride(each)) for each in range(3)),
        )
        return q
