"""Norms, rotation and the write of keys and values in plain torch: what kernels that do it are compared with."""

from __future__ import annotations

from torch import Tensor

from shared.engine.attention.heads import HeadTransform, kept
from shared.engine.attention.protocol import PagedBatch


class TorchHeadWriter:
    """See `HeadWriter`: in plain torch, on any device."""

    def write(
        self, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform, batch: PagedBatch, cells: Tensor
    ) -> Tensor:
        """See `HeadWriter`."""
        q, k = transform(q, k, batch.positions)
        pages, slots = batch.cells()
        for kind, new in enumerate((k, v)):
            cells[pages, kind, :, slots] = kept(new, cells.dtype)
        return q
