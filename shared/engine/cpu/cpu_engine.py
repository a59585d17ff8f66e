"""The engine on CPU: compiled kernels or plain torch, with the same bits for a request in any batch."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.engine.checkpoint.dtypes import dtype_name, dtypes_on_cpu
from shared.engine.checkpoint.fallback_config import FallbackConfig, ModelImpl, read_config
from shared.engine.checkpoint.kv_cache import KVCache, kv_format, page_bytes
from shared.engine.checkpoint.memory_plan import Demand, choose_pages, context_bound
from shared.engine.checkpoint.model_config import ModelConfig, read_eos_token_ids
from shared.engine.cpu.blocked import BlockedAttention
from shared.engine.cpu.kernel_choice import KernelChoice, choose_kernels, transformers_choice
from shared.engine.cpu.native_decoder import NativeDecoder
from shared.engine.cpu.torch_device import Model, OnLogits, TorchDevice
from shared.engine.gguf.packing import PackedFile
from shared.engine.model.decoder import DecoderModel
from shared.engine.model.linear import PackedLinear
from shared.engine.model.torch_ops import TorchOps
from shared.engine.model.weights import OnProgress, Weights, model_fingerprint
from shared.engine.native.kernels import Kernels
from shared.engine.parts import Engine, Sizes, features_with
from shared.engine.sampling.constraints import Constraints
from shared.engine.sampling.grammars import Grammars, read_grammars
from shared.engine.sampling.logprobs import LogprobRows
from shared.engine.sampling.sampler import Sampler
from shared.engine.transformers.fallback import FallbackModel
from shared.grammar.limits import library_version
from shared.kv.page_pool import pages_for_tokens
from shared.wire.messages import Limits


def load_on_cpu(
    folder: Path,
    sizes: Sizes,
    *,
    model_impl: ModelImpl,
    dtype: str,
    kv_cache_dtype: str,
    kernels: str,
    kernels_folder: str,
    threads: int,
    on_progress: OnProgress,
    on_logits: OnLogits | None,
) -> Engine:
    """Load the folder; see `shared.engine.engine.load`.

    `dtype` auto: a GGUF file's own blocks where the folder has them and the kernels read them, else as
    `dtypes_on_cpu` says.
    """
    blocks = PackedFile.open(folder)
    dtypes = dtypes_on_cpu(dtype, kv_cache_dtype, blocks=blocks is not None)
    config = read_config(folder, model_impl)
    if isinstance(config, FallbackConfig):
        chosen = transformers_choice()
    else:
        config = config.at_context(context_bound(config, sizes.context_len)[0])
        chosen = choose_kernels(kernels, kernels_folder, lambda: on_progress("compiling kernels", 0.0))
    packed = blocks if dtype == "auto" and chosen.library else None
    weights_bytes = _weights_bytes(config, packed, dtypes.weights)
    cache, context, described = _make_cache(config, dtypes.kv, weights_bytes, sizes)
    eos_token_ids = read_eos_token_ids(folder)
    limits = Limits(context, sizes.page_size, cache.pages, sizes.slots, config.vocab_size)
    model = _load_model(folder, config, cache, chosen, packed, context, threads, on_progress)
    kinds, kv = _weight_kinds(config, packed, dtypes.weights), dtype_name(dtypes.kv)
    on = f"{chosen.description}, {threads} {'thread' if threads == 1 else 'threads'}"
    grammars = read_grammars(folder, config.vocab_size, eos_token_ids)
    return Engine(
        device=_start(model, cache, limits, eos_token_ids, threads, on_logits, grammars, chosen.library),
        cache=cache,
        config=config,
        limits=limits,
        model_fingerprint=model_fingerprint(folder, config, dtypes.weights),
        kv_format=kv_format(config, sizes.page_size, dtypes.kv),
        determinism=f"{chosen.determinism},{dtype_name(dtypes.weights)},kv-{kv},{library_version()}",
        eos_token_ids=eos_token_ids,
        host_pages=cache.host_pages,
        grammars=grammars,
        features=features_with(grammars),
        memory={
            "weights": weights_bytes,
            "kv": cache.nbytes,
            "host_kv": cache.host_pages * cache.page_bytes,
        },
        description=f"{config.architecture} on cpu, weights {kinds}, KV {kv}, {on}, {described}",
    )


def _make_cache(
    config: ModelConfig | FallbackConfig, dtype: torch.dtype, weights_bytes: int, sizes: Sizes
) -> tuple[KVCache, int, str]:
    """The cache that memory allows, the context it holds, and both in words."""
    most, most_reason = context_bound(config, sizes.context_len)
    page_size, slots = sizes.page_size, sizes.slots
    one_page = page_bytes(config, page_size, dtype)
    demand = Demand(
        weights_bytes, one_page, page_size, sizes.host_fraction, slots, most, sizes.max_total_tokens
    )
    count, reason = choose_pages(demand, sizes.budget, sizes.pages)
    context = min(most, count * page_size)
    context_reason = most_reason if context == most else "all that the pages hold"
    host_pages = int(count * sizes.host_fraction)
    cache = KVCache(
        config,
        pages=count,
        page_size=page_size,
        host_pages=host_pages,
        known_pages=1,
        dtype=dtype,
    )
    words = f"{count} KV pages of {page_size} tokens ({reason}), context {context} tokens ({context_reason})"
    return cache, context, f"{words}, {slots} slots"


def _start(
    model: Model,
    cache: KVCache,
    limits: Limits,
    eos_token_ids: frozenset[int],
    threads: int,
    on_logits: OnLogits | None,
    grammars: Grammars | None,
    kernels: Kernels | None,
) -> TorchDevice:
    return TorchDevice(
        model,
        cache,
        Sampler(
            slots=limits.slots,
            vocab_size=limits.vocab_size,
            eos_token_ids=eos_token_ids,
            constraints=Constraints(grammars, limits.vocab_size),
        ),
        slots=limits.slots,
        pages_per_slot=pages_for_tokens(limits.context_len, limits.page_size),
        threads=threads,
        logprobs=LogprobRows(limits.slots, kernels),
        on_logits=on_logits,
    )


def _load_model(
    folder: Path,
    config: ModelConfig | FallbackConfig,
    cache: KVCache,
    chosen: KernelChoice,
    packed: PackedFile | None,
    context_len: int,
    threads: int,
    on_progress: OnProgress,
) -> Model:
    """Read the weights for the chosen kernels. Quantized blocks give the same bits as the float weights beside them."""
    torch.set_num_threads(threads)
    if isinstance(config, FallbackConfig):
        return FallbackModel(folder, config, cache, on_progress)
    with Weights(folder) as weights, torch.inference_mode():
        if chosen.library is None:
            return DecoderModel(
                config,
                weights,
                TorchOps(PackedLinear),
                context_len=context_len,
                dtype=torch.float32,
                attention=BlockedAttention(config, cache),
                on_progress=on_progress,
            )
        return NativeDecoder(
            chosen.library,
            config,
            cache,
            weights,
            packed,
            context_len=context_len,
            threads=threads,
            on_progress=on_progress,
        )


def _weights_bytes(
    config: ModelConfig | FallbackConfig, packed: PackedFile | None, dtype: torch.dtype
) -> int:
    """Packed weights are mapped from their file; the others are kept as floats."""
    loose = config.parameters - (packed.parameters if packed else 0)
    return (packed.nbytes if packed else 0) + max(0, loose) * dtype.itemsize


def _weight_kinds(config: ModelConfig | FallbackConfig, packed: PackedFile | None, dtype: torch.dtype) -> str:
    if packed is None or isinstance(config, FallbackConfig):
        return dtype_name(dtype)
    whole = packed.matrices == config.matrices
    return packed.kinds if whole else f"{packed.kinds}+{dtype_name(dtype)}"
