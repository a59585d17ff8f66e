"""Loads a model folder into everything a worker needs: weights, cache, attention, sampler, device.

The one place that knows which parts belong together. A worker uses the result through `Device`, `Limits` and the
fingerprints of its `Hello`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.baton import NUMBERS_MAX
from shared.engine.attention.blocked import BlockedAttention
from shared.engine.dense.decoder import DecoderModel
from shared.engine.dense.linear import PackedLinear
from shared.engine.dense.weights import OnProgress, Weights, model_fingerprint
from shared.engine.gguf.packing import PackedFile
from shared.engine.kv_cache import KVCache, kv_format, page_bytes
from shared.engine.memory_plan import UNBOUNDED, Budget, Demand, choose_pages
from shared.engine.model_config import ModelConfig, read_eos_token_ids, read_model_config
from shared.engine.native.choice import KernelChoice, choose_kernels
from shared.engine.native.decoder import NativeDecoder
from shared.engine.sampler import Sampler
from shared.engine.torch_device import Model, OnLogits, TorchDevice
from shared.engine.torch_ops import TorchOps
from shared.errors import ConfigError
from shared.kv.page_pool import pages_for_tokens
from shared.messages import Limits

_DTYPES = {"auto": torch.float32, "float32": torch.float32}
_KV_DTYPES = {  # by whether the model is one of blocks
    blocks: {"auto": auto, "float32": torch.float32, "float16": torch.float16}
    for blocks, auto in ((False, torch.float32), (True, torch.float16))
}


@dataclass(frozen=True)
class Sizes:
    """How much a worker holds. None: chosen by what memory allows, and explained in `Engine.description`."""

    pages: int | None
    page_size: int  # tokens
    slots: int
    max_total_tokens: int = 0  # what pages are chosen for; 0: no bound
    host_fraction: float = 0.0  # pages in host memory for each page of the pool
    context_len: int | None = None  # tokens
    budget: Budget = UNBOUNDED


@dataclass(frozen=True)
class Engine:
    """A loaded model, ready for steps."""

    device: TorchDevice
    cache: KVCache
    config: ModelConfig
    limits: Limits
    model_fingerprint: str
    kv_format: str
    determinism: str
    eos_token_ids: frozenset[int]
    host_pages: int
    description: str  # device, dtype, pages and context, and the reason for each


def load(
    folder: Path,
    sizes: Sizes,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    kernels: str = "auto",
    kernels_folder: str = "",
    threads: int = 1,
    on_progress: OnProgress = lambda _what, _share: None,
    on_logits: OnLogits | None = None,
) -> Engine:
    """Load the Hugging Face folder.

    `dtype` auto: a GGUF file's own blocks where the folder has them and the kernels read them, else float32.
    `kv_cache_dtype` auto: float16 for a folder with such blocks, with any kernels; else float32.

    Raises `ModelError` when the folder is at fault, `ConfigError` when a setting is.
    """
    _refuse_other_devices(device)
    blocks = PackedFile.open(folder)
    weights_dtype = _choose("dtype", dtype, _DTYPES)
    cache_dtype = _choose("kv_cache_dtype", kv_cache_dtype, _KV_DTYPES[blocks is not None])
    config = read_model_config(folder)
    chosen = choose_kernels(kernels, kernels_folder, lambda: on_progress("compiling kernels", 0.0))
    packed = blocks if dtype == "auto" and chosen.library else None
    weights_bytes = _weights_bytes(config, packed, weights_dtype)
    cache, context, described = _make_cache(config, cache_dtype, weights_bytes, sizes)
    eos_token_ids = read_eos_token_ids(folder)
    limits = Limits(context, sizes.page_size, cache.pages, sizes.slots, config.vocab_size)
    model = _load_model(folder, config, cache, chosen, packed, context, threads, on_progress)
    kinds, kv = _weight_kinds(config, packed, weights_dtype), _name(cache_dtype)
    on = f"{chosen.description}, {threads} {'thread' if threads == 1 else 'threads'}"
    return Engine(
        device=_start(model, cache, limits, eos_token_ids, threads, on_logits),
        cache=cache,
        config=config,
        limits=limits,
        model_fingerprint=model_fingerprint(folder, config, weights_dtype),
        kv_format=kv_format(config, sizes.page_size, cache_dtype),
        determinism=f"{chosen.determinism},{_name(weights_dtype)},kv-{kv}",
        eos_token_ids=eos_token_ids,
        host_pages=cache.host_pages,
        description=f"{config.architecture} on cpu, weights {kinds}, KV {kv}, {on}, {described}",
    )


def _make_cache(
    config: ModelConfig, dtype: torch.dtype, weights_bytes: int, sizes: Sizes
) -> tuple[KVCache, int, str]:
    """The cache that memory allows, the context it holds, and both in words."""
    most, most_reason = _context(config, sizes.context_len)
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
) -> TorchDevice:
    return TorchDevice(
        model,
        cache,
        Sampler(slots=limits.slots, vocab_size=limits.vocab_size, eos_token_ids=eos_token_ids),
        slots=limits.slots,
        pages_per_slot=pages_for_tokens(limits.context_len, limits.page_size),
        threads=threads,
        on_logits=on_logits,
    )


def _load_model(
    folder: Path,
    config: ModelConfig,
    cache: KVCache,
    chosen: KernelChoice,
    packed: PackedFile | None,
    context_len: int,
    threads: int,
    on_progress: OnProgress,
) -> Model:
    """Read the weights for the chosen kernels. Quantized blocks give the same bits as the float weights beside them."""
    torch.set_num_threads(threads)
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


def _refuse_other_devices(device: str) -> None:
    if device not in ("auto", "cpu"):
        raise ConfigError(f"unsupported device: {device}; supported are auto and cpu")


def _choose(setting: str, name: str, supported: Mapping[str, torch.dtype]) -> torch.dtype:
    if name not in supported:
        raise ConfigError(f"unsupported {setting}: {name}; supported are {', '.join(supported)}")
    return supported[name]


def _weights_bytes(config: ModelConfig, packed: PackedFile | None, dtype: torch.dtype) -> int:
    """Packed weights are mapped from their file; the others are kept as floats."""
    loose = config.parameters - (packed.parameters if packed else 0)
    return (packed.nbytes if packed else 0) + max(0, loose) * dtype.itemsize


def _weight_kinds(config: ModelConfig, packed: PackedFile | None, dtype: torch.dtype) -> str:
    if packed is None:
        return _name(dtype)
    whole = packed.matrices == config.matrices
    return packed.kinds if whole else f"{packed.kinds}+{_name(dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _context(config: ModelConfig, context_len: int | None) -> tuple[int, str]:
    if config.context_len <= NUMBERS_MAX:
        most, whose, why = config.context_len, "the model's", "all the model was made for"
    else:
        most, whose, why = NUMBERS_MAX, "a message's", "all that a message carries"
    if context_len is None:
        return most, why
    if not 1 <= context_len <= most:
        raise ConfigError(f"context_len must be between 1 and {whose} {most}, got {context_len}")
    return context_len, "as configured"
