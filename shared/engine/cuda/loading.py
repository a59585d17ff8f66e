"""Puts the CUDA engine together: memory, weights, graphs, and the sentence that says what was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.checkpoint.dtypes import Dtypes, dtype_name
from shared.engine.checkpoint.kv_cache import KVCache, kv_format
from shared.engine.checkpoint.model_config import ModelConfig, read_eos_token_ids
from shared.engine.config import EngineConfig
from shared.engine.cuda.assembly import assemble_parts, dtypes_for
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.memory import FittedPool
from shared.engine.cuda.platform import Platform
from shared.engine.model.first_logits import require_numbers
from shared.engine.model.weights import OnProgress, Weights, model_fingerprint, stored_dtype
from shared.engine.parallel.orders import Orders
from shared.engine.parts import Engine, LoadJob, OnLogits, features_with
from shared.engine.quantized.weight_source import WeightSource
from shared.engine.sampling.grammars import read_grammars
from shared.engine.sampling.masks import Matchers
from shared.limits.grammars import library_version
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
    dtypes = dtypes_for(platform, config, shape, stored_dtype(folder))
    eos_token_ids = read_eos_token_ids(folder)
    grammars = read_grammars(folder, shape.vocab_size, eos_token_ids)
    with Weights(folder, str(platform.device)) as weights:
        source = DecoderSource(shape, weights, dtypes, eos_token_ids, grammars)
        device, cache, room = assemble(
            platform,
            source,
            config,
            on_progress=job.on_progress,
            on_logits=job.on_logits,
            orders=job.followers.orders if job.followers else None,
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
    orders: Orders | None = None,
) -> tuple[CudaDevice, KVCache, FittedPool]:
    """A device for this decoder, or for rank 0's share of it, that has captured its graphs."""
    parts, capacity, room = assemble_parts(
        platform, source.shape, source.weights, source.dtypes, config, on_progress
    )
    on_progress("capturing graphs", 0.0)
    device = CudaDevice(
        parts,
        capacity,
        source.eos_token_ids,
        matchers=source.matchers,
        on_logits=on_logits,
        orders=orders,
    )
    return device, parts.cache, room


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
