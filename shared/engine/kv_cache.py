"""The paged KV cache: one contiguous allocation that a transfer agent can register as a whole.

    [page, layer, K|V, kv_head, page_size · head_dim]      keys [head_dim, page_size], values [page_size, head_dim]

One page is one span of bytes that holds `page_size` tokens of all layers: the unit of transfer and of host backup.
Keys lie transposed: a query's scores for 16 tokens are then sums of whole vectors.
Which request owns a page is not known here: see `shared/kv/page_pool.py`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.model_config import ModelConfig

_PAD_BYTES = 64  # kernels read whole vectors, even at the last value of the last page
INVALID_PAGE = 2**31 - 1  # pads page tables: an index error if ever read, where -1 would read the last page


class KVCache:
    """Device pages and host pages of one model, in the same layout."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        pages: int,
        page_size: int,
        host_pages: int = 0,
        known_pages: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.page_size = page_size
        self.pages = pages
        self.host_pages = host_pages
        self.known_pages = known_pages  # behind the others, for the transfer alone: no step uses them
        self._head_dim = config.head_dim
        shape = (config.layers, 2, config.kv_heads, page_size * config.head_dim)
        self.store = _zeros((pages + known_pages, *shape), dtype)
        self.host = _zeros((host_pages, *shape), dtype)

    @property
    def address(self) -> int:
        """Where the device pages begin, in bytes."""
        return self.store.data_ptr()

    @property
    def nbytes(self) -> int:
        """Size of all device pages in bytes."""
        return self.pages * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Size of one page in bytes."""
        return self.store[0].numel() * self.store.element_size()

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each a view [pages, kv_heads, page_size, head_dim]."""
        kv_heads = self.store.shape[3]
        keys = self.store[:, layer, 0].view(-1, kv_heads, self._head_dim, self.page_size)
        values = self.store[:, layer, 1].view(-1, kv_heads, self.page_size, self._head_dim)
        return keys.transpose(-1, -2), values

    def backup(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy device pages into host pages."""
        assert len(pages) == len(host_pages)
        for page, host_page in zip(pages, host_pages, strict=True):
            self.host[host_page].copy_(self.store[page])

    def restore(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host pages into device pages."""
        assert len(pages) == len(host_pages)
        for page, host_page in zip(pages, host_pages, strict=True):
            self.store[page].copy_(self.host[host_page])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed memory, in huge pages where the system has them: attention reads a few KiB at scattered places."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, nbytes + _PAD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Size in bytes of a page of this model."""
    return config.layers * 2 * config.kv_heads * page_size * config.head_dim * dtype.itemsize


def kv_format(config: ModelConfig, page_size: int, dtype: torch.dtype) -> str:
    """Fingerprint of the layout: a worker fetches pages only from workers with an equal one."""
    shape = f"layers={config.layers},kv_heads={config.kv_heads},head_dim={config.head_dim}"
    return f"page-major-2,page_size={page_size},{shape},{str(dtype).removeprefix('torch.')}"
