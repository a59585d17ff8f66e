"""DECODE attention over pages that hold all layers, whose heads lie together or apart, beside a pool by layer.

    python -m tests.benchmarks.gpu.attention                    a GPU
    python -m tests.benchmarks.gpu.attention --rehearse         plain torch on CPU: shows that it runs, no more

FlashInfer reads a layer of our pages through a strided view. That should cost at most 5 % of what it takes from memory
where each layer lies by itself, and heads that lie apart (`head-major-1`, for workers of several GPUs) 3 % more. Every
layer of a pool as large as in service is read once, in one graph, so that caches and address translation are as in a
step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from shared.engine.attention.flashinfer import AttentionKernels, FlashInferAttention
from shared.engine.attention.flashinfer_package import flashinfer_package
from shared.engine.attention.heads import HeadTransform
from shared.engine.attention.protocol import PagedBatch, PlanGuard, StreamAttention
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts, page_bytes
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.cuda.host_stream import HostStream
from shared.engine.cuda.kernels.head_kernels import CudaHeadWriter
from shared.engine.cuda.platform import CudaStream
from shared.engine.streams import Stream
from tests.benchmarks.gpu.offline import model_named, say

CASES = (
    ("0.6B", 64, 16),
    ("0.6B", 256, 16),
    ("0.6B", 256, 64),
    ("14B", 1, 16),
    ("14B", 64, 16),
    ("14B", 256, 64),
)
CONTEXT = 1024
REPEATS = 20


class ByLayer(KVCache):
    """The same pages, but each layer's lie by themselves: what is compared with, of no use to a transfer."""

    def paged_layer(self, layer: int) -> Tensor:
        """See `KVCache`."""
        return self._parts[layer]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KVCache`."""
        keys, values = self._parts[layer].unbind(1)
        return keys, values

    @property
    def _parts(self) -> Tensor:
        pages, layers, _, kv_heads, inner = self.store.shape
        return self.store.view(layers, pages, 2, kv_heads, self.page_size, inner // self.page_size)


PoolKind = tuple[type[KVCache], KVLayout]
KINDS: tuple[PoolKind, ...] = (
    (KVCache, KVLayout.KEYS_BY_TOKEN),
    (KVCache, KVLayout.HEADS_APART),
    (ByLayer, KVLayout.KEYS_BY_TOKEN),
)


@dataclass(frozen=True, slots=True)
class AttentionBench:
    """Where it runs."""

    stream: Stream
    attention: Callable[[ModelConfig, KVCache, int], StreamAttention]
    device: str
    dtype: torch.dtype
    pool_bytes: int
    context: int

    def seconds(self, of: PoolKind, config: ModelConfig, rows: int, page_size: int) -> float:
        """The median time of attention of all layers."""
        kind, layout = of
        each = -(-self.context // page_size)
        pages = max(rows * each, self.pool_bytes // page_bytes(config, page_size, self.dtype))
        cache = kind(
            config,
            PageCounts(pages),
            page_size=page_size,
            dtype=self.dtype,
            layout=layout,
            device=self.device,
        )
        batch = self._batch(rows, each, pages, page_size)
        planned = self.attention(config, cache, rows).for_decode(batch)
        planned.plan(batch.kv_indptr.cpu(), batch.kv_last_page_len.cpu())
        shape = (rows, config.kv_heads, config.head_dim)
        k = torch.randn(shape, dtype=self.dtype, device=self.device)
        q = torch.randn(rows, config.heads, config.head_dim, dtype=self.dtype, device=self.device)

        def work() -> None:
            for layer in range(config.layers):
                planned.attend(layer, q, k, k, HeadTransform())

        self.stream.synchronize()
        self.stream.run(work)
        replay = self.stream.capture(work)
        marks = [self.stream.record()]
        for _ in range(REPEATS):
            self.stream.run(replay)
            marks.append(self.stream.record())
        marks[-1].wait()
        return median(after.seconds_since(before) for before, after in pairwise(marks))

    def _batch(self, rows: int, each: int, pages: int, page_size: int) -> PagedBatch:
        """Rows of one length on pages drawn from the whole pool."""
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))[: rows * each]
        tables = order.int().view(rows, each)
        lens = torch.full((rows,), self.context)
        batch = PagedBatch.of(torch.ones_like(lens), lens, tables, page_size)
        names = [name for name in batch.__slots__ if name != "page_size"]
        return replace(batch, **{name: getattr(batch, name).to(self.device) for name in names})


def on_gpu(gib: float) -> AttentionBench:
    """FlashInfer."""
    device, library = torch.device("cuda", 0), flashinfer_package()
    stream, heads = CudaStream(device), CudaHeadWriter.compiled(device)

    def attention(config: ModelConfig, cache: KVCache, rows: int) -> FlashInferAttention:
        return FlashInferAttention(
            config, cache, AttentionKernels(library, heads), lambda: PlanGuard(stream.record), requests=rows
        )

    return AttentionBench(stream, attention, str(device), torch.bfloat16, int(gib * 2**30), CONTEXT)


def rehearsal() -> AttentionBench:
    """Plain torch."""
    stream = HostStream(1)
    attention = lambda config, cache, rows: ReferenceAttention(config, cache, stream, rows)  # noqa: E731
    return AttentionBench(stream, attention, "cpu", torch.float32, 0, 64)


def main() -> None:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--gib", type=float, default=60.0, help="size of the pool: as large as in service")
    given = parser.parse_args()
    if not given.rehearse and not torch.cuda.is_available():
        parser.exit(0, "skipped: torch finds no GPU\n")
    bench = rehearsal() if given.rehearse else on_gpu(given.gib)
    for name, rows, page_size in (("tiny", 2, 16),) if given.rehearse else CASES:
        config = model_named(name)
        ours, apart, theirs = (bench.seconds(kind, config, rows, page_size) for kind in KINDS)
        read = (
            2
            * rows
            * bench.context
            * config.layers
            * config.kv_heads
            * config.head_dim
            * bench.dtype.itemsize
        )
        say(
            f"{name}, batch {rows}, context {bench.context}, pages of {page_size}: {1e3 * ours:.3f} ms "
            f"({read / ours / 1e12:.2f} TB/s), by layer {1e3 * theirs:.3f} ms, ratio {ours / theirs:.2f}; "
            f"heads apart {1e3 * apart:.3f} ms, {apart / ours:.3f} times"
        )
    bench.stream.close()


if __name__ == "__main__":
    main()
