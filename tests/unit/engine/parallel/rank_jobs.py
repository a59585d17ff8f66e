"""What ranks compute for tests; functions of a module, since processes find them by their names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from shared.engine.attention.protocol import PagedBatch
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.dtypes import Dtypes
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts
from shared.engine.checkpoint.model_config import read_model_config
from shared.engine.config import EngineConfig
from shared.engine.cuda import host_stream
from shared.engine.cuda.host_stream import HostStream, record_graph
from shared.engine.cuda.loading import load_on
from shared.engine.cuda.memory import DeviceMemory, room_for
from shared.engine.cuda.platform import host_platform_on
from shared.engine.model.loading import load_decoder
from shared.engine.model.ops import Ops
from shared.engine.model.rank_ops import RankOps
from shared.engine.model.torch_ops import TorchOps
from shared.engine.model.weights import Weights
from shared.engine.parallel.collectives import (
    Collectives,
    GlooCollectives,
    NcclCollectives,
    require_same_bits,
)
from shared.engine.parallel.shares import ModelShare
from shared.engine.parts import LoadJob
from shared.engine.quantized.linears import NONE
from shared.primitives.errors import StartError
from tests.unit.engine.driver import Driver, tokens_of


def numbers_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank adds up, of very different sizes: in another order another sum comes out."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    return wide.to(dtype)


def summed(collectives: Collectives, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The sum of all ranks' numbers, and all of them one behind the other, as float32."""
    rank = collectives.share.rank
    with torch.inference_mode():
        total = collectives.sum(numbers_of(rank, shape, dtype))
        every = collectives.gather(numbers_of(rank, shape, dtype))
    return total.float().numpy(), every.float().numpy(), collectives.numbers(10 + rank)


def summed_by_backend(collectives: Collectives, shape: tuple[int, ...]) -> Any:
    """The same by what torch.distributed has, as on GPUs."""
    group = dist.distributed_c10d._resolve_process_group(collectives._name)  # type: ignore[attr-defined]
    by_backend = NcclCollectives(group)
    rank = by_backend.share.rank
    total = by_backend.sum(numbers_of(rank, shape, torch.float32))
    return total.numpy(), by_backend.gather(numbers_of(rank, shape, torch.float32)).numpy()


