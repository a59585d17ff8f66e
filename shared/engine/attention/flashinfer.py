"""`StreamAttention` by FlashInfer's kernels, over a cache whose keys lie by token.

A *plan* is the division of a step's work into blocks. FlashInfer makes it on the host, in pinned memory, and sends it
to the stream; `run` launches a kernel that reads it there, once a layer. Sliding windows differ between layers of some
models, and a plan holds for one window: so there is a wrapper, with a plan, for each distinct window.

DECODE has wrappers for each batch size, over static arrays, whose kernels are captured in graphs. A graph keeps the
numbers that `plan` returned: where the parts of the plan lie, and how many blocks are launched. For FlashInfer in graph
mode they depend on the batch size alone; it is checked at every plan all the same, as TensorRT-LLM found it was not
always so (TensorRT-LLM#18002). EXTEND has wrappers for each number of tokens whose graph is captured; where no graph
holds a step, and where a row may not depend on the rest of the batch, it runs eagerly.

Read in FlashInfer 0.6.14 (decode.py, prefill.py, scheduler.cuh, prefill.cuh).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.attention.flashinfer_workspace import (
    CUDA_CORE_GROUP_MAX,
    GRAPH_WORKSPACE_BYTES,
    Processors,
    float_workspace_bytes,
)
from shared.engine.attention.heads import HeadTransform, weaken_by_sinks
from shared.engine.attention.protocol import HeadWriter, PagedBatch
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.model_config import ModelConfig
from shared.primitives.errors import ConfigError, InvariantError

HEAD_DIMS = (64, 128, 256)
ROTARY_DIM_MULTIPLE = 16  # a lane rotates up to 8 numbers, all of one half (head_kernels.cu)
DTYPES = (torch.bfloat16, torch.float16)

_ENTRIES_BYTES = 2**14  # of a plan, that name the requests and tiles of blocks: they lie first
_ENTRY_BYTES = 8  # a request and a tile

Capability = tuple[int, int]  # compute capability of a GPU
Window = int | None


class DecodeWrapper(Protocol):
    """What is used of `BatchDecodeWithPagedKVCacheWrapper`; `fast_decode_plan` plans it as well."""

    _plan_info: Sequence[int]
    _pin_memory_int_workspace_buffer: Tensor

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Use these on the device, and new pinned memory like the second."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Choose the kernels and plan a step."""

    def run(self, q: Tensor, paged_kv_cache: Tensor, **returned: Any) -> Any:
        """Attend by the last plan."""


class PrefillWrapper(Protocol):
    """What is used of `BatchPrefillWithPagedKVCacheWrapper`."""

    _plan_info: Sequence[int]
    _pin_memory_int_workspace_buffer: Tensor

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Use these on the device, and new pinned memory like the second."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Choose the kernels and plan a step."""

    def run(self, q: Tensor, paged_kv_cache: Tensor, **returned: Any) -> Any:
        """Attend by the last plan."""


class FlashInfer(Protocol):
    """What is used of the package."""

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> DecodeWrapper:  # noqa: N802
        """Plans and kernels of DECODE."""

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> PrefillWrapper:  # noqa: N802
        """Plans and kernels of EXTEND."""

    def fast_decode_plan(self, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        """Plan as the wrapper does, but for copies to the device."""


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """What computes attention, and what prepares its heads."""

    library: FlashInfer
    heads: HeadWriter
    dtype: torch.dtype | None = None  # of queries; None: that of the cache


def check_bounds(
    config: ModelConfig, dtype: torch.dtype, capability: Capability, *, deterministic: bool = False
) -> None:
    """Raises `ConfigError` for what FlashInfer's kernels do not compute on a GPU of this compute capability.

    `dtype`: of queries.
    """
    gpu = ".".join(map(str, capability))
    if config.norm_offset or config.attention_cap is not None:
        raise ConfigError(f"{config.architecture} has not been brought to GPUs yet: use device cpu")
    if config.head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"FlashInfer has no kernels for head_dim {config.head_dim}, only for {_listed(HEAD_DIMS)}: use device cpu"
        )
    if odd := [rope.rotary_dim for rope in config.ropes if rope and rope.rotary_dim % ROTARY_DIM_MULTIPLE]:
        raise ConfigError(
            f"our kernels rotate multiples of {ROTARY_DIM_MULTIPLE} dimensions of a head, this model's {odd[0]} would "
            "come out wrong: use device cpu"
        )
    if dtype not in DTYPES:
        raise ConfigError(
            f"FlashInfer has no kernels for {_name(dtype)}, only for {_listed(map(_name, DTYPES))}: "
            "choose one as dtype, or use device cpu"
        )
    if dtype is torch.bfloat16 and capability < (8, 0):
        raise ConfigError(
            f"bfloat16 needs a GPU of compute capability 8.0 or more, this one has {gpu}: "
            "use dtype float16, or use device cpu"
        )
    if deterministic and capability < (9, 0):
        raise ConfigError(
            f"deterministic needs a GPU of compute capability 9.0 or more, this one has {gpu}: use device cpu"
        )


