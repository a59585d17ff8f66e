"""An engine's KV pages as a transfer offers them, of rank 0 and of any other."""

from __future__ import annotations

from shared.engine.checkpoint.kv_cache import KVCache, KVLayout
from shared.engine.cuda.page_access import TorchPageAccess
from shared.engine.parallel.shares import HeldHeads
from shared.transfer.memory import HOST_ACCESS, WHOLE_PAGES, PageMemory, PageSlices


def page_memory(cache: KVCache, heads: HeldHeads | None = None) -> PageMemory:
    """All that peers may read, the pages of padding left out. `heads` are those that the pages hold; None: all.

    Pages of the CUDA engine are read and written through torch, on a CPU as well: so its whole path is tried there.
    Pages whose heads lie apart are cut into slices, one a head.
    """
    device = cache.store.device
    held = heads or HeldHeads(0, cache.kv_heads, cache.kv_heads)
    slices = PageSlices(held.first, held.count, held.total)
    return PageMemory(
        cache.address,
        cache.page_bytes,
        cache.pages,
        device_id=device.index or 0,
        memory="VRAM" if device.type == "cuda" else "DRAM",
        known_pages=cache.known_pages,
        access=TorchPageAccess(cache.store) if cache.layout.of_gpus else HOST_ACCESS,
        slices=slices if cache.layout is KVLayout.HEADS_APART else WHOLE_PAGES,
    )
