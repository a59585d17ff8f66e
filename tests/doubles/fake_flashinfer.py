"""FlashInfer's wrappers in torch, where plans are as late and as shared as on a GPU.

All of Python happens at once, as it does where work launches kernels. Kernels and copies happen when the stream comes
to them, and read nothing of a plan but what arrived on the device. So a plan that is overwritten too early, or shares a
place with another, gives wrong attention. Given the package, each call is bound to its signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shared.engine.streams import Stream

_GARBAGE = 0x5A
_HEADER = 4  # words of a plan: requests, window_left, whether keys may be split, most tokens of a request


class FakeFlashInfer:
    """See `FlashInfer`."""

    def __init__(self, stream: Stream, package: Any = None) -> None:
        self.stream = stream
        self.package = package
        self.decoders: list[FakeDecodeWrapper] = []
        self.prefills: list[FakePrefillWrapper] = []
        self.calls: list[str] = []
        self.extra_info = 0  # of plans; a change is one that a graph does not fit

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> FakeDecodeWrapper:  # noqa: N802
        """A wrapper for one batch size."""
        self.bind("BatchDecodeWithPagedKVCacheWrapper", *args, **kwargs)
        self.decoders.append(FakeDecodeWrapper(self, *args, **kwargs))
        return self.decoders[-1]

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> FakePrefillWrapper:  # noqa: N802
        """A wrapper for any step."""
        self.bind("BatchPrefillWithPagedKVCacheWrapper", *args, **kwargs)
        self.prefills.append(FakePrefillWrapper(self, *args, **kwargs))
        return self.prefills[-1]

    def fast_decode_plan(self, wrapper: FakeDecodeWrapper, *args: Any, **kwargs: Any) -> None:
        """`plan` without copies to the device."""
        self.bind("fast_decode_plan", wrapper, *args, **kwargs)
        indptr, _, last_page_len, *shape = args
        assert kwargs.pop("global_override_indptr_cpu") is indptr
        wrapper.make_plan(indptr, last_page_len, shape, **kwargs)

    def bind(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Raise TypeError if the package's function of this name, or method, does not take these arguments."""
        self.calls.append(name)
        if self.package is None:
            return
        function: Callable[..., Any] = self.package
        for part in name.split("."):
            function = getattr(function, part)
        inspect.signature(function).bind(*args, **kwargs)


