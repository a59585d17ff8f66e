"""FlashInfer's wrappers are planned and shared so that each step reads its own plan, however late the stream is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.attention.flashinfer import AttentionKernels, FlashInferAttention, check_bounds
from shared.engine.attention.heads import HeadTransform
from shared.engine.attention.protocol import PagedBatch, PlanGuard
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.rope_config import Rope
from shared.engine.streams import Stream
from shared.primitives.errors import ConfigError, InvariantError
from tests.doubles.fake_flashinfer import FakeFlashInfer
from tests.doubles.late_stream import LateStream
from tests.doubles.torch_head_writer import TorchHeadWriter

PAGE_SIZE, WIDTH, REQUESTS, PAGES = 4, 16, 5, 90
GRAPH_ROWS = 33 * REQUESTS
BUCKETS = (2, 5)
CONFIG = ModelConfig(
    architecture="MistralForCausalLM",
    vocab_size=11,
    hidden_size=32,
    intermediate_size=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    context_len=PAGE_SIZE * WIDTH,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    windows=(None, 6, None, 17),
    ropes=(None,) * 4,
    experts=(None,) * 4,
    attention_scale=8**-0.5,
)


UNCHANGED = HeadTransform()


class HeadsOnStream:
    """`HeadWriter` whose writes happen when the stream comes to them; heads stay as they are."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def write(
        self, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform, batch: PagedBatch, cells: Tensor
    ) -> Tensor:
        """See `HeadWriter`."""
        assert transform is UNCHANGED

        def write() -> None:
            TorchHeadWriter().write(q, k, v, transform, batch, cells)

        self._stream.run(write)
        return q


