"""The engine on CPU: compiled kernels or plain torch, with the same bits for a request in any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from shared.engine.checkpoint.dtypes import dtype_name, dtypes_on_cpu
from shared.engine.checkpoint.kv_cache import KVCache, PageCounts, kv_format, page_bytes
from shared.engine.checkpoint.memory_plan import RESERVE_BYTES, Demand, choose_pages, context_bound
from shared.engine.checkpoint.model_config import ModelConfig, read_eos_token_ids
from shared.engine.checkpoint.transformers_config import FallbackConfig
from shared.engine.config import EngineConfig
from shared.engine.cpu.blocked import BlockedAttention
from shared.engine.cpu.kept_weights import kept_weights
from shared.engine.cpu.kernel_choice import KernelChoice
from shared.engine.cpu.native_decoder import NativeDecoder
from shared.engine.cpu.native_weights import StoredWeights
from shared.engine.cpu.torch_device import Model, TokenSampling, TorchDevice
from shared.engine.gguf.packed_file import PackedFile
from shared.engine.model.decoder import PlanningDecoder
from shared.engine.model.fallback import FallbackModel
from shared.engine.model.first_logits import require_first_logits
from shared.engine.model.loading import load_decoder
from shared.engine.model.torch_ops import PackedLinear, TorchOps
from shared.engine.model.weights import Weights, model_fingerprint
from shared.engine.native.kernels import Kernels
from shared.engine.parts import Engine, LoadJob, features_with
from shared.engine.quantized.linears import dequantized
from shared.engine.sampling.grammars import read_grammars
from shared.engine.sampling.logprobs import LogprobRows
from shared.engine.sampling.masks import Constraints
from shared.engine.sampling.sampler import Sampler
from shared.kv.page_pool import pages_for_tokens
from shared.limits.grammars import library_version
from shared.wire.messages import Limits

EXPERT_ROWS_MAX = 1024  # of a round: ROWS_MAX of native/experts.cpp
FLOAT_BYTES = 4

# the last: tokens of context
LoadModel = Callable[[LoadJob, Kernels | None, PackedFile | None, KVCache, int], Model]


def load_on_cpu(load_model: LoadModel, job: LoadJob, kernels: KernelChoice) -> Engine:
    """Load the folder; see `shared.engine.engine.load`.

    `dtype` auto: a GGUF file's own blocks where the folder has them and the kernels read them, else as
    `dtypes_on_cpu` says.
    """
    folder, config, shape = job.folder, job.config, job.shape
    blocks = PackedFile.open(folder)
    dtypes = dtypes_on_cpu(config.dtype, config.kv_cache_dtype, blocks=blocks is not None)
    packed = blocks if config.dtype == "auto" and kernels.library else None
    kept = kept_weights(job, dtypes.weights, packed, compiled=kernels.library is not None)
    cache, context, described = _make_cache(shape, dtypes.kv, kept.nbytes, config)
    eos_token_ids = read_eos_token_ids(folder)
    limits = Limits(
        context, config.page_size, cache.pages, config.slots, shape.vocab_size, config.extend_tokens
    )
    torch.set_num_threads(config.threads)
    model = load_model(job, kernels.library, packed, cache, context)
    require_first_logits(model.forward, cache.page_size)
    kv = dtype_name(dtypes.kv)
    on = f"{kernels.description}, {config.threads} {'thread' if config.threads == 1 else 'threads'}"
    grammars = read_grammars(folder, shape.vocab_size, eos_token_ids)
    sampling = TokenSampling(
        Sampler(
            slots=limits.slots,
            vocab_size=limits.vocab_size,
            eos_token_ids=eos_token_ids,
            constraints=Constraints(grammars, limits.vocab_size),
        ),
        LogprobRows(limits.slots, kernels.library),
        job.on_logits,
    )
    return Engine(
        device=TorchDevice(
            model,
            cache,
            sampling,
            slots=limits.slots,
            pages_per_slot=pages_for_tokens(limits.context_len, limits.page_size),
            threads=config.threads,
        ),
        cache=cache,
        config=shape,
        limits=limits,
        model_fingerprint=model_fingerprint(folder, shape.canonical, dtypes.weights),
        kv_format=kv_format(shape, config.page_size, dtypes.kv),
        dtype=dtype_name(dtypes.weights),
        determinism=f"{kernels.determinism},{_numbers(shape, dtypes.weights)},kv-{kv},{library_version()}",
        eos_token_ids=eos_token_ids,
        host_pages=cache.host_pages,
        grammars=grammars,
        features=features_with(grammars),
        memory={"weights": kept.nbytes, "kv": cache.nbytes, "host_kv": cache.host_pages * cache.page_bytes},
        description=f"{shape.architecture} on cpu, weights {kept.words}, KV {kv}, {on}, {described}",
    )


def compiled_decoder(
    job: LoadJob, library: Kernels | None, packed: PackedFile | None, cache: KVCache, context_len: int
) -> Model:
    """A decoder by compiled kernels. Quantized blocks give the same bits as the float weights beside them."""
    assert library is not None
    assert isinstance(job.shape, ModelConfig)
    with Weights(job.folder) as weights, torch.inference_mode():
        floats = dequantized(weights, job.shape.quantization)
        return NativeDecoder(
            library,
            StoredWeights(replace(job.shape, quantization=None), floats, packed),
            cache,
            context_len=context_len,
            threads=job.config.threads,
            on_progress=job.on_progress,
        )


def blocked_decoder(
    job: LoadJob, _library: Kernels | None, _packed: PackedFile | None, cache: KVCache, context_len: int
) -> Model:
    """A decoder by torch."""
    assert isinstance(job.shape, ModelConfig)
    attention = BlockedAttention(job.shape, cache)
    with Weights(job.folder) as weights, torch.inference_mode():
        decoder = load_decoder(
            replace(job.shape, quantization=None),
            dequantized(weights, job.shape.quantization),
            TorchOps(PackedLinear),
            context_len=context_len,
            dtype=torch.float32,
            on_progress=job.on_progress,
        )
    return PlanningDecoder(decoder, attention)


def transformers_model(
    job: LoadJob, _library: Kernels | None, _packed: PackedFile | None, cache: KVCache, _context_len: int
) -> Model:
    """A model by transformers' own code."""
    assert isinstance(job.shape, FallbackConfig)
    return FallbackModel(job.folder, job.shape, cache, job.on_progress)


