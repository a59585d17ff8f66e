"""Sums have the same bits on every rank, and graphs repeat them; what a graph cannot repeat is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from shared.engine.cuda.host_stream import record_graph
from shared.engine.parallel.collectives import Alone
from tests.unit.engine.parallel import rank_jobs
from tests.unit.engine.parallel.rank_jobs import numbers_of
from tests.unit.engine.parallel.rank_processes import RankProcesses

SHAPES = [(1, 8), (5, 33), (64, 72)]


def in_order(ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    total = numbers_of(0, shape, dtype).float()
    for rank in range(1, ranks):
        total = total + numbers_of(rank, shape, dtype).float()
    return total.to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_is_that_in_the_order_of_ranks_on_each_of_them(
    ranks: int, dtype: torch.dtype, rank_processes: RankProcesses
) -> None:
    for shape in SHAPES:
        wanted = in_order(ranks, shape, dtype).numpy()
        for total, every, numbers in rank_processes.run(ranks, rank_jobs.summed, shape, dtype):
            assert np.array_equal(total, wanted)
            for rank in range(ranks):
                assert np.array_equal(every[rank], numbers_of(rank, shape, dtype).float().numpy())
            assert numbers == [10 + rank for rank in range(ranks)]


def test_the_order_matters_to_these_numbers() -> None:
    """Else the test above shows nothing."""
    one, other, last = (numbers_of(rank, (64, 72), torch.float32) for rank in range(3))
    assert not torch.equal(one + other + last, last + other + one)


@pytest.mark.parametrize("ranks", [2, 4])
def test_by_torchs_own_collectives_all_ranks_have_the_same_bits(
    ranks: int, rank_processes: RankProcesses
) -> None:
    """What computes on GPUs, here over gloo: it says nothing of NCCL."""
    found = rank_processes.run(ranks, rank_jobs.summed_by_backend, (5, 33))
    wanted = in_order(ranks, (5, 33), torch.float32).numpy()
    for total, every in found:
        assert np.array_equal(total, found[0][0])
        assert np.allclose(total, wanted, rtol=1e-4, atol=1e-3)
        for rank in range(ranks):
            assert np.array_equal(every[rank], numbers_of(rank, (5, 33), torch.float32).numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_start_compares_the_bits_of_all_ranks(dtype: torch.dtype, rank_processes: RankProcesses) -> None:
    """With three ranks or more: of two numbers the sum has one order."""
    assert rank_processes.run(4, rank_jobs.checked, dtype, False) == ["ok"] * 4
    for sentence in rank_processes.run(4, rank_jobs.checked, dtype, True):
        assert sentence.startswith(
            "a sum of 524288 numbers has other bits on rank 1 than on rank 0, by OwnRankFirst"
        )


def test_one_rank_adds_nothing() -> None:
    x = torch.ones(2, 3)
    assert Alone().sum(x) is x
    assert torch.equal(Alone().gather(x), x.unsqueeze(0))
    assert Alone().numbers(7) == [7]


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_graph_adds_up_again(ranks: int, rank_processes: RankProcesses) -> None:
    for found, wanted in rank_processes.run(ranks, rank_jobs.replayed, 3):
        totals = [total.tobytes() for total, _ in found]
        assert len(set(totals)) == 3, "numbers differ from replay to replay"
        for (total, every), (eager_total, eager_every) in zip(found, wanted, strict=True):
            assert np.array_equal(total, eager_total)
            assert np.array_equal(every, eager_every)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """One rank, of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_graph_refuses_what_ends_in_the_background(group: dist.ProcessGroup) -> None:
    """Replays were without the sum, and said nothing."""
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"allreduce_.*in the background"):
        record_graph(lambda: dist.all_reduce(x, group=group))
    with pytest.raises(RuntimeError, match=r"all_reduce.*in the background"):
        record_graph(
            lambda: torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)
            )
        )


def _add_one(x: Tensor) -> None:
    x.add_(1)


LIBRARY: Any = torch.library.Library("segue_tests", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("add_one(Tensor(a!) x) -> ()")
LIBRARY.define("add_one_and_double(Tensor(a!) x) -> Tensor")
LIBRARY.define("look(Tensor x) -> ()")
LIBRARY.impl("add_one", _add_one, "CompositeExplicitAutograd")
LIBRARY.impl("add_one_and_double", lambda x: x.add_(1) * 2, "CompositeExplicitAutograd")
LIBRARY.impl("look", lambda _x: None, "CompositeExplicitAutograd")


def test_a_graph_repeats_an_operation_that_writes_and_returns_nothing() -> None:
    x = torch.zeros(2)
    replay = record_graph(lambda: torch.ops.segue_tests.add_one(x.view(2)))
    replay()
    assert x.tolist() == [2, 2]


@pytest.mark.parametrize("name", ["add_one_and_double", "look"])
def test_a_graph_refuses_an_operation_that_it_cannot_repeat(name: str) -> None:
    """What it returns beside what it writes would stay as it was; of what does neither nobody knows what it does."""
    with pytest.raises(RuntimeError, match=f"{name}.*cannot be repeated"):
        record_graph(lambda: getattr(torch.ops.segue_tests, name)(torch.zeros(2)))