class _Planned:
    def __init__(self, library: FakeFlashInfer, floats: Tensor, layout: str) -> None:
        assert layout == "HND"
        self.library = library
        self.floats = floats
        self.ints = torch.zeros(2**16, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.full((2**16,), _GARBAGE, dtype=torch.uint8)
        self._plan_info: Sequence[int] = []

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """See `DecodeWrapper`."""
        self.library.bind(
            f"{self.name}.reset_workspace_buffer", self, float_workspace_buffer, int_workspace_buffer
        )
        self.floats, self.ints = float_workspace_buffer, int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.full_like(int_workspace_buffer, _GARBAGE)

    name = "BatchDecodeWithPagedKVCacheWrapper"

    def write_plan(self, words: list[int]) -> None:
        """Plan on the host, now; on the device when the stream comes here."""
        nbytes = 4 * len(words)
        pinned, ints = self._pin_memory_int_workspace_buffer[:nbytes], self.ints[:nbytes]
        pinned.view(torch.int32).copy_(torch.tensor(words, dtype=torch.int32))
        self.library.stream.upload(ints, pinned)

    def words(self, first: int, count: int) -> Tensor:
        """Of the plan, as the device has it."""
        return self.ints.view(torch.int32)[first : first + count]


class FakeDecodeWrapper(_Planned):
    """See `DecodeWrapper`."""

    def __init__(
        self,
        library: FakeFlashInfer,
        floats: Tensor,
        layout: str,
        *,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: Tensor,
        paged_kv_indices_buffer: Tensor,
        paged_kv_last_page_len_buffer: Tensor,
        backend: str,
    ) -> None:
        super().__init__(library, floats, layout)
        assert use_cuda_graph
        assert backend == "fa2"
        self.use_tensor_cores = use_tensor_cores
        self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last_page_len = paged_kv_last_page_len_buffer
        assert len(self.indptr) == len(self.last_page_len) + 1

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *shape: int, **settings: Any
    ) -> None:
        """See `DecodeWrapper`."""
        self.library.bind(f"{self.name}.plan", self, indptr, indices, last_page_len, *shape, **settings)
        assert len(indices) <= len(self.indices)
        self.library.stream.upload(self.indptr, indptr.clone())
        self.library.stream.upload(self.last_page_len, last_page_len.clone())
        self.make_plan(indptr, last_page_len, list(shape), **settings)

    def make_plan(
        self,
        indptr: Tensor,
        last_page_len: Tensor,
        shape: list[int],
        *,
        window_left: int,
        disable_split_kv: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        """What `plan` and `fast_decode_plan` share."""
        assert len(last_page_len) == len(self.last_page_len) == len(indptr) - 1
        assert kv_data_type in (q_data_type, torch.float8_e4m3fn)
        assert q_data_type != torch.float8_e4m3fn
        assert len(shape) == 4
        self._scale = sm_scale
        self.write_plan([len(last_page_len), window_left, int(not disable_split_kv), 0, *indptr.tolist()])
        self._plan_info = [len(last_page_len), int(not disable_split_kv), self.library.extra_info]

    def run(self, q: Tensor, paged_kv_cache: Tensor, **returned: Any) -> Tensor:
        """See `DecodeWrapper`."""
        assert not returned, "this double has no sums"
        self.library.bind(f"{self.name}.run", self, q, paged_kv_cache)
        out, rows = torch.empty_like(q), len(self.last_page_len)
        indptr, window = self.words(_HEADER, rows + 1), self.words(1, 1)
        tokens = len(self.indices) // rows * paged_kv_cache.shape[3]
        self.library.stream.run(
            lambda: attend_by_plan(
                out,
                q,
                paged_kv_cache,
                torch.arange(rows + 1),
                indptr,
                self.indices,
                self.last_page_len,
                window,
                self._scale,
                tokens,
            )
        )
        return out


class FakePrefillWrapper(_Planned):
    """See `PrefillWrapper`."""

    name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        library: FakeFlashInfer,
        floats: Tensor,
        layout: str,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
    ) -> None:
        super().__init__(library, floats, layout)
        self.backend = backend
        self.static: list[Tensor] = []  # of a graph: where rows begin, where pages begin, lengths, pages
        if use_cuda_graph:
            given = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf, paged_kv_indices_buf)
            self.static = [each for each in given if each is not None]
            assert len(self.static) == 4
        self.requests: list[int] = []  # of each plan
        self.splits: list[bool] = []  # whether keys may be split

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page_len: Tensor,
        *shape: int,
        causal: bool,
        seq_lens: Tensor,
        max_token_per_sequence: int,
        **settings: Any,
    ) -> None:
        """See `PrefillWrapper`."""
        named = {"causal": causal, "seq_lens": seq_lens, "max_token_per_sequence": max_token_per_sequence}
        arrays = (qo_indptr, kv_indptr, kv_indices, last_page_len)
        self.library.bind(f"{self.name}.plan", self, *arrays, *shape, **named, **settings)
        assert causal
        assert qo_indptr[0] == 0
        assert max_token_per_sequence == int(qo_indptr.diff().max())
        page_size = shape[3]
        assert torch.equal(seq_lens, (kv_indptr.diff() - 1) * page_size + last_page_len)
        self.requests.append(len(seq_lens))
        self.splits.append(not settings["disable_split_kv"])
        self._scale = settings["sm_scale"]
        if self.static:
            assert not len(kv_indices)
            self._plan_info = [len(seq_lens), self.library.extra_info]
            self._rows = max(int(qo_indptr[-1]), getattr(self, "_rows", 0))  # the first plan is of all rows
            self._copies = [self.static[0], self.static[2]]
            self.library.stream.upload(self.static[1], kv_indptr)
            self._kv_indices, self._tokens = self.static[3], len(self.static[3]) * page_size
            # what names the request of a block that pads the launch
            assert not self._pin_memory_int_workspace_buffer[4 * (_HEADER + len(kv_indptr)) : 2**14].any()
        else:
            self._kv_indices, self._tokens = kv_indices, int(seq_lens.max())
            self._rows = int(qo_indptr[-1])
            self._copies = [torch.empty_like(each) for each in (qo_indptr, last_page_len)]
        for copy, source in zip(self._copies, (qo_indptr, last_page_len), strict=True):
            self.library.stream.upload(copy, source)
        self.write_plan([len(seq_lens), settings["window_left"], 0, 0, *kv_indptr.tolist()])

    def run(self, q: Tensor, paged_kv_cache: Tensor, **returned: Any) -> Tensor:
        """See `PrefillWrapper`."""
        out: Tensor = returned.pop("out")
        assert not returned, "this double has no sums"
        self.library.bind(f"{self.name}.run", self, q, paged_kv_cache, out=out)
        qo_indptr, last_page_len = self._copies
        assert len(q) == self._rows
        assert q.shape == out.shape
        indptr, window = self.words(_HEADER, len(last_page_len) + 1), self.words(1, 1)
        arrays = (qo_indptr, indptr, self._kv_indices, last_page_len, window, self._scale, self._tokens)
        self.library.stream.run(lambda: attend_by_plan(out, q, paged_kv_cache, *arrays))
        return out


def attend_by_plan(
    out: Tensor,
    q: Tensor,
    view: Tensor,  # [pages, 2, kv_heads, page_size, head_dim]
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    window_left: Tensor,
    scale: float,
    tokens: int,
) -> None:
    rows, page_size = torch.arange(len(q)), view.shape[3]
    # rows behind those of all requests are padding
    request = torch.searchsorted(qo_indptr[1:], rows, right=True).clamp(max=len(last_page_len) - 1)
    kv_len = (kv_indptr[request + 1] - kv_indptr[request] - 1) * page_size + last_page_len[request]
    position = (kv_len - (qo_indptr[request + 1] - rows)).unsqueeze(1)
    token = torch.arange(tokens)
    entry = (kv_indptr[request].unsqueeze(1) + token // page_size).clamp(0, len(kv_indices) - 1)
    seen = (token <= position) & ((window_left < 0) | (token >= position - window_left))
    pages = torch.where(seen, kv_indices[entry], 0).long()
    shared = q.shape[1] // view.shape[2]
    keys, values = (
        view[pages, kind, :, token % page_size].float().repeat_interleave(shared, dim=2) for kind in (0, 1)
    )
    scores = torch.einsum("qhd,qkhd->qhk", q.float(), keys) * scale
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    out.copy_(torch.einsum("qhk,qkhd->qhd", weights, values))