def whole_pool() -> tuple[Tensor, Tensor, Tensor]:
    """Requests that have all rows of the graph, as before its capture."""
    lens = torch.full((REQUESTS,), GRAPH_ROWS // REQUESTS)
    return lens, lens, torch.full((REQUESTS, WIDTH), PAGES, dtype=torch.int32)


class Steps:
    """Steps of random requests: launched on a late stream, and computed at once by `ReferenceAttention`."""

    def __init__(
        self,
        seed: int,
        *,
        guarded: bool = True,
        deterministic: bool = False,
        stream: Any = None,
        package: Any = None,
        kept: torch.dtype = torch.float32,
    ) -> None:
        """Queries are float32, pages in the type that is `kept`.

        With a stream, `package` computes on it; else a double whose calls bind to those of `package`.
        """
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.stream = stream or LateStream(self.random, [])
        self.library = package if stream else FakeFlashInfer(self.stream, package)

        def guard() -> AbstractContextManager[None]:
            return PlanGuard(self.stream.record) if guarded else nullcontext()

        self.cache, reference = (
            KVCache(
                CONFIG,
                PageCounts(PAGES, padding=1),
                page_size=PAGE_SIZE,
                dtype=kept,
                layout=KVLayout.KEYS_BY_TOKEN,
            )
            for _ in range(2)
        )
        self.reference = ReferenceAttention(CONFIG, reference)
        self.attention = FlashInferAttention(
            CONFIG,
            self.cache,
            AttentionKernels(self.library, HeadsOnStream(self.stream), torch.float32),
            guard,
            requests=REQUESTS,
            deterministic=deterministic,
        )
        self.kv_lens = [0] * REQUESTS
        self.tables = torch.randperm(PAGES)[: REQUESTS * WIDTH].view(REQUESTS, WIDTH).int()
        self.compared: list[tuple[Tensor, Tensor]] = []
        self.static = {rows: self._static(rows) for rows in BUCKETS}
        self.decoders = {rows: self.attention.for_decode(batch) for rows, batch in self.static.items()}
        self.fits: list[bool] = []
        self.graphs = 0  # steps of prompts that a graph computes
        batch = self._graph_batch()
        self.graph, self.graph_batch = self.attention.for_extend(batch, PAGE_SIZE * WIDTH), batch
        if self.graph is not None:
            self.graph.plan(self._padded(PagedBatch.of(*whole_pool(), PAGE_SIZE)))
        for rows in BUCKETS:  # as before a capture
            ones = torch.ones(rows, dtype=torch.int32)
            self.decoders[rows].plan(torch.arange(rows + 1, dtype=torch.int32), ones)
        self.stream.synchronize()

    def run(self, count: int) -> None:
        """Launch so many steps, then let the stream finish."""
        for _ in range(count):
            begun = [request for request in range(REQUESTS) if self.kv_lens[request]]
            if begun and self.random.random() < 0.6:
                self.decode(self.random.sample(begun, self.random.randint(1, len(begun))))
            else:
                picked = self.random.sample(range(REQUESTS), self.random.randint(1, REQUESTS))
                lens = [self.random.choice((1, 3, 9, 33)) for _ in picked]
                self.extend(picked, lens, by_graph=self.random.random() < 0.5)
        self.stream.synchronize()

    def extend(self, requests: Sequence[int], lens: Sequence[int], *, by_graph: bool = False) -> None:
        """An EXTEND step; by a graph if there is one."""
        host = self._batch(requests, lens)
        if self.graph is not None and by_graph:
            self._extend_by_graph(host)
            return
        device = self._on_device(host)
        planned = self.attention.plan_extend(host, device)
        self._attend(host, planned, 0)

    def _extend_by_graph(self, host: PagedBatch) -> None:
        assert self.graph is not None
        self.graphs += 1
        padded = self._padded(host)
        self.graph.plan(padded)
        if not isinstance(
            self.library, FakeFlashInfer
        ):  # the package looks at the shape of what no graph has captured
            for wrapper in self.graph._wrappers.values():
                wrapper._qo_indptr_last = GRAPH_ROWS  # type: ignore[attr-defined]
        for name in ("kv_indices", "batch_indices", "positions"):
            source = getattr(padded, name)
            self.stream.upload(getattr(self.graph_batch, name)[: len(source)], source)
        self._attend(host, self.graph, GRAPH_ROWS - len(host.positions))

    def _padded(self, host: PagedBatch) -> PagedBatch:
        """A request of padding first, others behind, and rows of padding, which belong to the first."""
        rows, requests = len(host.positions), len(host.kv_last_page_len)
        behind = REQUESTS - requests
        more = torch.arange(1, behind + 1, dtype=torch.int32)
        page, ones = torch.full((1,), PAGES, dtype=torch.int32), torch.ones(behind + 1, dtype=torch.int32)
        kv_indptr = torch.cat([host.kv_indptr.new_zeros(1), host.kv_indptr + 1])
        zeros = torch.zeros(GRAPH_ROWS - rows, dtype=torch.int32)
        return PagedBatch(
            PAGE_SIZE,
            torch.cat([host.qo_indptr[:1], host.qo_indptr, host.qo_indptr[-1].expand(behind)]),
            torch.cat([kv_indptr, kv_indptr[-1] + more]),
            torch.cat([page, host.kv_indices, page.expand(behind)]),
            torch.cat([ones[:1], host.kv_last_page_len, ones[1:]]),
            torch.cat([host.batch_indices + 1, zeros]),
            torch.cat([host.positions, zeros]),
        )

    def decode(self, requests: Sequence[int]) -> None:
        """A DECODE step in the smallest bucket; rows behind are padding."""
        host = self._batch(requests, [1] * len(requests))
        rows = next(size for size in BUCKETS if size >= len(requests))
        padding = rows - len(requests)
        device, decoder = self.static[rows], self.decoders[rows]
        more = torch.arange(1, padding + 1, dtype=torch.int32)
        kv_indptr = torch.cat([host.kv_indptr, host.kv_indptr[-1] + more])
        last_page_len = torch.cat([host.kv_last_page_len, torch.ones(padding, dtype=torch.int32)])
        kv_indices = torch.cat([host.kv_indices, torch.full((padding,), PAGES, dtype=torch.int32)])
        positions = torch.cat([host.positions, torch.zeros(padding, dtype=torch.int32)])
        self.fits.append(decoder.plan(kv_indptr, last_page_len))
        for target, source in (
            (device.kv_indptr, kv_indptr),
            (device.kv_last_page_len, last_page_len),
            (device.kv_indices[: len(kv_indices)], kv_indices),
            (device.positions, positions),
        ):
            self.stream.upload(target, source)
        self._attend(host, decoder, padding)

    def equal(self) -> bool:
        """Whether all steps so far were right."""
        return all(torch.allclose(found, wanted, atol=1e-5) for found, wanted in self.compared)

    def _attend(self, host: PagedBatch, planned: Any, padding: int) -> None:
        reference, rows = self.reference.plan(host), len(host.positions)
        for layer in range(CONFIG.layers):
            q = torch.randn(rows + padding, CONFIG.heads, CONFIG.head_dim)
            k, v = (torch.randn(rows + padding, CONFIG.kv_heads, CONFIG.head_dim) for _ in range(2))
            wanted = reference.attend(layer, q[:rows], k[:rows], v[:rows], UNCHANGED)
            self.compared.append((planned.attend(layer, q, k, v, UNCHANGED)[:rows], wanted))

    def _batch(self, requests: Sequence[int], lens: Sequence[int]) -> PagedBatch:
        for request, rows in zip(requests, lens, strict=True):
            if self.kv_lens[request] + rows > PAGE_SIZE * WIDTH:
                self.kv_lens[request] = 0  # another request
            self.kv_lens[request] += rows
        kv_lens = torch.tensor([self.kv_lens[request] for request in requests])
        return PagedBatch.of(torch.tensor(lens), kv_lens, self.tables[list(requests)], PAGE_SIZE)

    def _on_device(self, host: PagedBatch) -> PagedBatch:
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "batch_indices", "positions")
        arrays: dict[str, Any] = {name: torch.zeros_like(getattr(host, name)) for name in names}
        for name, array in arrays.items():
            self.stream.upload(array, getattr(host, name))
        return replace(host, **arrays)

    def _graph_batch(self) -> PagedBatch:
        lens = (
            REQUESTS + 2,
            REQUESTS + 2,
            REQUESTS * WIDTH + REQUESTS + 1,
            REQUESTS + 1,
            GRAPH_ROWS,
            GRAPH_ROWS,
        )
        return PagedBatch(PAGE_SIZE, *(torch.zeros(each, dtype=torch.int32) for each in lens))

    def _static(self, rows: int) -> PagedBatch:
        request = torch.arange(rows + 1, dtype=torch.int32)
        zeros = torch.zeros(rows, dtype=torch.int32)
        indices = torch.zeros(rows * WIDTH, dtype=torch.int32)
        return PagedBatch(
            PAGE_SIZE, request, zeros.new_zeros(rows + 1), indices, zeros.clone(), request[:-1], zeros.clone()
        )


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("seed", range(6))
def test_each_step_reads_its_own_plan(seed: int, deterministic: bool) -> None:
    steps = Steps(seed, deterministic=deterministic)
    steps.run(60)
    assert steps.equal()
    assert all(steps.fits)
    assert (steps.graphs > 5) is not deterministic


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_pages_of_8_bits_are_planned_and_read_as_such(deterministic: bool) -> None:
    """Queries keep their own type: the double refuses those of 8 bits."""
    steps = Steps(1, deterministic=deterministic, kept=torch.float8_e4m3fn)
    steps.run(60)
    assert steps.equal()
    written = steps.cache.store.float()
    assert bool((written != 0).any())
    assert not any(torch.allclose(found, torch.zeros_like(found)) for found, _ in steps.compared)