class FlashInferAttention:
    """See `StreamAttention`. All calls are made with the stream as torch's current one."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        kernels: AttentionKernels,
        guard: Callable[[], AbstractContextManager[None]],
        *,
        requests: int,
        deterministic: bool = False,
    ) -> None:
        """`guard` makes what is held around each plan of DECODE, and another one for EXTEND (`PlanGuard`).

        Each waits until the stream has copied the plan before of its kind. Their memory on the host lies apart, so that
        a MIXED step, which is planned as both, does not wait for itself behind the step before.
        `requests` is the most of an EXTEND step. `deterministic`: a row's result does not depend on the rest of the
        batch; it costs speed, most of all for few long requests. `check_bounds` says what can be computed.
        """
        self._library = kernels.library
        self.heads = kernels.heads
        self._decode_guard, self._extend_guard = guard(), guard()
        self._deterministic = deterministic
        self._windows = config.windows
        self._distinct = tuple(dict.fromkeys(config.windows))
        self._page_size = cache.page_size
        self._scale = config.attention_scale
        self._shape = (config.heads, config.kv_heads, config.head_dim, cache.page_size)
        self._group = config.heads // config.kv_heads
        self._views = [cache.paged_layer(layer) for layer in range(config.layers)]
        self._device, self._kv_dtype = cache.store.device, cache.store.dtype
        self._dtype = kernels.dtype or self._kv_dtype
        processors = Processors.of(self._device)
        self._floats = self._workspace(float_workspace_bytes(config, requests, processors))
        # Steps follow each other in the stream, so batch sizes can share a plan's place on the device. Windows cannot.
        self._decode_ints = {window: self._workspace(GRAPH_WORKSPACE_BYTES) for window in self._distinct}
        self._extend_ints = {window: self._workspace(GRAPH_WORKSPACE_BYTES) for window in self._distinct}
        self._prefills: list[dict[Window, PrefillWrapper]] = []
        pinned = self._device.type == "cuda"
        self._kv_lens = torch.zeros(requests, dtype=torch.int32, pin_memory=pinned)
        self._starts = torch.zeros(2 * requests, dtype=torch.int32, pin_memory=pinned)
        self._graph_kv_lens: Tensor | None = None
        self._prefill(0)  # memory is taken at start, not by the first request

    def plan_extend(self, host: PagedBatch, device: PagedBatch) -> FlashInferExtend:
        """See `StreamAttention`."""
        query_lens = np.diff(host.qo_indptr.numpy())
        runs = [_Run(0, len(query_lens))]
        if self._deterministic:
            runs = _runs_by_tile(query_lens * self._group, self._shape[2])
        with self._extend_guard:
            self._kv_lens[: len(query_lens)].copy_(host.kv_lens)
            parts = [self._plan_run(index, run, host, device, query_lens) for index, run in enumerate(runs)]
        return FlashInferExtend(self, device, parts)

    def for_decode(self, device: PagedBatch) -> FlashInferDecode:
        """See `StreamAttention`."""
        wrappers = {window: self._decode_wrapper(window, device) for window in self._distinct}
        return FlashInferDecode(self, device, wrappers)

    def for_extend(self, device: PagedBatch, tokens: int) -> FlashInferExtendGraph | None:
        """See `StreamAttention`. Deterministic tiles follow the lengths of a step, a graph's do not."""
        if self._deterministic:
            return None
        del tokens  # kernels read it of the step
        if self._graph_kv_lens is None:
            self._graph_kv_lens = torch.zeros_like(
                device.kv_last_page_len, device="cpu", pin_memory=self._device.type == "cuda"
            )
        wrappers = {window: self._graph_wrapper(window, device) for window in self._distinct}
        return FlashInferExtendGraph(self, device, wrappers)

    # ---- for the steps -------------------------------------------------------------------------------------------

    def view(self, layer: int) -> Tensor:
        """The layer's cache as FlashInfer takes it."""
        return self._views[layer]

    def window(self, layer: int) -> Window:
        """Tokens that a row of this layer sees, None for all."""
        return self._windows[layer]

    def plan_decode(
        self,
        wrappers: dict[Window, DecodeWrapper],
        device: PagedBatch,
        kv_indptr: Tensor,
        kv_last_page_len: Tensor,
        *,
        first: bool,
    ) -> list[list[int]]:
        """Plan a step for all windows; returns what graphs keep of the plans."""
        with self._decode_guard:
            for window, wrapper in wrappers.items():
                settings = self._settings(window)
                if first:
                    # It also copies the arrays to the device. That of pages is already there, and may be long.
                    no_pages = device.kv_indices[:0]
                    wrapper.plan(kv_indptr, no_pages, kv_last_page_len, *self._shape, **settings)
                    continue
                # `plan` compares lengths in Python and copies arrays that the graph writes itself. This needs both
                # arrays on the host: one on the device would be fetched, and the host would wait for it.
                self._library.fast_decode_plan(
                    wrapper,
                    kv_indptr,
                    device.kv_indices,
                    kv_last_page_len,
                    *self._shape,
                    **settings,
                    global_override_indptr_cpu=kv_indptr,
                )
        return [list(wrapper._plan_info) for wrapper in wrappers.values()]

    def plan_graph(
        self, wrappers: dict[Window, PrefillWrapper], device: PagedBatch, host: PagedBatch
    ) -> None:
        """Plan a step that a graph computes, for all windows."""
        longest = int(host.query_lens.max())
        assert self._graph_kv_lens is not None
        with self._extend_guard:
            kv_lens = self._graph_kv_lens[: len(host.kv_last_page_len)].copy_(host.kv_lens)
            for window, wrapper in wrappers.items():
                # Blocks that pad a graph's launch compute the request that they name (see `_decode_wrapper`). That of
                # the first entry is padding, which costs nothing.
                wrapper._pin_memory_int_workspace_buffer[:_ENTRIES_BYTES].zero_()
                wrapper.plan(
                    host.qo_indptr,
                    host.kv_indptr,
                    device.kv_indices[:0],  # they come with the step's own arrays
                    host.kv_last_page_len,
                    *self._shape,
                    causal=True,
                    seq_lens=kv_lens,
                    max_token_per_sequence=longest,
                    **self._settings(window, split=False),
                )
                if (blocks := wrapper._plan_info[0]) * _ENTRY_BYTES > _ENTRIES_BYTES:
                    raise InvariantError(
                        f"a graph of prompts has {blocks} blocks a head: no more than "
                        f"{_ENTRIES_BYTES // _ENTRY_BYTES} are foreseen"
                    )

    # ---- wrappers ------------------------------------------------------------------------------------------------

    def _decode_wrapper(self, window: Window, device: PagedBatch) -> DecodeWrapper:
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._floats,
            "HND",
            use_cuda_graph=True,
            # Only these can be told not to split keys. CUDA cores have no kernels for 5, 6, 7 and more than 8 anyhow.
            use_tensor_cores=self._deterministic or self._group > CUDA_CORE_GROUP_MAX,
            paged_kv_indptr_buffer=device.kv_indptr,
            paged_kv_indices_buffer=device.kv_indices,
            paged_kv_last_page_len_buffer=device.kv_last_page_len,
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(self._floats, self._decode_ints[window])
        # Where keys are not split, the blocks that pad a graph's launch read entries that no plan writes, and compute
        # what they name (sglang#31387). Of zeros it is the first request once more.
        wrapper._pin_memory_int_workspace_buffer.zero_()
        return wrapper

    def _graph_wrapper(self, window: Window, device: PagedBatch) -> PrefillWrapper:
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._floats,
            "HND",
            use_cuda_graph=True,
            qo_indptr_buf=device.qo_indptr,
            paged_kv_indptr_buf=device.kv_indptr,
            paged_kv_indices_buf=device.kv_indices,
            paged_kv_last_page_len_buf=device.kv_last_page_len,
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(self._floats, self._extend_ints[window])
        wrapper._pin_memory_int_workspace_buffer.zero_()
        return wrapper

    def _prefill(self, index: int) -> dict[Window, PrefillWrapper]:
        """Wrappers of the run `index` of a step; their plans lie apart, for all runs are planned before any is run."""
        while len(self._prefills) <= index:
            self._prefills.append(
                {
                    window: self._library.BatchPrefillWithPagedKVCacheWrapper(
                        self._floats, "HND", backend="fa2"
                    )
                    for window in self._distinct
                }
            )
        return self._prefills[index]

    def _plan_run(
        self,
        index: int,
        run: _Run,
        host: PagedBatch,
        device: PagedBatch,
        query_lens: NDArray[np.signedinteger],
    ) -> _Part:
        first, end = run.first, run.end
        qo_indptr = self._starts[first + index : end + index + 1]  # a run has an entry more than requests
        rows = host.qo_indptr.numpy()
        # its output begins at 0, so its rows have to
        qo_indptr.numpy()[:] = rows[first : end + 1] - rows[first]
        wrappers, kv_lens = self._prefill(index), self._kv_lens[first:end]
        # Parts of split keys are merged, which costs more than it brings where most keys are the step's own: of 1,024
        # tokens of Qwen3-0.6B on an H200 attention took 0.9 and merging 1.2 ms, and 1.0 ms whole.
        split = bool((kv_lens.numpy() > 2 * query_lens[first:end]).any())
        for window, wrapper in wrappers.items():
            # All but the pages lie on the host, for FlashInfer reads them there; and pinned, for it copies them as if
            # they were. Never max_sequence_kv: with it `plan` forgets to fetch kv_indptr (until 0.7.2).
            wrapper.plan(
                qo_indptr,
                host.kv_indptr[first : end + 1],
                device.kv_indices,
                host.kv_last_page_len[first:end],
                *self._shape,
                causal=True,
                seq_lens=kv_lens,
                max_token_per_sequence=int(query_lens[first:end].max()),
                **self._settings(window, split=split),
            )
        return _Part(int(rows[first]), int(rows[end]), wrappers)

    def _settings(self, window: Window, *, split: bool = True) -> dict[str, Any]:
        """Arguments of `plan` for DECODE and EXTEND; `window_left` does not count the row itself.

        `split`: a request's keys may be divided among blocks.
        """
        return {
            "window_left": -1 if window is None else window - 1,
            "q_data_type": self._dtype,
            "kv_data_type": self._kv_dtype,
            "sm_scale": self._scale,
            "disable_split_kv": self._deterministic or not split,
        }

    def _workspace(self, nbytes: int) -> Tensor:
        """FlashInfer wants its workspaces zeroed before their first use."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)


class _FlashInferStep(ABC):
    """What steps of all kinds do in a layer: they write its keys and values, then attend."""

    def __init__(self, attention: FlashInferAttention, batch: PagedBatch) -> None:
        self._attention = attention
        self._batch = batch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform) -> Tensor:
        """See `PlannedAttention`."""
        view = self._attention.view(layer)
        q = self._attention.heads.write(q, k, v, transform, self._batch, view)
        return self._run(self._attention.window(layer), q, view, transform.sinks)

    @abstractmethod
    def _run(self, window: Window, q: Tensor, view: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend by the plan for this window, over the layer's cache."""


