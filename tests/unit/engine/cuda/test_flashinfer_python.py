"""FlashInfer's own Python, run on this CPU: just the functions that it compiles are torch's here.

It checks shapes and types, chooses the module, and lays out the arguments of compiled functions. So these tests find a
call that binds and is refused, or that computes something else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.attention.flashinfer_package import flashinfer_package
from shared.engine.streams import Work
from tests.doubles.fake_flashinfer import attend_by_plan
from tests.unit.engine.cuda.test_flashinfer_attention import GRAPH_ROWS, PAGE_SIZE, WIDTH, Steps


class NowStream:
    """A stream that is never late."""

    def run(self, work: Work) -> None:
        """See `Stream`."""
        work()

    def upload(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        target.copy_(source)

    def record(self) -> Any:
        """See `Stream`."""
        return SimpleNamespace(wait=lambda: None)

    def synchronize(self) -> None:
        """See `Stream`."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """FlashInfer with compiled functions in torch; what it chose modules by: kind, and arguments of `get_…_module`."""
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    package, found = flashinfer_package(), []

    def module(kind: str, compiled: Any) -> Callable[..., Any]:
        def get(*arguments: Any) -> Any:
            found.append((kind, *arguments))
            return compiled

        return get

    decode, prefill = package.decode, package.prefill
    monkeypatch.setattr(
        decode, "get_batch_decode_module", module("decode", SimpleNamespace(plan=_plan_decode, run=_decode))
    )
    tensor_cores = module("prefill", SimpleNamespace(plan=_plan_prefill, paged_run=_prefill))
    monkeypatch.setattr(decode, "get_batch_prefill_module", tensor_cores)
    monkeypatch.setattr(prefill, "get_batch_prefill_module", tensor_cores)
    empty = torch.empty  # without CUDA there is no pinned memory
    monkeypatch.setattr(torch, "empty", lambda *args, **named: empty(*args, **named | {"pin_memory": False}))
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    return found


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("seed", range(3))
def test_flashinfer_computes_what_the_reference_does(
    chosen: list[tuple[Any, ...]], seed: int, deterministic: bool
) -> None:
    steps = Steps(seed, deterministic=deterministic, stream=NowStream(), package=flashinfer_package())
    steps.run(40)
    assert steps.equal()
    assert all(steps.fits)
    assert (steps.graphs > 3) is not deterministic
    kinds = {(kind, arguments[0] if kind == "prefill" else None) for kind, *arguments in chosen}
    assert kinds == ({("prefill", "fa2")} if deterministic else {("prefill", "fa2"), ("decode", None)})
    plans = [plan for decoder in steps.decoders.values() for plan in decoder._captured or []]
    assert {tuple(plan[1:]) for plan in plans} == {
        (0, 1) if deterministic else ()
    }  # not causal, keys not split
    types = {torch.float32, torch.int32}
    assert all(types == {each for each in found if isinstance(each, torch.dtype)} for found in chosen)


# ---- compiled functions, by position as decode.py and prefill.py pass them ---------------------------------


def _plan(ints: Tensor, pinned: Tensor, window_left: int, indptr: Tensor, *info: int) -> list[int]:
    words = torch.cat([torch.tensor([window_left], dtype=torch.int32), indptr])
    pinned[: 4 * len(words)].view(torch.int32).copy_(words)
    ints[: len(pinned)].copy_(pinned)
    return [len(indptr) - 1, *info]


def _plan_decode(_floats: Tensor, ints: Tensor, pinned: Tensor, indptr: Tensor, *rest: Any) -> list[int]:
    batch_size, heads, kv_heads, page_size, graph, window_left, cap, qk_dim, vo_dim, q_type, kv_type = rest
    assert (batch_size, heads, kv_heads, page_size, graph, cap) == (len(indptr) - 1, 4, 2, 4, True, 0.0)
    assert (qk_dim, vo_dim, q_type.dtype, kv_type.dtype) == (8, 8, torch.float32, torch.float32)
    return _plan(ints, pinned, window_left, indptr)


def _decode(
    _floats: Tensor, ints: Tensor, info: list[int], q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> None:
    _indptr, indices, last_page_len, out, lse, layout, window_left, _pdl, _slopes, cap, scale, *_rope = rest
    assert (lse, layout, cap, scale) == (None, 1, 0.0, pytest.approx(8**-0.5))
    _run(ints, out, q, k, v, torch.arange(info[0] + 1), indices, last_page_len, window_left)


def _plan_prefill(
    _floats: Tensor,
    ints: Tensor,
    pinned: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_lens: Tensor,
    *rest: Any,
) -> list[int]:
    rows, batch_size, heads, kv_heads, page_size, graph, qk_dim, vo_dim, causal, window_left, *splits = rest
    assert (rows, batch_size) == (GRAPH_ROWS if graph and causal else int(qo_indptr[-1]), len(kv_indptr) - 1)
    assert (heads, kv_heads, page_size, qk_dim, vo_dim) == (4, 2, 4, 8, 8)
    assert causal or graph  # DECODE on tensor cores is planned as one row a request
    assert splits[0] == -1
    assert torch.equal(kv_lens, (kv_indptr.diff() - 1) * PAGE_SIZE + kv_lens.sub(1) % PAGE_SIZE + 1)
    return _plan(ints, pinned, window_left, kv_indptr, int(causal), int(splits[1]))


def _prefill(
    _floats: Tensor, ints: Tensor, info: list[int], q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> None:
    qo_indptr, _kv_indptr, indices, last_page_len, out, lse, mask_mode, layout, window_left, *_ = rest
    assert (lse, layout) == (None, 1)
    assert mask_mode == info[1]
    _run(ints, out, q, k, v, qo_indptr, indices, last_page_len, window_left)


def _run(
    ints: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    window_left: int,
) -> None:
    words = ints[: len(ints) // 4 * 4].view(torch.int32)
    assert int(words[0]) == window_left
    indptr = words[1 : len(last_page_len) + 2]
    view = torch.stack([k, v], dim=1)
    scale, tokens = q.shape[2] ** -0.5, PAGE_SIZE * WIDTH
    attend_by_plan(out, q, view, qo_indptr, indptr, indices, last_page_len, words[:1], scale, tokens)
