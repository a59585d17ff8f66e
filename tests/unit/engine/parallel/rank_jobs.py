"""What ranks compute for tests; functions of a module, since processes find them by their names."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from shared.engine.cuda.host_stream import record_graph
from shared.engine.parallel.collectives import Collectives, NcclCollectives


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
