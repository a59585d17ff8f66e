"""The paged KV cache: one contiguous allocation that a transfer agent can register as a whole.

    [page, layer, K|V, kv_head, page_size · head_dim]

One page is one span of bytes that holds `page_size` tokens of all layers: the unit of transfer and of host backup.
Values lie as [page_size, head_dim]. Keys lie so as well in the layout of GPUs (`page-major-1`); for the kernels of CPUs
they lie transposed (`page-major-2`): a query's scores for 16 tokens are then sums of whole vectors.
Which request owns a page is not known here: see `shared/kv/page_pool.py`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.primitives.errors import StartError

_PAD_BYTES = 64  # kernels read whole vectors, even at the last value of the last page
INVALID_PAGE = 2**31 - 1  # pads page tables: an index error if ever read, where -1 would read the last page


class CacheShape(Protocol):
    """What a page's size follows from; `ModelConfig` is one."""

    @property
    def layers(self) -> int:
        """Layers that attend."""

    @property
    def kv_heads(self) -> int:
        """Key-value heads of each."""

    @property
    def head_dim(self) -> int:
        """Numbers of a key, and of a value."""


class KVLayout(Enum):
    """How the keys of a page lie."""

    KEYS_BY_TOKEN = "page-major-1"  # [page_size, head_dim]
    KEYS_BY_DIMENSION = "page-major-2"  # [head_dim, page_size]


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How many pages a cache has, by what they are for, in the order in which they lie on the device."""

    pool: int  # for requests
    host: int = 0
    known: int = 0  # for the transfer alone: no step uses them
    padding: int = 0  # take what rows of padding write; no request and no peer ever sees them


class KVCache:
    """Device pages and host pages of one model, in the same layout."""

    def __init__(
        self,
        config: CacheShape,
        pages: PageCounts,
        *,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        layout: KVLayout = KVLayout.KEYS_BY_DIMENSION,
        device: str = "cpu",
    ) -> None:
        self.page_size = page_size
        self.pages = pages.pool
        self.host_pages = pages.host
        self.known_pages = pages.known
        self.layout = layout
        self._head_dim = config.head_dim
        shape = (config.layers, 2, config.kv_heads, page_size * config.head_dim)
        self.store = _zeros((pages.pool + pages.known + pages.padding, *shape), dtype, device)
        self.host = _host_zeros((pages.host, *shape), dtype, device)

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
        kv_heads, by_token = self.store.shape[3], (self.page_size, self._head_dim)
        keys, values = self.store[:, layer, 0], self.store[:, layer, 1]
        values = values.view(-1, kv_heads, *by_token)
        if self.layout is KVLayout.KEYS_BY_TOKEN:
            return keys.view(-1, kv_heads, *by_token), values
        return keys.view(-1, kv_heads, *by_token[::-1]).transpose(-1, -2), values

    def paged_layer(self, layer: int) -> Tensor:
        """Keys and values of a layer as FlashInfer takes them: a view [pages, 2, kv_heads, page_size, head_dim].

        Strides are given, not derived: where a dimension has size 1, kernels would read an arbitrary one.
        """
        assert self.layout is KVLayout.KEYS_BY_TOKEN
        pages, layers, _, kv_heads, inner = self.store.shape
        part, kind = kv_heads * inner, layers * 2 * kv_heads * inner
        return self.store.as_strided(
            (pages, 2, kv_heads, self.page_size, self._head_dim),
            (kind, part, inner, self._head_dim, 1),
            layer * 2 * part,
        )

    def backup(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy device pages into host pages."""
        assert len(pages) == len(host_pages)
        for page, host_page in zip(pages, host_pages, strict=True):
            self.host[host_page].copy_(self.store[page], non_blocking=True)

    def restore(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host pages into device pages."""
        assert len(pages) == len(host_pages)
        for page, host_page in zip(pages, host_pages, strict=True):
            self.store[page].copy_(self.host[host_page], non_blocking=True)


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeroed memory of the host that the device can copy to and from by itself.

    Registered, not allocated by torch: that would take the next power of two of bytes. It is no longer registered once
    nobody holds it: the system gives its addresses to others, which could else not be registered.
    """
    if math.prod(shape) == 0 or not device.startswith("cuda"):
        return _zeros(shape, dtype, "cpu")
    memory = _mapped(math.prod(shape) * dtype.itemsize)
    host = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    if int(error) != 0:
        raise StartError(
            f"{host.nbytes / 2**30:.2f} GiB of host pages cannot be pinned (CUDA error {int(error)}): raise the "
            "limit of locked memory, or lower host_fraction"
        )
    # Called before it is unmapped. A process that ends leaves it to the system.
    weakref.finalize(memory, runtime.cudaHostUnregister, host.data_ptr()).atexit = False
    return host


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeroed memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0 or device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(_mapped(nbytes), dtype=dtype, count=math.prod(shape)).view(shape)


def _mapped(nbytes: int) -> mmap.mmap:
    """Zeroed memory of the host, in huge pages where the system has them: attention reads a few KiB here and there."""
    memory = mmap.mmap(-1, nbytes + _PAD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def page_bytes(config: CacheShape, page_size: int, dtype: torch.dtype) -> int:
    """Size in bytes of a page of this model."""
    return config.layers * 2 * config.kv_heads * page_size * config.head_dim * dtype.itemsize


def kv_format(
    config: CacheShape, page_size: int, dtype: torch.dtype, layout: KVLayout = KVLayout.KEYS_BY_DIMENSION
) -> str:
    """Fingerprint of the layout: a worker fetches pages only from workers with an equal one."""
    shape = f"layers={config.layers},kv_heads={config.kv_heads},head_dim={config.head_dim}"
    return f"{layout.value},page_size={page_size},{shape},{str(dtype).removeprefix('torch.')}"
