"""Loads a model folder into everything a worker needs: weights, cache, attention, sampler, device.

The one place that knows which parts belong together. Workers see the result through `Device`, `Limits` and the
fingerprints they tell in `Hello`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from shared.baton import pages_of
from shared.engine.attention.blocked import BlockedAttention
from shared.engine.kv_cache import KVCache, kv_format, page_bytes
from shared.engine.memory import Demand, choose_pages, memory_budget
from shared.engine.model import DecoderModel
from shared.engine.model_config import ModelConfig, read_eos_token_ids, read_model_config
from shared.engine.sampler import Sampler
from shared.engine.torch_device import OnLogits, TorchDevice
from shared.engine.weights import OnProgress, Weights, model_fingerprint
from shared.errors import ConfigError
from shared.messages import Limits

KERNELS = "blocked-1"  # raised when attention, linears or sampling may round differently
_DTYPES = {"auto": torch.float32, "float32": torch.float32}


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
    description: str  # which device, dtype, pages and context, and why


def load(
    folder: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    pages: int | None = None,
    page_size: int = 16,
    slots: int = 64,
    host_share: float = 0.0,
    context_len: int | None = None,
    threads: int = 1,
    memory_bytes: int | None = None,
    on_progress: OnProgress = lambda _what, _share: None,
    on_logits: OnLogits | None = None,
) -> Engine:
    """Load the Hugging Face folder. None for `pages`, `context_len`, `memory_bytes`: chosen, see `description`.

    Raises `ModelError` for the folder's fault, `ConfigError` for a setting's.
    """
    torch_dtype = _choose(device, dtype)
    config = read_model_config(folder)
    context, context_reason = _context(config, context_len)
    demand = Demand(
        weights_bytes=config.parameters * torch_dtype.itemsize,
        page_bytes=page_bytes(config, page_size, torch_dtype),
        page_size=page_size,
        host_share=host_share,
        slots=slots,
        context_len=context,
    )
    page_count, pages_reason = choose_pages(demand, memory_budget(memory_bytes), pages)
    if page_count * page_size < context:
        context, context_reason = page_count * page_size, "all that the pages hold"
    host_pages = int(page_count * host_share)
    cache = KVCache(config, pages=page_count, page_size=page_size, host_pages=host_pages, dtype=torch_dtype)
    eos_token_ids = read_eos_token_ids(folder)
    limits = Limits(context, page_size, page_count, slots, config.vocab_size)
    dtype_name = str(torch_dtype).removeprefix("torch.")
    return Engine(
        device=_start(folder, config, cache, limits, eos_token_ids, threads, on_progress, on_logits),
        cache=cache,
        config=config,
        limits=limits,
        model_fingerprint=model_fingerprint(folder, config, torch_dtype),
        kv_format=kv_format(config, page_size, torch_dtype),
        determinism=_determinism(dtype_name),
        eos_token_ids=eos_token_ids,
        host_pages=host_pages,
        description=(
            f"{config.architecture} on cpu in {dtype_name} (the only device and dtype this version has), "
            f"{threads} {'thread' if threads == 1 else 'threads'}, {page_count} KV pages of {page_size} tokens "
            f"({pages_reason}), context {context} tokens ({context_reason}), {slots} slots"
        ),
    )


def _start(
    folder: Path,
    config: ModelConfig,
    cache: KVCache,
    limits: Limits,
    eos_token_ids: frozenset[int],
    threads: int,
    on_progress: OnProgress,
    on_logits: OnLogits | None,
) -> TorchDevice:
    """Read the weights and start the forward thread."""
    attention = BlockedAttention(config, cache)
    torch.set_num_threads(threads)
    with Weights(folder) as weights, torch.inference_mode():
        model = DecoderModel(config, weights, limits.context_len, cache.store.dtype, on_progress)
    return TorchDevice(
        model,
        attention,
        cache,
        Sampler(slots=limits.slots, vocab_size=config.vocab_size, eos_token_ids=eos_token_ids),
        slots=limits.slots,
        pages_per_slot=pages_of(limits.context_len, limits.page_size),
        threads=threads,
        on_logits=on_logits,
    )


def _choose(device: str, dtype: str) -> torch.dtype:
    if device not in ("auto", "cpu"):
        raise ConfigError(f"unsupported device: {device}; supported are auto and cpu")
    if dtype not in _DTYPES:
        raise ConfigError(f"unsupported dtype: {dtype}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _context(config: ModelConfig, context_len: int | None) -> tuple[int, str]:
    if context_len is None:
        return config.context_len, "all the model was made for"
    if not 1 <= context_len <= config.context_len:
        raise ConfigError(
            f"context_len must be between 1 and the model's {config.context_len}, got {context_len}"
        )
    return context_len, "as configured"


def _determinism(dtype_name: str) -> str:
    """What may change the last bit: kernels, library, instruction set, maker of the CPU (MKL asks), dtype."""
    makers = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith(("vendor_id", "CPU implementer"))
    }
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{KERNELS},torch-{torch.__version__},{isa},{'+'.join(sorted(makers))},{dtype_name}"
