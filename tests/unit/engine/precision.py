"""How near a model in a narrow type comes to float32, beside transformers in the same type: on any device.

The reference is transformers in float32, but with weights rounded to the narrow type: what remains is the error of the
arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from shared.engine.attention.protocol import PagedBatch, PlannedAttention
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts
from shared.engine.checkpoint.model_config import ModelConfig, read_model_config
from shared.engine.model.loading import load_decoder
from shared.engine.model.ops import Ops
from shared.engine.model.weights import Weights

PAGE_SIZE = 16
Plan = Callable[[PagedBatch, PagedBatch], PlannedAttention]  # the same batch on the host and on the device


def plan_by_reference(config: ModelConfig, cache: KVCache) -> Plan:
    """Attention in plain torch."""
    return lambda _host, device: ReferenceAttention(config, cache).plan(device)


def logits_of(
    folder: Path,
    token_ids: Sequence[int],
    steps: Sequence[int],
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    plan_with: Callable[[ModelConfig, KVCache], Plan] = plan_by_reference,
) -> Tensor:
    """Logits after every token, float32 [tokens, vocab]: one request, computed in `steps` of so many tokens."""
    assert sum(steps) == len(token_ids)
    config = read_model_config(folder)
    config = config.at_context(config.context_len)
    pages = -(-len(token_ids) // PAGE_SIZE)
    cache = KVCache(
        config,
        PageCounts(pages),
        page_size=PAGE_SIZE,
        dtype=dtype,
        layout=KVLayout.KEYS_BY_TOKEN,
        device=device,
    )
    with Weights(folder, device) as weights:
        model = load_decoder(config, weights, ops, context_len=config.context_len, dtype=dtype)
    plan, table = plan_with(config, cache), torch.arange(pages, dtype=torch.int32).flip(0).unsqueeze(0)
    ids, done, logits = torch.tensor(token_ids, dtype=torch.int32, device=device), 0, []
    with torch.inference_mode():
        for step in steps:
            host = PagedBatch.of(torch.tensor([step]), torch.tensor([done + step]), table, PAGE_SIZE)
            batch = moved(host, device)
            logits.append(model.run(ids[done : done + step], plan(host, batch), None))
            done += step
    return torch.cat(logits)


def errors(
    folder: Path, token_ids: Sequence[int], found: Tensor, dtype: torch.dtype, device: str = "cpu"
) -> tuple[float, float]:
    """How far `found` and transformers in `dtype` are from transformers in float32: root mean squares."""
    ours, theirs = token_errors(folder, token_ids, found, dtype, device)
    return float(ours.square().mean().sqrt()), float(theirs.square().mean().sqrt())


def token_errors(
    folder: Path, token_ids: Sequence[int], found: Tensor, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """As `errors`, but of each token, [tokens]."""
    ids = torch.tensor([token_ids], device=device)
    narrow, wide = (_transformers(folder, each, device) for each in (dtype, torch.float32))
    with torch.inference_mode():
        for parameter in wide.parameters():
            parameter.copy_(parameter.to(dtype))
        exact = wide(ids).logits[0]
        beside = narrow(ids).logits[0].float()
    ours, theirs = ((each - exact).square().mean(-1).sqrt() for each in (found, beside))
    return ours, theirs


def _transformers(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return cast(PreTrainedModel, model.to(device))


def moved(batch: PagedBatch, device: str) -> PagedBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved: dict[str, Any] = {
        name: each.to(device) for name, each in values.items() if isinstance(each, Tensor)
    }
    return replace(batch, **moved)
