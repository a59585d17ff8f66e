"""Models that no family of the dense decoder fits, by transformers' own code over the pages of the KV cache.

transformers lets a program bring its own attention. Here it writes keys and values to pages and attends over them, so
such a model is scheduled, cached, fetched and migrated as any other. The price is in docs/decisions/0025: each step
runs transformers' Python, in float32, and a row's last bits depend on the batch, so a migrated request may differ in a
near-tie.

What a model does beside attention cannot be known from its configuration. So each is tried once when it is loaded: a
prompt in two chunks over pages, beside another request, must give the logits that the model's own attention gives.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.engine.attention.protocol import PagedBatch, soft_cap
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.transformers_config import FallbackConfig
from shared.engine.checkpoint.weight_files import weight_files
from shared.engine.model.first_logits import require_numbers
from shared.engine.model.weights import OnProgress
from shared.primitives.errors import ModelError

PROBE_TOKENS = 40
GAP_MAX = {torch.float32: 1e-3, torch.float16: 3e-2}  # of the largest logit, by the type of keys and values
_NUMBERS = itertools.count(1)
_HARMLESS = {"position_ids", "cache_position"}  # tensors that the step knows better


class FallbackModel:
    """`Model` by transformers, over a `KVCache` in host memory."""

    def __init__(self, folder: Path, config: FallbackConfig, cache: KVCache, on_progress: OnProgress) -> None:
        """Load the weights and try the model; `ModelError` if it cannot be computed over pages."""
        self.layers_done = 0
        self._config = config
        self._cache = cache
        self._step: PerRequestStep | None = None
        on_progress("loading weights", 0.0)
        self._model = _load(folder, config)
        on_progress("trying transformers' code", 0.9)
        self._name = _registered(self)
        with torch.inference_mode():
            self._try()
        on_progress("loading weights", 1.0)

    def forward(self, token_ids: Tensor, batch: PagedBatch, sampled_rows: Tensor) -> Tensor:
        """See `Model`."""
        self._step = PerRequestStep(self._cache, batch)
        logits = self._logits(token_ids, batch.positions.long(), logits_to_keep=sampled_rows)
        self._step = None
        return logits

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **wanted: Any
    ) -> tuple[Tensor, None]:
        """transformers' attention interface: q, k, v [1, heads, rows, head_dim] → [1, rows, heads, head_dim]."""
        shape = (1, self._config.kv_heads, q.shape[2], self._config.head_dim)
        if k.shape != shape or v.shape != shape or q.shape[3] != self._config.head_dim:
            raise self._refused(
                f"keys are {list(k.shape)} and values {list(v.shape)}, expected {list(shape)}"
            )
        foreign = [
            name for name, value in wanted.items() if isinstance(value, Tensor) and name not in _HARMLESS
        ]
        if mask is not None or foreign or wanted.get("is_causal") is False:
            raise self._refused(f"attention takes {', '.join(foreign) or 'a mask of its own'}")
        assert self._step is not None
        self.layers_done += 1
        scores = Scores(
            wanted.get("scaling") or self._config.head_dim**-0.5,
            wanted.get("sliding_window"),
            wanted.get("softcap"),
        )
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in (q, k, v))
        return self._step.attend(module.layer_idx, q, k, v, scores).unsqueeze(0), None

    def _logits(self, token_ids: Tensor, positions: Tensor, *, logits_to_keep: Tensor) -> Tensor:
        """float32 [rows, vocab] of the rows to keep."""
        found = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_to_keep,
        ).logits
        kept: Tensor = found[0, :, : self._config.vocab_size].float()
        return kept if len(kept) == len(logits_to_keep) else kept[logits_to_keep]  # some give all rows

    def _try(self) -> None:
        """See the module's description."""
        page_size = self._cache.page_size
        length = min(PROBE_TOKENS, (self._cache.pages - 1) * page_size, self._config.context_len)
        if length < 2:
            raise self._refused("two pages are needed to try it")
        tokens = torch.arange(1, length + 1) * 7 % self._config.vocab_size
        expected = self._by_its_own_attention(tokens)
        require_numbers(expected.sum())
        pages = torch.arange(1, self._cache.pages, dtype=torch.int32)[: -(-length // page_size)]
        before = self.layers_done
        first = length // 2
        self._run_probe(tokens[:first], [first], pages)
        found = self._run_probe(torch.cat([tokens[first:], tokens[:1]]), [length, 1], pages)
        if self.layers_done - before != 2 * self._config.layers:
            calls = (self.layers_done - before) // 2
            raise self._refused(
                f"{calls} of {self._config.layers} layers attend: the others keep a state of their own"
            )
        gap = float((found - expected).abs().max() / expected.abs().max())
        if not gap < GAP_MAX[self._cache.store.dtype]:
            raise self._refused(f"over pages its logits differ by {gap:.1e} of the largest")
        self._cache.store[: len(pages) + 1].zero_()

    def _run_probe(self, tokens: Tensor, kv_lens: list[int], pages: Tensor) -> Tensor:
        """The last row of the first request, whose rows come first; a second request is one token on page 0."""
        lens = torch.tensor(kv_lens)
        tables = torch.zeros(len(kv_lens), len(pages), dtype=torch.int32)
        tables[0] = pages
        own = len(tokens) - (len(kv_lens) - 1)
        query_lens = torch.tensor([own, 1][: len(kv_lens)])
        batch = PagedBatch.of(query_lens, lens, tables, self._cache.page_size)
        return self.forward(tokens, batch, torch.tensor([own - 1]))

    def _by_its_own_attention(self, tokens: Tensor) -> Tensor:
        self._model.set_attn_implementation("eager")
        last = torch.tensor([len(tokens) - 1])
        logits = self._logits(tokens, torch.arange(len(tokens)), logits_to_keep=last)
        self._model.set_attn_implementation(self._name)
        return logits

    def _refused(self, why: str) -> ModelError:
        return ModelError(f"transformers' {self._config.architecture} cannot be computed over pages: {why}")


def _registered(model: FallbackModel) -> str:
    """A name of transformers' attention interface for this model alone; forgotten with it."""
    from transformers import AttentionInterface

    name, reference = f"segue_pages_{next(_NUMBERS)}", weakref.WeakMethod(model.attend)

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        method = reference()
        assert method is not None, "its model calls it"
        return method(*args, **kwargs)

    AttentionInterface.register(name, attend)
    weakref.finalize(model, AttentionInterface._global_mapping.pop, name, None)
    return name


def _load(folder: Path, config: FallbackConfig) -> Any:
    """The model in float32, with all its weights; `ModelError` if one is missing or its class cannot be used."""
    import transformers
    from transformers import AutoModelForCausalLM

    weight_files(folder)
    kind = getattr(transformers, config.architecture)
    if kind._is_stateful:
        raise ModelError(f"{config.architecture} keeps a state of its own between tokens")
    if not kind._supports_attention_backend:
        raise ModelError(f"{config.architecture} does not go through transformers' attention interface")
    bars: Any = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever broken files lead to
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"transformers cannot load {folder}: {type(error).__name__}: {reason}") from None
    finally:
        if shown:
            bars.enable_progress_bar()
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"{folder} lacks {len(missing)} weights, the first is {missing[0]}")
    if misshapen := sorted(str(each) for each in found["mismatched_keys"]):
        raise ModelError(
            f"{folder} holds {len(misshapen)} weights of another shape, the first is {misshapen[0]}"
        )
    model.train(False)
    return model