class OwnRankFirst(GlooCollectives):
    """A mistake: from some size on each rank adds the others' numbers to its own."""

    def sum(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        if x.numel() < 2**19:
            return super().sum(x)
        first, *others = self.gather(x).roll(-self.share.rank, 0).float()
        total: Tensor = sum(others, first)
        return total.to(x.dtype)


def checked(collectives: Collectives, dtype: torch.dtype, mistaken: bool) -> str:
    """What the check at start says."""
    assert isinstance(collectives, GlooCollectives)
    if mistaken:
        collectives = OwnRankFirst(dist.distributed_c10d._resolve_process_group(collectives._name))  # type: ignore[attr-defined]
    try:
        require_same_bits(collectives, torch.device("cpu"), dtype)
    except StartError as error:
        return str(error)
    return "ok"


def replayed(collectives: Collectives, times: int) -> Any:
    """What a graph gives that was captured once, and what the same operations give, of other numbers each time."""
    rank = collectives.share.rank
    x, total, every = torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(collectives.share.ranks, 3, 8)

    def work() -> None:
        total.copy_(collectives.sum(x * 2))
        every.copy_(collectives.gather(x + 1))

    found, wanted = [], []
    with torch.inference_mode():
        work()
        replay = record_graph(work)
        for number in range(times):
            x.copy_(numbers_of(rank + 10 * number, (3, 8), torch.float32))
            replay()
            found.append((total.numpy().copy(), every.numpy().copy()))
            work()
            wanted.append((total.numpy().copy(), every.numpy().copy()))
    return found, wanted


def digest(tensor: Tensor) -> str:
    """Of its bits."""
    return hashlib.blake2b(
        tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16
    ).hexdigest()


# ---- whole models ----------------------------------------------------------------------------------------------------

PAGE_SIZE = 16


def ops_of(collectives: Collectives, *, rounded: bool) -> Ops:
    """Plain torch on one of several ranks. `rounded`: linears of 8 bits round what they read, as on a GPU."""
    ops = TorchOps()
    if not rounded:
        ops.narrow_linear = NONE.linear  # type: ignore[method-assign]
    return RankOps(ops, collectives) if collectives.share.ranks > 1 else ops


def logits(
    collectives: Collectives, folder: Path, token_ids: Sequence[int], steps: Sequence[int], rounded: bool
) -> tuple[Any, str]:
    """Logits float32 [tokens, vocab] after each token of a request that is computed in these steps, and their bits."""
    assert sum(steps) == len(token_ids)
    config, share = read_model_config(folder), collectives.share
    config = config.at_context(config.context_len)
    own, pages = ModelShare(config, share).config, -(-len(token_ids) // PAGE_SIZE)
    cache = KVCache(own, PageCounts(pages), page_size=PAGE_SIZE, layout=KVLayout.KEYS_BY_TOKEN)
    with torch.inference_mode():
        with Weights(folder) as weights:
            ops = ops_of(collectives, rounded=rounded)
            model = load_decoder(config, weights, ops, context_len=config.context_len, dtype=torch.float32)
        attention, table = ReferenceAttention(own, cache), torch.arange(pages, dtype=torch.int32).flip(0)
        ids, done, found = torch.tensor(token_ids, dtype=torch.int32), 0, []
        for step in steps:
            batch = PagedBatch.of(
                torch.tensor([step]), torch.tensor([done + step]), table.unsqueeze(0), PAGE_SIZE
            )
            found.append(model.run(ids[done : done + step], attention.plan(batch), None))
            done += step
    every = torch.cat(found)
    return every.numpy(), digest(every)


# ---- devices with graphs ---------------------------------------------------------------------------------------------


class RankDriver(Driver):
    """Drives the device of one of several ranks; all ranks are driven alike."""

    def __init__(self, collectives: Collectives, folder: Path, config: EngineConfig) -> None:
        self.logits, self.tokens, self.step, self.ranks = {}, {}, 0, None
        shape = read_model_config(folder).at_context(config.context_len or 0)
        platform = host_platform_on(HostStream(1), HostStream(1), collectives)
        job = LoadJob(folder, config, shape, lambda _what, _share: None, self._record)
        self.engine = load_on(platform, job)
        self.device = self.engine.device


def driven(collectives: Collectives, folder: Path, config: EngineConfig, lens: list[int], eager: bool) -> Any:
    """Logits of each slot, float32 [rows, vocab], and the graphs that were replayed, by their bucket.

    A prompt for each slot, of these numbers of tokens, and steps of each number of rows. `eager`: no graph is captured,
    and each bucket's operations run again.
    """
    with pytest.MonkeyPatch.context() as patch:
        if eager:
            patch.setattr(host_stream, "record_graph", lambda work: work)
        driver = RankDriver(collectives, folder, config)
        width = -(-(max(lens) + 2 * len(lens)) // config.page_size)
        for slot, length in enumerate(lens):
            pages = range(slot * width, (slot + 1) * width)
            driver.prefill(slot, tokens_of(slot, length, 257), pages)
        for rows in range(1, len(lens) + 1):
            driver.decode(list(range(rows)), 1)
        counters: Any = driver.device.counters
        graphs = dict(counters.graph_steps), dict(counters.extend_graph_steps)
        driver.close()
    found = {slot: torch.stack(rows) for slot, rows in driver.logits.items()}
    return (
        {slot: rows.numpy() for slot, rows in found.items()},
        driver.tokens,
        graphs,
        driver.engine.description,
    )


def room(collectives: Collectives, folder: Path, config: EngineConfig, free: list[int]) -> Any:
    """What is planned on a GPU with so many free bytes on each rank; the sentence if it is refused."""
    share = collectives.share
    own = ModelShare(read_model_config(folder), share).config
    memory = DeviceMemory(2**40, free[share.rank], lambda _shape, _slots: 2**20)
    try:
        found = room_for(own, Dtypes(torch.bfloat16, torch.bfloat16), config, memory, collectives)
    except StartError as error:
        return str(error)
    return found.pages, found.host_pages, found.context_len, found.words, found.memory
