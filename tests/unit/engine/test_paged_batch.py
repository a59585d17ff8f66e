"""The arrays of a batch are FlashInfer's, and plain attention over them is what the kernels compute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform
from shared.engine.attention.protocol import PagedBatch
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.kv_cache import INVALID_PAGE, KVCache, PageCounts
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.cpu.blocked import BlockedAttention
from shared.engine.cuda.host_stream import HostStream
from shared.primitives.errors import InvariantError

PAGE_SIZE, PAGES = 16, 64
CONFIG = ModelConfig(
    architecture="MistralForCausalLM",
    vocab_size=1,
    hidden_size=1,
    intermediate_size=1,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=24,
    context_len=512,
    rms_norm_eps=1e-6,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    windows=(None, 37),
    ropes=(None, None),
    experts=(None, None),
    attention_scale=24**-0.5,
)


def page_tables(*tables: Sequence[int]) -> Tensor:
    width = max(map(len, tables))
    return torch.tensor(
        [[*table, *[INVALID_PAGE] * (width - len(table))] for table in tables], dtype=torch.int32
    )


def drawn_batch(generator: torch.Generator) -> PagedBatch:
    """One to six requests: whole prompts, chunks in the middle of one, and single tokens."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    requests = draw(1, 7)
    kv_lens = [draw(1, 160) for _ in range(requests)]
    query_lens = [draw(1, kv_len + 1) if draw(0, 2) else 1 for kv_len in kv_lens]
    shuffled = torch.randperm(PAGES, generator=generator).tolist()
    tables = []
    for kv_len in kv_lens:
        count = -(-kv_len // PAGE_SIZE) + draw(0, 2)  # a page that is not yet used stays out
        tables.append([shuffled.pop() for _ in range(min(count, len(shuffled)))])
    return PagedBatch.of(torch.tensor(query_lens), torch.tensor(kv_lens), page_tables(*tables), PAGE_SIZE)


def test_rows_and_pages_of_ragged_requests() -> None:
    batch = PagedBatch.of(
        torch.tensor([3, 1, 2]), torch.tensor([20, 16, 2]), page_tables([7, 2], [9, 5], [4]), PAGE_SIZE
    )
    assert batch.qo_indptr.tolist() == [0, 3, 4, 6]
    assert batch.kv_indptr.tolist() == [0, 2, 3, 4]
    assert batch.kv_indices.tolist() == [7, 2, 9, 4]
    assert batch.kv_last_page_len.tolist() == [4, 16, 2]
    assert batch.batch_indices.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.positions.tolist() == [17, 18, 19, 15, 0, 1]
    assert batch.query_lens.tolist() == [3, 1, 2]
    assert batch.kv_lens.tolist() == [20, 16, 2]
    pages, slots = batch.cells()
    assert pages.tolist() == [2, 2, 2, 9, 4, 4]
    assert slots.tolist() == [1, 2, 3, 15, 0, 1]


@pytest.mark.parametrize("tables", [[[7, 2], [3]], [[7], [3]]], ids=["padded", "too narrow"])
def test_a_request_with_fewer_pages_than_tokens_is_refused(tables: list[list[int]]) -> None:
    with pytest.raises(InvariantError, match="page"):
        PagedBatch.of(torch.tensor([1, 1]), torch.tensor([20, 20]), page_tables(*tables), PAGE_SIZE)


@pytest.mark.parametrize("seed", range(30))
def test_attention_by_blocks_is_attention_over_the_same_pages(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = drawn_batch(generator)
    rows = len(batch.positions)
    caches = [KVCache(CONFIG, PageCounts(PAGES), page_size=PAGE_SIZE) for _ in range(2)]
    before = torch.randn(caches[0].store.shape, generator=generator)
    for cache in caches:
        cache.store.copy_(before)
    blocked = BlockedAttention(CONFIG, caches[0]).plan(batch)
    plain = ReferenceAttention(CONFIG, caches[1]).plan(batch)
    angles = torch.rand(int(batch.positions.max()) + 1, CONFIG.head_dim, generator=generator)
    turned = HeadTransform(torch.rand(CONFIG.head_dim), torch.rand(CONFIG.head_dim), 1e-5, angles)
    for layer in range(CONFIG.layers):
        q, k, v = (
            torch.randn(rows, heads, CONFIG.head_dim, generator=generator)
            for heads in (CONFIG.heads, CONFIG.kv_heads, CONFIG.kv_heads)
        )
        torch.testing.assert_close(
            blocked.attend(layer, q, k, v, turned), plain.attend(layer, q, k, v, turned), rtol=1e-5, atol=1e-5
        )
    assert torch.equal(caches[0].store, caches[1].store)
    assert not torch.equal(caches[0].store, before)


def test_a_graph_on_the_cpu_keeps_what_attention_returns_alone() -> None:
    """Keys and values that it gathers for sixteen requests of up to 4,096 tokens are 25 MB, and 75 MB for all heads."""
    rows, context_len = 16, 4096
    config = replace(CONFIG, layers=1, windows=(None,))
    cache = KVCache(config, PageCounts(PAGES), page_size=PAGE_SIZE)
    stream = HostStream(1)
    each = torch.arange(rows + 1, dtype=torch.int32)
    pages = torch.zeros(rows * context_len // PAGE_SIZE, dtype=torch.int32)
    first = torch.ones(rows, dtype=torch.int32)
    batch = PagedBatch(PAGE_SIZE, each, each, pages, first, each[:rows], torch.zeros_like(first))
    attention = ReferenceAttention(config, cache, stream, rows).for_decode(batch)
    attention.plan(each, first)
    q, k, v = (
        torch.randn(rows, heads, config.head_dim)
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    )

    def attend() -> None:
        attention.attend(0, q, k, v, HeadTransform())

    before = _resident_bytes()
    replay = stream.capture(attend)
    assert _resident_bytes() - before < 50e6
    stream.run(replay)
    stream.synchronize()
    stream.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
