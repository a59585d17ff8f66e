"""Heads between projections and attention: the CUDA source, run on this CPU, does what torch does."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shared.engine.attention.flashinfer import AttentionKernels, FlashInferAttention
from shared.engine.attention.heads import HeadTransform
from shared.engine.attention.protocol import HeadWriter, PagedBatch
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.cuda.kernels.head_kernels import SOURCE, CudaHeadWriter
from shared.engine.model.torch_ops import TorchOps
from tests.doubles.fake_flashinfer import FakeFlashInfer
from tests.doubles.torch_head_writer import TorchHeadWriter
from tests.unit.engine.cuda.kernels.host_kernels import HostLaunch, compile_for_host
from tests.unit.engine.cuda.test_flashinfer_python import NowStream
from tests.unit.engine.driver import tokens_of
from tests.unit.engine.precision import Plan, errors, logits_of
from tests.unit.engine.tiny_models import GPU_FAMILIES, VOCAB_SIZE, tiny_model

HEADS, KV_HEADS, PAGE_SIZE, CONTEXT = 3, 2, 4, 50
LENS = ((5, 12), (1, 1), (3, 50))  # rows, and tokens in the cache
DTYPES = (torch.bfloat16, torch.float16)
LAYOUTS = (KVLayout.KEYS_BY_TOKEN, KVLayout.HEADS_APART)
TRANSFORMS = {
    "norm and rotation": (True, 1.0),
    "rotation": (False, 1.0),
    "half": (True, 0.5),
    "norm": (True, 0.0),
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> CudaHeadWriter:
    return CudaHeadWriter(HostLaunch(compile_for_host(SOURCE, tmp_path_factory.mktemp("heads"))))


class _Shape(NamedTuple):
    layers: int
    kv_heads: int
    head_dim: int


def batch_of() -> PagedBatch:
    lens = torch.tensor(LENS)
    tables = torch.randperm(40)[: len(LENS) * 13].view(len(LENS), 13).int()
    return PagedBatch.of(lens[:, 0], lens[:, 1], tables, PAGE_SIZE)


def transform_of(head_dim: int, dtype: torch.dtype, norms: bool, rotated: float) -> HeadTransform:
    q_norm, k_norm = (torch.rand(2, head_dim) + 0.5).to(dtype) if norms else (None, None)
    angles = torch.rand(CONTEXT, int(head_dim * rotated) // 2) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1) if rotated else None
    return HeadTransform(q_norm, k_norm, 1e-6, cos_sin)


def written(
    writer: HeadWriter,
    qkv: Tensor,
    transform: HeadTransform,
    batch: PagedBatch,
    kept: torch.dtype | None = None,
    layout: KVLayout = KVLayout.KEYS_BY_TOKEN,
) -> tuple[Tensor, Tensor]:
    """Queries to attend with, and all pages [pages, layers, 2, heads, page_size, head_dim]; as in a layer's step."""
    head_dim = qkv.shape[2]
    cache = KVCache(
        _Shape(3, KV_HEADS, head_dim),
        PageCounts(40),
        page_size=PAGE_SIZE,
        dtype=kept or qkv.dtype,
        layout=layout,
    )
    q, k, v = torch.split(qkv.clone(), [HEADS, KV_HEADS, KV_HEADS], dim=1)
    queries = writer.write(q, k, v, transform, batch, cache.paged_layer(1))
    return queries, torch.stack([cache.paged_layer(layer) for layer in range(3)], dim=1)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("head_dim", "dtype"), list(product((64, 128, 256), DTYPES)), ids=str)
def test_the_kernel_writes_and_returns_what_torch_does(
    kernel: CudaHeadWriter, head_dim: int, dtype: torch.dtype, name: str
) -> None:
    torch.manual_seed(head_dim)
    batch, transform = batch_of(), transform_of(head_dim, dtype, *TRANSFORMS[name])
    qkv = (torch.randn(len(batch.positions), HEADS + 2 * KV_HEADS, head_dim) * 3).to(dtype)
    for found, wanted in zip(
        *(written(each, qkv, transform, batch) for each in (kernel, TorchHeadWriter())), strict=True
    ):
        # Sums of squares are added up in another order, so that a few are rounded to the neighbour.
        torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)
        assert (found != wanted).float().mean() < 0.01
        assert transform.q_norm is not None or torch.equal(found, wanted)