def test_without_the_guard_a_plan_is_overwritten_before_it_is_copied() -> None:
    steps = Steps(0, guarded=False)
    try:
        steps.run(60)
    except IndexError:  # half of a plan is of one step, half of another
        return
    assert not steps.equal()


def test_a_step_that_is_planned_as_both_kinds_does_not_wait_for_itself() -> None:
    steps = Steps(0)
    steps.extend([0, 1, 2], [5, 9, 1])
    steps.decode([0, 1])
    steps.stream.synchronize()
    before = steps.stream.done
    steps.decode([0, 1])
    steps.extend([2], [3])
    assert steps.stream.done == before
    steps.stream.synchronize()
    assert steps.equal()


def test_windows_have_plans_of_their_own_and_batch_sizes_share_the_place() -> None:
    library = Steps(0).library
    decoders = library.decoders
    assert len(decoders) == 3 * len(BUCKETS)
    assert len({each.ints.data_ptr() for each in decoders}) == 3
    assert len({each._pin_memory_int_workspace_buffer.data_ptr() for each in decoders}) == len(decoders)
    assert len({each.floats.data_ptr() for each in (*decoders, *library.prefills)}) == 1


def test_what_pads_a_plan_is_zero() -> None:
    steps = Steps(0, deterministic=True)
    steps.run(3)
    for wrapper in steps.library.decoders:
        planned = 4 * (5 + len(wrapper.last_page_len))
        assert not wrapper._pin_memory_int_workspace_buffer[planned:].any()


def test_the_first_plan_chooses_kernels_and_later_ones_only_plan() -> None:
    steps = Steps(0)
    first = steps.library.calls.count("BatchDecodeWithPagedKVCacheWrapper.plan")
    steps.run(15)
    assert steps.library.calls.count("BatchDecodeWithPagedKVCacheWrapper.plan") == first == 3 * len(BUCKETS)
    assert steps.library.calls.count("fast_decode_plan") == 3 * len(steps.fits)


def test_a_plan_that_the_graph_does_not_fit_is_told_until_one_fits_again() -> None:
    steps = Steps(0)
    steps.extend([0, 1], [5, 9])
    for extra, fits in ((0, True), (8, False), (8, False), (0, True)):
        steps.library.extra_info = extra
        steps.decode([0, 1])
        assert steps.fits[-1] is fits
    steps.stream.synchronize()
    assert steps.equal()  # eagerly, every plan is right