def _make_cache(
    shape: ModelConfig | FallbackConfig, dtype: torch.dtype, weights_bytes: int, config: EngineConfig
) -> tuple[KVCache, int, str]:
    """The cache that memory allows, the context it holds, and both in words."""
    most, most_reason = context_bound(shape, config.context_len)
    page_size, slots = config.page_size, config.slots
    one_page = page_bytes(shape, page_size, dtype)
    demand = Demand(
        weights_bytes,
        one_page,
        page_size,
        config.host_fraction,
        slots,
        most,
        config.max_total_tokens,
        RESERVE_BYTES + expert_rows_bytes(shape),
    )
    count, reason = choose_pages(demand, config.budget, config.pages)
    context = min(most, count * page_size)
    context_reason = most_reason if context == most else "all that the pages hold"
    pages = PageCounts(count, host=int(count * config.host_fraction), known=1)
    cache = KVCache(shape, pages, page_size=page_size, dtype=dtype)
    words = f"{count} KV pages of {page_size} tokens ({reason}), context {context} tokens ({context_reason})"
    return cache, context, f"{words}, {slots} slots"


def expert_rows_bytes(shape: ModelConfig | FallbackConfig) -> int:
    """Bytes that a CPU keeps between steps for the inputs, gates and outputs of one round of rows' experts."""
    if not isinstance(shape, ModelConfig):
        return 0
    numbers = (
        each.routing.experts + each.routing.chosen * 2 * (shape.hidden_size + each.inner)
        for each in shape.experts
        if each is not None
    )
    return EXPERT_ROWS_MAX * FLOAT_BYTES * max(numbers, default=0)


def _numbers(shape: ModelConfig | FallbackConfig, dtype: torch.dtype) -> str:
    """What is computed with, whoever packs it: a GGUF file's blocks give the bits of its floats."""
    quantization = shape.quantization if isinstance(shape, ModelConfig) else None
    return dtype_name(dtype) if quantization is None else f"{dtype_name(dtype)} of {quantization.format.name}"
