"""Puts the CUDA engine together: memory, weights, graphs, and the sentence that says what was chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.engine.checkpoint.dtypes import Dtypes, dtype_name, dtypes_on_cuda, preferred_dtype
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts, kv_format
from shared.engine.checkpoint.model_config import ModelConfig, read_eos_token_ids
from shared.engine.config import EngineConfig
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.memory import FittedPool, graph_tokens, room_for
from shared.engine.cuda.platform import Platform
from shared.engine.first_logits import require_numbers
from shared.engine.model.loading import load_decoder
from shared.engine.model.weights import OnProgress, Weights, model_fingerprint, stored_dtype
from shared.engine.parallel.collectives import require_same_bits
from shared.engine.parallel.shares import ModelShare
from shared.engine.parts import Engine, LoadJob, OnLogits, features_with
from shared.engine.sampling.grammars import read_grammars
from shared.engine.sampling.logprobs import SCORES_A_RUN
from shared.engine.sampling.masks import Matchers
from shared.engine.weight_source import WeightSource
from shared.grammar.limits import library_version
from shared.kv.page_pool import pages_for_tokens
from shared.wire.messages import Limits


@dataclass(frozen=True, slots=True)
class DecoderSource:
    """A decoder that is to be built, with weights from anywhere."""

    shape: ModelConfig
    weights: WeightSource
    dtypes: Dtypes
    eos_token_ids: frozenset[int]
    matchers: Matchers | None = None


def load_on(platform: Platform, job: LoadJob) -> Engine:
    """Load the folder; see `shared.engine.engine.load`. What does not fit or is not supported is refused before."""
    folder, config, shape = job.folder, job.config, job.shape
    assert isinstance(shape, ModelConfig)
    dtypes = dtypes_on_cuda(
        config.dtype,
        config.kv_cache_dtype,
        stored=preferred_dtype(stored_dtype(folder), shape.quantization),
        capability=platform.capability,
    )
    platform.check(ModelShare(shape, platform.ops.share).config, dtypes)
    eos_token_ids = read_eos_token_ids(folder)
    grammars = read_grammars(folder, shape.vocab_size, eos_token_ids)
    with Weights(folder, str(platform.device)) as weights:
        source = DecoderSource(shape, weights, dtypes, eos_token_ids, grammars)
        device, cache, room = assemble(
            platform, source, config, on_progress=job.on_progress, on_logits=job.on_logits
        )
    require_numbers(device.sum_of_first_logits)
    kinds = f"{_weight_kinds(platform, source)},kv-{dtype_name(dtypes.kv)}"
    return Engine(
        device=device,
        cache=cache,
        config=shape,
        limits=Limits(
            room.context_len,
            config.page_size,
            room.pages,
            config.slots,
            shape.vocab_size,
            config.extend_tokens,
        ),
        model_fingerprint=model_fingerprint(folder, shape.canonical, dtypes.weights),
        kv_format=kv_format(shape, config.page_size, dtypes.kv, cache.layout),
        dtype=dtype_name(dtypes.weights),
        determinism=f"{platform.determinism},{kinds},{library_version()}",
        eos_token_ids=eos_token_ids,
        host_pages=room.host_pages,
        grammars=grammars,
        features=features_with(grammars),
        memory=room.memory,
        description=_describe(platform, source, config, room),
    )


def assemble(
    platform: Platform,
    source: DecoderSource,
    config: EngineConfig,
    *,
    on_progress: OnProgress = lambda _what, _share: None,
    on_logits: OnLogits | None = None,
) -> tuple[CudaDevice, KVCache, FittedPool]:
    """A device for this decoder, or for a rank's share of it, that has captured its graphs."""
    shape, dtypes = source.shape, source.dtypes
    own = ModelShare(shape, platform.ops.share).config
    room = room_for(own, dtypes, config, platform.memory, platform.collectives)
    if platform.collectives.share.ranks > 1:
        require_same_bits(platform.collectives, platform.device, dtypes.weights)
    cache = KVCache(
        own,
        PageCounts(room.pages, room.host_pages, known=1, padding=1),
        page_size=config.page_size,
        dtype=dtypes.kv,
        layout=KVLayout.KEYS_BY_TOKEN,
        device=str(platform.device),
    )
    with torch.inference_mode():
        model = load_decoder(
            shape,
            source.weights,
            platform.ops,
            context_len=room.context_len,
            dtype=dtypes.weights,
            on_progress=on_progress,
        )
    on_progress("capturing graphs", 0.0)
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
    device = CudaDevice(parts, capacity, source.eos_token_ids, matchers=source.matchers, on_logits=on_logits)
    return device, cache, room


def _describe(platform: Platform, source: DecoderSource, config: EngineConfig, room: FittedPool) -> str:
    dtypes = source.dtypes
    types = f"weights {_weight_kinds(platform, source)}, KV {dtype_name(dtypes.kv)}"
    return (
        f"{source.shape.architecture} on {platform.description}, {types}, {room.words}, {config.slots} slots"
    )


def _weight_kinds(platform: Platform, source: DecoderSource) -> str:
    name, quantization = dtype_name(source.dtypes.weights), source.shape.quantization
    shape = source.shape
    experts = (
        f", experts in {shape.packed_experts or name}"
        if shape.in_mxfp4 or (quantization and shape.has_experts)
        else ""
    )
    return name + (f" and {platform.narrow.way(quantization.format)}" if quantization else "") + experts
