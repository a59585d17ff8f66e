"""GPUs as the engine's plan of memory knows them: what they have, and what a worker asks of one in the docs' tables."""

from __future__ import annotations

from functools import partial

from shared.engine.attention.flashinfer_workspace import Processors
from shared.engine.config import EngineConfig
from shared.engine.cuda.memory import DeviceMemory
from shared.engine.cuda.platform import gpu_workspace
from shared.engine.model.experts import has_grouped
from shared.engine.quantized.linears import NarrowProducts

CONFIG = EngineConfig(pages=None, page_size=16, slots=64, context_len=32_768, device="cuda")
CAPABILITY = (9, 0)  # H100, GH200, H200
CARDS = {"80 GB": 79.2, "96 GB": 95.1, "141 GB": 139.8}  # GiB

_GIB = 2**30
_IN_USE_GIB = 0.5  # by CUDA itself


def card_memory(gib: float) -> DeviceMemory:
    """Memory of a GPU of Hopper's kind that nobody else uses."""
    workspace = partial(
        gpu_workspace,
        processors=Processors(count=132, major=CAPABILITY[0]),
        narrow=NarrowProducts.on_gpu(CAPABILITY, deterministic=False),
        unpacks=has_grouped(CAPABILITY),
    )
    return DeviceMemory(int(gib * _GIB), int((gib - _IN_USE_GIB) * _GIB), workspace)
