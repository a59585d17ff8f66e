"""How much of the GPU's memory FlashInfer's plans and kernels take, reckoned before anything is allocated.

FlashInfer ends with an error of its own where a workspace is too small, after the weights were loaded. Read in 0.6.14:
`DecodePlan` and `PrefillPlan` of scheduler.cuh, `FA2DetermineCtaTileQ` of utils.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.engine.checkpoint.model_config import ModelConfig

GRAPH_WORKSPACE_BYTES = 2**20  # a plan of thousands of rows; FlashInfer raises if it should not be enough
PREFILL_WORKSPACE_BYTES = 8 * 2**20  # FlashInfer's own choice
CUDA_CORE_GROUP_MAX = 3  # query heads a key-value head; with more of them tensor cores are the faster ones
_DECODE_BLOCKS_MAX = 16  # of 128 threads, that run at once on a multiprocessor of 2,048
_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Processors:
    """What a plan's size depends on beside the model."""

    count: int  # multiprocessors
    major: int  # of the compute capability

    @staticmethod
    def of(device: torch.device) -> Processors:
        """Processors of a GPU; a CPU, in tests, counts as one of Ampere's."""
        if device.type != "cuda":
            return Processors(count=1, major=8)
        found = torch.cuda.get_device_properties(device)
        return Processors(found.multi_processor_count, found.major)


def workspace_bytes(config: ModelConfig, requests: int, processors: Processors) -> int:
    """Memory of the GPU that plans and kernels take for steps of so many requests."""
    plans = len(set(config.windows)) * (2 * GRAPH_WORKSPACE_BYTES + PREFILL_WORKSPACE_BYTES)
    return float_workspace_bytes(config, requests, processors) + plans


def float_workspace_bytes(config: ModelConfig, requests: int, processors: Processors) -> int:
    """The most that partial results of split keys take in one kernel; kernels follow each other and share it.

    A block has rows of queries, a tile of them on tensor cores, and leaves a float for each dimension of a row and one
    for its sum. Keys are split where no more blocks come of it than the GPU runs at once, but a graph's DECODE has a
    tile for every request.
    """
    group = config.heads // config.kv_heads
    at_once = 2 * processors.count // config.kv_heads
    rows = at_once * _extend_tile(config.head_dim)
    if group > CUDA_CORE_GROUP_MAX:
        tile = _decode_tile(group, config.head_dim, processors)
        rows = max(rows, tile * max(at_once, -(-requests * group // tile) + requests - 1))
    else:
        rows = max(rows, _DECODE_BLOCKS_MAX * processors.count // config.kv_heads)
    return config.heads * rows * (config.head_dim + 1) * 4 + _ALIGNMENT_BYTES


def _extend_tile(head_dim: int) -> int:
    return 128 if head_dim < 256 else 64


def _decode_tile(group: int, head_dim: int, processors: Processors) -> int:
    if group > 64:
        return _extend_tile(head_dim)
    return 16 if group <= 16 and processors.major >= 8 else 64
