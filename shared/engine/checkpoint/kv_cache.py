"""The paged KV cache: one contiguous allocation that a transfer agent can register as a whole.

    [page, layer, K|V, kv_head, page_size · head_dim]      page-major-1, page-major-2
    [page, kv_head, layer, K|V, page_size · head_dim]      head-major-1

One page is one span of bytes that holds `page_size` tokens of all layers: the unit of transfer and of host backup.
Values lie as [page_size, head_dim]. Keys lie so as well in the layouts of GPUs; for the kernels of CPUs they lie
transposed (`page-major-2`): a query's scores for 16 tokens are then sums of whole vectors. In `head-major-1` all that a
page has of a head lies in a row, a *slice*: workers of any number of GPUs read each other's slices.
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

from shared.primitives.errors import ConfigError, StartError

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
    """How a page lies."""

    KEYS_BY_TOKEN = "page-major-1"  # keys [page_size, head_dim]
    KEYS_BY_DIMENSION = "page-major-2"  # keys [head_dim, page_size]
    HEADS_APART = "head-major-1"  # keys [page_size, head_dim], of one head in a row

    @property
    def of_gpus(self) -> bool:
        """Whether it is one of the CUDA engine's."""
        return self is not KVLayout.KEYS_BY_DIMENSION


def layout_on_cuda(choice: str, ranks: int) -> KVLayout:
    """The layout that `kv_layout` chooses for a worker of so many ranks. Raises `ConfigError` if it cannot be had."""
    if choice == "auto":
        return KVLayout.KEYS_BY_TOKEN if ranks == 1 else KVLayout.HEADS_APART
    layout = KVLayout(choice)
    if ranks > 1 and layout is not KVLayout.HEADS_APART:
        raise ConfigError(
            f"kv_layout {choice} keeps the heads of a page together, and {ranks} GPUs part them: set kv_layout to "
            f"{KVLayout.HEADS_APART.value}, for all workers that read each other's pages"
        )
    return layout


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
        self.kv_heads = config.kv_heads
        shape = (config.layers, 2, config.kv_heads, page_size * config.head_dim)
        if layout is KVLayout.HEADS_APART:
            shape = (config.kv_heads, config.layers, 2, page_size * config.head_dim)
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
        if self.layout.of_gpus:
            keys, values = self.paged_layer(layer).unbind(1)
            return keys, values
        by_token = (self.page_size, self._head_dim)
        keys, values = self.store[:, layer, 0], self.store[:, layer, 1]
        by_dimension = keys.view(-1, self.kv_heads, *by_token[::-1])
        return by_dimension.transpose(-1, -2), values.view(-1, self.kv_heads, *by_token)

    def paged_layer(self, layer: int) -> Tensor:
        """Keys and values of a layer as FlashInfer takes them: a view [pages, 2, kv_heads, page_size, head_dim].

        Strides are given, not derived: where a dimension has size 1, kernels would read an arbitrary one.
        """
        assert self.layout.of_gpus
        inner = self.page_size * self._head_dim
        page = self.store[0].numel()
        if self.layout is KVLayout.HEADS_APART:
            kind, head = inner, page // self.kv_heads
        else:
            kind, head = self.kv_heads * inner, inner
        return self.store.as_strided(
            (len(self.store), 2, self.kv_heads, self.page_size, self._head_dim),
            (page, kind, head, self._head_dim, 1),
            layer * 2 * kind,
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
