"""The engine's KV pages, as a transfer offers them: where engine and transfer meet, which do not know each other."""

from __future__ import annotations

from shared.engine.checkpoint.kv_cache import KVCache, KVLayout
from shared.engine.cuda.page_access import TorchPageAccess
from shared.transfer.memory import HOST_ACCESS, PageMemory


def page_memory(cache: KVCache) -> PageMemory:
    """All pages that peers may read, those of padding left out.

    Pages of the CUDA engine are read and written through torch, on a CPU as well: so its whole path is tried there.
    """
    device = cache.store.device
    of_cuda_engine = cache.layout is KVLayout.KEYS_BY_TOKEN
    return PageMemory(
        cache.address,
        cache.page_bytes,
        cache.pages,
        device_id=device.index or 0,
        memory="VRAM" if device.type == "cuda" else "DRAM",
        known_pages=cache.known_pages,
        access=TorchPageAccess(cache.store) if of_cuda_engine else HOST_ACCESS,
    )