class FlashInferDecode(_FlashInferStep):
    """See `DecodeAttention`."""

    def __init__(
        self, attention: FlashInferAttention, batch: PagedBatch, wrappers: dict[Window, DecodeWrapper]
    ) -> None:
        super().__init__(attention, batch)
        self._wrappers = wrappers
        # what the graph keeps: of the first plan, before its capture
        self._captured: list[list[int]] | None = None

    def plan(self, kv_indptr: Tensor, kv_last_page_len: Tensor) -> bool:
        """See `DecodeAttention`."""
        planned = self._attention.plan_decode(
            self._wrappers, self._batch, kv_indptr, kv_last_page_len, first=self._captured is None
        )
        if self._captured is None:
            self._captured = planned
        return planned == self._captured

    def _run(self, window: Window, q: Tensor, view: Tensor, sinks: Tensor | None) -> Tensor:
        return _attended(self._wrappers[window], q, view, sinks)


class FlashInferExtendGraph(_FlashInferStep):
    """See `ExtendAttention`."""

    def __init__(
        self, attention: FlashInferAttention, batch: PagedBatch, wrappers: dict[Window, PrefillWrapper]
    ) -> None:
        super().__init__(attention, batch)
        self._wrappers = wrappers
        # what the graph keeps: of the first plan, before its capture
        self._captured: list[list[int]] | None = None

    def plan(self, host: PagedBatch) -> None:
        """See `ExtendAttention`. What a graph keeps of a plan depends on its rows and requests alone."""
        self._attention.plan_graph(self._wrappers, self._batch, host)
        planned = [list(wrapper._plan_info) for wrapper in self._wrappers.values()]
        self._captured = self._captured or planned
        if planned != self._captured:
            raise InvariantError(f"FlashInfer planned {planned} where a graph keeps {self._captured}")

    def _run(self, window: Window, q: Tensor, view: Tensor, sinks: Tensor | None) -> Tensor:
        return _attended(self._wrappers[window], q, view, sinks, out=_like(q))