@pytest.mark.parametrize(
    ("heads", "deterministic", "tensor_cores"),
    [(2, False, False), (6, False, False), (8, False, True), (14, False, True), (2, True, True)],
)
def test_tensor_cores_decode_where_many_heads_share_keys(
    heads: int, deterministic: bool, tensor_cores: bool
) -> None:
    config = replace(CONFIG, heads=heads)
    cache = KVCache(config, PageCounts(4), page_size=PAGE_SIZE, layout=KVLayout.KEYS_BY_TOKEN)
    library = FakeFlashInfer(LateStream(random.Random(0), []))
    attention = FlashInferAttention(
        config,
        cache,
        AttentionKernels(library, TorchHeadWriter()),
        nullcontext,
        requests=2,
        deterministic=deterministic,
    )
    attention.for_decode(Steps(0).static[2])
    assert {each.use_tensor_cores for each in library.decoders} == {tensor_cores}


@pytest.mark.parametrize(
    ("lens", "planned"),
    [
        ([40, 40, 40], [3]),
        ([8, 9], [1, 1]),  # 16 and 18 rows, times heads a key-value head: tiles of 16 and of 64
        ([1, 1, 30, 33, 40, 2], [2, 1, 2, 1]),
    ],
)
def test_requests_are_planned_together_only_if_alone_they_had_the_same_tiles(
    lens: list[int], planned: list[int]
) -> None:
    steps = Steps(0, deterministic=True)
    many = list(range(len(lens)))
    kv_lens = torch.tensor(lens)
    tables = torch.arange(len(lens) * WIDTH).view(-1, WIDTH).int()[many] % PAGES
    steps.attention._kv_lens = torch.zeros(9, dtype=torch.int32)
    steps.attention._starts = torch.zeros(18, dtype=torch.int32)
    host = PagedBatch.of(kv_lens, kv_lens, tables, PAGE_SIZE)
    steps.attention.plan_extend(host, host)
    full = [wrapper.requests[-1] for wrapper in steps.library.prefills[::3]]
    assert full == planned


@pytest.mark.parametrize(
    ("cached", "lens", "split"),
    [((0, 0), (20, 1), False), ((20, 0), (20, 9), False), ((21, 0), (20, 9), True), ((0, 9), (20, 1), True)],
)
def test_keys_are_split_where_most_are_not_the_step_s_own(
    cached: tuple[int, int], lens: tuple[int, int], split: bool
) -> None:
    steps = Steps(0)
    steps.kv_lens[:2] = cached
    steps.extend([0, 1], lens)
    eager = [wrapper for wrapper in steps.library.prefills if not wrapper.static]
    assert {wrapper.splits[-1] for wrapper in eager} == {split}


@pytest.mark.parametrize(
    ("changes", "dtype", "capability", "deterministic", "sentence"),
    [
        ({"head_dim": 96}, torch.bfloat16, (9, 0), False, "head_dim 96"),
        (
            {"ropes": (None, Rope(1e4, 24, None))},
            torch.bfloat16,
            (9, 0),
            False,
            "multiples of 16 .* model's 24 would",
        ),
        ({}, torch.float32, (9, 0), False, "no kernels for float32"),
        ({}, torch.bfloat16, (7, 5), False, "compute capability 8.0 or more, this one has 7.5"),
        ({}, torch.bfloat16, (8, 9), True, "deterministic needs a GPU of compute capability 9.0"),
    ],
)
def test_what_flashinfer_cannot_compute_is_refused_by_name(
    changes: dict[str, Any],
    dtype: torch.dtype,
    capability: tuple[int, int],
    deterministic: bool,
    sentence: str,
) -> None:
    config = replace(CONFIG, **{"head_dim": 128} | changes)
    with pytest.raises(ConfigError, match=f"{sentence}.*use device cpu"):
        check_bounds(config, dtype, capability, deterministic=deterministic)


def test_what_flashinfer_can_compute_is_not_refused() -> None:
    for head_dim in (64, 128, 256):
        check_bounds(replace(CONFIG, head_dim=head_dim), torch.bfloat16, (8, 0))
        check_bounds(replace(CONFIG, head_dim=head_dim), torch.float16, (7, 5))
    check_bounds(replace(CONFIG, head_dim=64), torch.bfloat16, (10, 0), deterministic=True)
    for rotary_dim in (16, 64, 96):  # StableLM, GLM, Phi-4-mini
        ropes = (Rope(1e4, rotary_dim, None),)
        check_bounds(replace(CONFIG, head_dim=128, ropes=ropes), torch.bfloat16, (8, 0))


def test_a_graph_of_prompts_refuses_a_plan_that_it_does_not_fit() -> None:
    steps = Steps(0)
    assert steps.graph is not None
    steps.library.extra_info = 8
    with pytest.raises(InvariantError, match="where a graph keeps"):
        steps.graph.plan(steps._padded(steps._batch([0], [5])))
