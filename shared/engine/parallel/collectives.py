"""How ranks add up and gather what each of them computed.

A collective gives the same bits on every rank. With experts that is correctness: ranks that round in other ways choose
other experts. So nothing here adds in an order that begins with the own rank.

    Alone               one rank: nothing to do
    GlooCollectives     on CPUs: parts are gathered and added in the order of ranks, in float32, and rounded once. A row
                        has the same bits whatever rows are beside it
    NcclCollectives     on GPUs, by NCCL on the current stream. Not run yet: no machine with two GPUs was at hand

All ranks ask for the same in the same order; whoever asks for something else waits for ever. Who they are and how they
met is that of a process group of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from shared.engine.parallel.shares import Share
from shared.primitives.errors import RankError, StartError


class Collectives(Protocol):
    """What ranks do together, each on tensors of one shape and type."""

    @property
    def share(self) -> Share:
        """Which rank this is, and of how many."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x; may overwrite x."""

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x in the order of ranks, [ranks, …]."""

    def numbers(self, number: int) -> list[int]:
        """All ranks' numbers, on the host; waits for all. While nothing is computed."""


class Alone:
    """One rank."""

    share = Share()

    def sum(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        return x.unsqueeze(0)

    def numbers(self, number: int) -> list[int]:
        """See `Collectives`."""
        return [number]


ALONE = Alone()


class GlooCollectives:
    """Ranks on CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """`group`: of gloo, with this process in it."""
        self.share = Share(dist.get_rank(group), dist.get_world_size(group))
        self._name = group.group_name

    def sum(self, x: Tensor) -> Tensor:
        """See `Collectives`; x is overwritten."""
        assert x.is_contiguous()
        torch.ops.segue.sum_by_rank(x, self._name)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        found = x.new_empty(self.share.ranks, *x.shape)
        torch.ops.segue.gather_by_rank(x.contiguous(), found, self._name)
        return found

    def numbers(self, number: int) -> list[int]:
        """See `Collectives`."""
        found: list[int] = self.gather(torch.tensor([number])).flatten().tolist()
        return found


# Numbers that are added up at start: libraries choose kernels by size. 4 KiB to 8 MiB in 16 bits.
_CHECKED_SIZES = (2**11, 2**15, 2**19, 2**22)


def require_same_bits(collectives: Collectives, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `StartError` unless sums of numbers of this type have the same bits on all ranks; waits for all."""
    share, generator = collectives.share, torch.Generator().manual_seed(collectives.share.rank)
    for size in _CHECKED_SIZES:
        # Two ranks have numbers that cancel, so large that what is added between them is lost: the order shows.
        places, numbers = torch.arange(size) % share.ranks, torch.randn(size, generator=generator) * 2.0**-12
        numbers += 2.0**15 * (places == share.rank) - 2.0**15 * ((places + 1) % share.ranks == share.rank)
        total = collectives.sum(numbers.to(device, dtype)).cpu()
        octets = total.view(torch.uint8).long()
        found = collectives.numbers(int((octets * torch.arange(1, len(octets) + 1)).sum()))
        if strange := [rank for rank, bits in enumerate(found) if bits != found[0]]:
            raise StartError(
                f"a sum of {size} numbers has other bits on rank {strange[0]} than on rank 0, by "
                f"{type(collectives).__name__}: expected the same on all {len(found)}; ranks would choose other "
                "experts and write other keys, so none may start"
            )


# Operations of torch that say what they write: a graph on the CPU repeats them by that (`cuda.host_stream`). Those of
# torch.distributed end in the background, which nothing repeats.
_LIBRARY: Any = torch.library.Library("segue", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("sum_by_rank(Tensor(a!) x, str group) -> ()")
_LIBRARY.define("gather_by_rank(Tensor x, Tensor(a!) found, str group) -> ()")


def _sum_by_rank(x: Tensor, group: str) -> None:
    parts = x.new_empty(_group(group).size(), *x.shape)
    _gather_by_rank(x, parts, group)
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    x.copy_(total)


def _gather_by_rank(x: Tensor, found: Tensor, group: str) -> None:
    # as bytes: gloo knows few types
    octets = [part.flatten().view(torch.uint8) for part in found]
    try:
        dist.all_gather(octets, x.flatten().view(torch.uint8), group=_group(group))
    except RuntimeError as error:
        raise RankError(f"another rank has left an exchange: {error}") from error


def _group(name: str) -> dist.ProcessGroup:
    resolve: Callable[[Any], dist.ProcessGroup] = torch._C._distributed_c10d._resolve_process_group
    return resolve(name)


_LIBRARY.impl("sum_by_rank", _sum_by_rank, "CompositeExplicitAutograd")
_LIBRARY.impl("gather_by_rank", _gather_by_rank, "CompositeExplicitAutograd")


class NcclCollectives:
    """Ranks on GPUs. NCCL reduces an element in one place and passes the result on, so all have the same bits."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """`group`: of NCCL, with this process in it."""
        self.share = Share(dist.get_rank(group), dist.get_world_size(group))
        self._group = group

    def sum(self, x: Tensor) -> Tensor:
        """See `Collectives`; x is overwritten."""
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        found = x.new_empty(self.share.ranks, *x.shape)
        dist.all_gather(list(found), x.contiguous(), group=self._group)
        return found

    def numbers(self, number: int) -> list[int]:
        """See `Collectives`."""
        found: list[int] = self.gather(torch.tensor([number], device="cuda")).flatten().tolist()
        return found
