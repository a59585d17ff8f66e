"""What a device is built of, for a whole model or a rank's share of it: planned memory, weights and pages."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.engine.checkpoint.dtypes import Dtypes, dtypes_on_cuda, preferred_dtype
from shared.engine.checkpoint.kv_cache import KVCache, PageCounts, layout_on_cuda
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.config import EngineConfig
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.memory import FittedPool, graph_tokens, room_for
from shared.engine.cuda.platform import Platform, cuda_platform, host_platform, use_gpu_of
from shared.engine.model.loading import load_decoder
from shared.engine.model.weights import OnProgress
from shared.engine.parallel.collectives import ALONE, require_same_bits
from shared.engine.parallel.meeting import meet
from shared.engine.parallel.shares import ModelShare, Share
from shared.engine.quantized.weight_source import WeightSource
from shared.engine.sampling.logprobs import SCORES_A_RUN
from shared.kv.page_pool import pages_for_tokens


def platform_for(config: EngineConfig, share: Share, meeting: Path | None) -> Platform:
    """What a rank computes on; of several ones waits for the others, which meet in this file."""
    if config.device == "cuda-on-cpu":
        collectives = meet(meeting, share, on_gpus=False) if meeting else ALONE
        return host_platform(max(1, config.threads // share.ranks), collectives)
    if meeting is None:
        return cuda_platform(config.deterministic)
    use_gpu_of(share, deterministic=config.deterministic)
    return cuda_platform(config.deterministic, meet(meeting, share, on_gpus=True))


def dtypes_for(platform: Platform, config: EngineConfig, shape: ModelConfig, stored: torch.dtype) -> Dtypes:
    """The types of weights and pages. Raises `ConfigError` for what kernels do not support."""
    dtypes = dtypes_on_cuda(
        config.dtype,
        config.kv_cache_dtype,
        stored=preferred_dtype(stored, shape.quantization),
        capability=platform.capability,
    )
    platform.check(ModelShare(shape, platform.ops.share).config, dtypes)
    return dtypes


def assemble_parts(
    platform: Platform,
    shape: ModelConfig,
    weights: WeightSource,
    dtypes: Dtypes,
    config: EngineConfig,
    on_progress: OnProgress = lambda _what, _share: None,
) -> tuple[EngineParts, Capacity, FittedPool]:
    """Build them; of several ranks all at once."""
    own = ModelShare(shape, platform.ops.share).config
    room = room_for(own, dtypes, config, platform.memory, platform.collectives)
    if platform.collectives.share.ranks > 1:
        require_same_bits(platform.collectives, platform.device, dtypes.weights)
    layout = layout_on_cuda(config.kv_layout, platform.ops.share.ranks)
    cache = KVCache(
        own,
        PageCounts(room.pages, room.host_pages, known=1, padding=1),
        page_size=config.page_size,
        dtype=dtypes.kv,
        layout=layout,
        device=str(platform.device),
    )
    with torch.inference_mode():
        model = load_decoder(
            shape,
            weights,
            platform.ops,
            context_len=room.context_len,
            dtype=dtypes.weights,
            on_progress=on_progress,
        )
    parts = EngineParts(
        platform.forward,
        platform.copies,
        model,
        platform.attention(own, cache, config.slots, dtypes.weights),
        platform.kernels,
        platform.ops,
        cache,
    )
    width = pages_for_tokens(room.context_len, config.page_size)
    # as many logits as a DECODE step has: memory is set apart for them
    scores_a_run = max(SCORES_A_RUN, config.slots)
    by_graph = graph_tokens(shape, platform.graph_tokens)
    capacity = Capacity(config.slots, width, config.extend_tokens, shape.vocab_size, scores_a_run, by_graph)
    return parts, capacity, room