class FlashInferExtend(_FlashInferStep):
    """`PlannedAttention` of an EXTEND step; its plan holds until the next one is made."""

    def __init__(self, attention: FlashInferAttention, batch: PagedBatch, parts: Sequence[_Part]) -> None:
        super().__init__(attention, batch)
        self._parts = parts

    def _run(self, window: Window, q: Tensor, view: Tensor, sinks: Tensor | None) -> Tensor:
        out = _like(q)
        for part in self._parts:
            rows = slice(part.first, part.end)
            _attended(part.wrappers[window], q[rows], view, sinks, out=out[rows])
        return out


def _attended(
    wrapper: DecodeWrapper | PrefillWrapper, q: Tensor, view: Tensor, sinks: Tensor | None, **out: Tensor
) -> Tensor:
    """Attend by the wrapper's plan. FlashInfer's logarithms are of base 2."""
    if sinks is None:
        attended: Tensor = wrapper.run(q, view, **out)
        return attended
    attended, log_sums = wrapper.run(q, view, **out, return_lse=True)
    return weaken_by_sinks(attended, log_sums * math.log(2), sinks)


def _like(q: Tensor) -> Tensor:
    """Make a tensor of the shape and type of q, contiguous, as q need not be."""
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive requests that are planned together."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive rows and what was planned for them."""

    first: int
    end: int
    wrappers: dict[Window, PrefillWrapper]


def _runs_by_tile(packed_lens: NDArray[np.signedinteger], head_dim: int) -> list[_Run]:
    """Split requests where the size of FlashInfer's tiles would be another one.

    fa2 takes 16, 64 or 128 rows a tile by the average length of a plan's requests, rows times query heads a key-value
    head (`FA2DetermineCtaTileQ`), and sums in another order for each. So a request may only be planned with those for
    which it would choose as it does for this one alone.
    """
    limits = np.array([16, 64] if head_dim < 256 else [16])
    tiles = np.searchsorted(limits, packed_lens)
    starts = [0, *(np.flatnonzero(np.diff(tiles)) + 1).tolist(), len(tiles)]
    return [_Run(first, end) for first, end in pairwise(starts)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in values)