def test_heads_that_lie_apart_are_written_where_they_are(kernel: CudaHeadWriter) -> None:
    """The layout of workers with several GPUs: the same numbers at other places, and no other layer touched."""
    torch.manual_seed(3)
    batch, transform = batch_of(), transform_of(64, torch.bfloat16, *TRANSFORMS["norm and rotation"])
    qkv = torch.randn(len(batch.positions), HEADS + 2 * KV_HEADS, 64).bfloat16()
    together, apart = (written(kernel, qkv, transform, batch, layout=layout) for layout in LAYOUTS)
    assert all(map(torch.equal, together, apart))
    assert apart[1][:, 1].any()
    assert not apart[1][:, [0, 2]].any()


@pytest.mark.parametrize(("head_dim", "dtype"), list(product((64, 128, 256), DTYPES)), ids=str)
def test_pages_of_8_bits_hold_what_torch_rounds_to(
    kernel: CudaHeadWriter, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(head_dim)
    batch, transform = batch_of(), transform_of(head_dim, dtype, *TRANSFORMS["norm and rotation"])
    qkv = (torch.randn(len(batch.positions), HEADS + 2 * KV_HEADS, head_dim) * 3).to(dtype)
    found, wanted = (
        written(each, qkv, transform, batch, torch.float8_e4m3fn) for each in (kernel, TorchHeadWriter())
    )
    torch.testing.assert_close(found[0], wanted[0], rtol=2 * torch.finfo(dtype).eps, atol=1e-2)
    pages, expected = found[1].float(), wanted[1].float()
    torch.testing.assert_close(pages, expected, rtol=2**-3, atol=2**-9)  # the neighbour
    assert (pages != expected).float().mean() < 0.01
    assert torch.equal(pages[:, :, 1], expected[:, :, 1]), "values have no norm, whose sums differ"
    assert expected[:, 1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_8_bits_are_rounded_as_torch_rounds_them(
    kernel: CudaHeadWriter, dtype: torch.dtype
) -> None:
    """All numbers of 16 bits as values: what is beyond 448 becomes that, and NaN stays NaN."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    rows = len(every) // 64
    tables = torch.arange(rows // PAGE_SIZE).int().unsqueeze(0)
    batch = PagedBatch.of(torch.tensor([rows]), torch.tensor([rows]), tables, PAGE_SIZE)
    found = []
    for writer in (kernel, TorchHeadWriter()):
        q = every.view(rows, 1, 64).clone()
        cells = torch.zeros(rows // PAGE_SIZE, 2, 1, PAGE_SIZE, 64, dtype=torch.float8_e4m3fn)
        writer.write(q, q.clone(), q.clone(), HeadTransform(), batch, cells)
        found.append(cells.float())
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    values = found[0][:, 1].flatten()
    assert values.isnan().sum() == every.isnan().sum()
    assert float(values.nan_to_num().abs().max()) == 448
    assert bool(((values.abs() > 0) & (values.abs() < 2**-6)).any()), "subnormal numbers are among them"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_rounded_as_torch_rounds_them(kernel: CudaHeadWriter, dtype: torch.dtype) -> None:
    """All numbers of 16 bits by a rotation, with overflow, infinities and NaN."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    rows = len(every) // 64
    angles = torch.full((rows, 32), 0.3)
    transform = HeadTransform(cos_sin=torch.cat((1.5 * angles.cos(), 1.5 * angles.sin()), dim=1))
    tables = torch.arange(rows // PAGE_SIZE).int().unsqueeze(0)
    batch = PagedBatch.of(torch.tensor([rows]), torch.tensor([rows]), tables, PAGE_SIZE)
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    for writer, kept in ((kernel, found), (TorchHeadWriter(), wanted)):
        q, cells = (
            every.view(rows, 1, 64).clone(),
            torch.zeros(rows // PAGE_SIZE, 2, 1, PAGE_SIZE, 64, dtype=dtype),
        )
        kept += [writer.write(q, q.clone(), q.clone(), transform, batch, cells), cells]
    for pair in zip(found, wanted, strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_families_are_as_near_as_transformers_with_the_kernel(
    kernel: CudaHeadWriter, family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_model(family, tmp_path)
    tokens = tokens_of(7, 60, VOCAB_SIZE)

    def plan_with(config: ModelConfig, cache: KVCache) -> Plan:
        stream: Any = NowStream()
        library = FakeFlashInfer(stream)
        return FlashInferAttention(
            config, cache, AttentionKernels(library, kernel), nullcontext, requests=4
        ).plan_extend

    found = logits_of(tmp_path, tokens, (40, 1, 19), TorchOps(), dtype=dtype, plan_with=plan_with)
    ours, theirs = errors(tmp_path, tokens, found, dtype)
    assert ours <= 1.5 * theirs
