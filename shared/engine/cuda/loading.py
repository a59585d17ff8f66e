"""Puts the CUDA engine together: memory, weights, graphs, and the sentence that says what was chosen."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.engine.checkpoint.dtypes import Dtypes, dtype_name, dtypes_on_cuda
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, kv_format
from shared.engine.checkpoint.memory_plan import context_bound
from shared.engine.checkpoint.model_config import ModelConfig, read_eos_token_ids, read_model_config
from shared.engine.cpu.torch_device import OnLogits
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.memory import FittedPool, room_for
from shared.engine.cuda.platform import Platform
from shared.engine.model.decoder import DecoderModel
from shared.engine.model.weights import OnProgress, Weights, WeightSource, model_fingerprint, stored_dtype
from shared.engine.parts import Engine, Sizes, features_with
from shared.engine.sampling.constraints import Matchers
from shared.engine.sampling.grammars import read_grammars
from shared.engine.sampling.scored_runs import SCORES_A_RUN
from shared.grammar.limits import library_version
from shared.kv.page_pool import pages_for_tokens
from shared.wire.messages import Limits


def load_on(
    platform: Platform,
    folder: Path,
    sizes: Sizes,
    *,
    dtype: str,
    kv_cache_dtype: str,
    on_progress: OnProgress,
    on_logits: OnLogits | None,
) -> Engine:
    """Load the folder; see `shared.engine.engine.load`. What does not fit or is not supported is refused before."""
    config = read_model_config(folder)
    config = config.at_context(context_bound(config, sizes.context_len)[0])
    dtypes = dtypes_on_cuda(
        dtype, kv_cache_dtype, stored=stored_dtype(folder), capability=platform.capability
    )
    platform.check(config, dtypes)
    eos_token_ids = read_eos_token_ids(folder)
    grammars = read_grammars(folder, config.vocab_size, eos_token_ids)
    with Weights(folder, str(platform.device)) as weights:
        device, cache, room = assemble(
            platform,
            config,
            weights,
            dtypes,
            sizes,
            eos_token_ids,
            matchers=grammars,
            on_progress=on_progress,
            on_logits=on_logits,
        )
    kinds = f"{dtype_name(dtypes.weights)},kv-{dtype_name(dtypes.kv)}"
    return Engine(
        device=device,
        cache=cache,
        config=config,
        limits=Limits(room.context_len, sizes.page_size, room.pages, sizes.slots, config.vocab_size),
        model_fingerprint=model_fingerprint(folder, config, dtypes.weights),
        kv_format=kv_format(config, sizes.page_size, dtypes.kv, cache.layout),
        determinism=f"{platform.determinism},{kinds},{library_version()}",
        eos_token_ids=eos_token_ids,
        host_pages=room.host_pages,
        grammars=grammars,
        features=features_with(grammars),
        memory=room.memory,
        description=_describe(platform, config, dtypes, sizes, room),
    )


def assemble(
    platform: Platform,
    config: ModelConfig,
    weights: WeightSource,
    dtypes: Dtypes,
    sizes: Sizes,
    eos_token_ids: frozenset[int],
    *,
    matchers: Matchers | None = None,
    on_progress: OnProgress = lambda _what, _share: None,
    on_logits: OnLogits | None = None,
) -> tuple[CudaDevice, KVCache, FittedPool]:
    """A device for this model, with weights from anywhere, that has captured its graphs."""
    room = room_for(config, dtypes, sizes, platform.memory)
    cache = KVCache(
        config,
        pages=room.pages,
        page_size=sizes.page_size,
        host_pages=room.host_pages,
        known_pages=1,
        padding_pages=1,
        dtype=dtypes.kv,
        layout=KVLayout.KEYS_BY_TOKEN,
        device=str(platform.device),
    )
    with torch.inference_mode():
        model = DecoderModel(
            config,
            weights,
            platform.ops,
            context_len=room.context_len,
            dtype=dtypes.weights,
            device=str(platform.device),
            on_progress=on_progress,
        )
    on_progress("capturing graphs", 0.0)
    attention = platform.attention(config, cache, sizes.slots)
    parts = EngineParts(model.run, attention, platform.kernels, platform.ops, cache)
    width = pages_for_tokens(room.context_len, sizes.page_size)
    scores_a_run = max(
        SCORES_A_RUN, sizes.slots
    )  # as many logits as a DECODE step has: memory is set apart for them
    capacity = Capacity(sizes.slots, width, sizes.extend_tokens, config.vocab_size, scores_a_run)
    device = CudaDevice(
        parts,
        capacity,
        platform.forward,
        platform.copies,
        eos_token_ids,
        matchers=matchers,
        on_logits=on_logits,
    )
    return device, cache, room


def _describe(platform: Platform, config: ModelConfig, dtypes: Dtypes, sizes: Sizes, room: FittedPool) -> str:
    types = f"weights {dtype_name(dtypes.weights)}, KV {dtype_name(dtypes.kv)}"
    return f"{config.architecture} on {platform.description}, {types}, {room.words}, {sizes.slots} slots"