# ---- attention request by request, for models that say only at each call what they want ------------------------------
# Slower than the others, in little memory: a request's keys are brought together once a layer, and its rows attend in
# blocks. A row's last bits depend on the rows beside it.


BLOCK_ROWS = 256  # of queries whose scores are in memory at a time


@dataclass(frozen=True)
class Scores:
    """What becomes of the products of queries and keys."""

    scale: float
    window: int | None = None  # tokens that a row sees, itself among them; None: all
    cap: float | None = None  # see `soft_cap`


@dataclass(frozen=True)
class _Request:
    rows: slice
    first: int  # position of the first row
    tokens: int  # in the cache
    pages: Tensor  # [pages] int64


class PerRequestStep:
    """Attention of one step."""

    def __init__(self, cache: KVCache, batch: PagedBatch) -> None:
        self._cache = cache
        self._cells = batch.cells()
        rows, pages, lens = batch.qo_indptr.tolist(), batch.kv_indptr.tolist(), batch.kv_lens.tolist()
        self._requests = [
            _Request(
                slice(rows[number], rows[number + 1]),
                length - (rows[number + 1] - rows[number]),
                length,
                batch.kv_indices[pages[number] : pages[number + 1]].long(),
            )
            for number, length in enumerate(lens)
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Write k, v [rows, kv_heads, head_dim], then attend with q [rows, heads, head_dim]; shaped as q."""
        cells = self._cache.layer(layer)
        pages, slots = self._cells
        largest = torch.finfo(self._cache.store.dtype).max
        for cell, new in zip(cells, (k, v), strict=True):
            cell[pages, :, slots] = new.clamp(-largest, largest).to(cell.dtype)
        out = torch.empty_like(q)
        for request in self._requests:
            first = 0 if scores.window is None else max(0, request.first + 1 - scores.window)
            first -= first % self._cache.page_size
            keys, values = (self._tokens(cell, request, first) for cell in cells)
            for start in range(request.rows.start, request.rows.stop, BLOCK_ROWS):
                rows = slice(start, min(start + BLOCK_ROWS, request.rows.stop))
                position = request.first + start - request.rows.start
                out[rows] = _attend(q[rows], keys, values, position - first, scores)
        return out

    def _tokens(self, cell: Tensor, request: _Request, first: int) -> Tensor:
        """Keys or values of a request from a position on, float32 [kv_heads, tokens, head_dim]."""
        found = cell[request.pages[first // self._cache.page_size :]].transpose(0, 1)
        return found.reshape(found.shape[0], -1, found.shape[3])[:, : request.tokens - first].float()


def _attend(q: Tensor, keys: Tensor, values: Tensor, position: int, scores: Scores) -> Tensor:
    """q [rows, heads, head_dim], the first row at `position` among the keys → as q."""
    rows, heads, head_dim = q.shape
    kv_heads = len(keys)
    grouped = q.view(rows, kv_heads, -1, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    products = soft_cap(torch.bmm(grouped * scores.scale, keys.transpose(1, 2)), scores.cap)
    own = position + torch.arange(rows).view(-1, 1)
    token = torch.arange(keys.shape[1])
    hidden = token > own
    if scores.window is not None:
        hidden |= token <= own - scores.window
    by_row = products.view(kv_heads, rows, heads // kv_heads, -1)
    weights = by_row.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1)
    found = torch.bmm(weights.view(kv_heads, -1, keys.shape[1]), values)
    return found.view(kv_heads, rows, -1, head_dim).transpose(0, 1).reshape(q.shape)
