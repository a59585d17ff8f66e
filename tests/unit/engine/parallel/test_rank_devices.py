"""The device of each of several ranks: graphs that add up over ranks, and pages for the rank with the least room."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.engine.config import Budget, EngineConfig
from shared.engine.cuda.extend_graphs import token_buckets
from shared.engine.cuda.graphs import buckets_for
from shared.engine.parallel.collectives import Alone
from tests.unit.engine import tiny_models
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES, sized
from tests.unit.engine.parallel import rank_jobs
from tests.unit.engine.parallel.rank_processes import RankProcesses
from tests.unit.engine.tiny_models import FAMILIES, save_model

SLOTS = 9
CONFIG = EngineConfig(
    pages=80, page_size=16, slots=SLOTS, context_len=128, extend_tokens=100, device="cuda-on-cpu"
)
# in every bucket of tokens, and more than any graph takes
LENS = [5, 16, 30, 60, 90, 7, 8, 9, 10]
GIB = 2**30


def save_dense(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.SIZES, "hidden_size", 96)
        patch.setitem(tiny_models.SIZES, "num_attention_heads", 8)
        save_model(FAMILIES["qwen3, qk-norm, head_dim 40"], folder)


def save_experts(folder: Path) -> None:
    with sized(num_attention_heads=8):
        save_model(EXPERT_FAMILIES["glm4-moe, shared, a dense layer"], folder)


@pytest.mark.parametrize("save", [save_dense, save_experts])
def test_graphs_over_ranks_give_in_every_bucket_what_eager_steps_give(
    save: Any, rank_processes: RankProcesses, tmp_path: Path
) -> None:
    save(tmp_path)
    alone, tokens, graphs, _ = rank_jobs.driven(Alone(), tmp_path, CONFIG, LENS, False)
    rows, prompts = ({size for size, steps in used.items() if steps} for used in graphs)
    assert rows == {str(size) for size in buckets_for(SLOTS)}
    assert prompts == {"eager", *map(str, token_buckets(64))}, "one prompt is longer than any graph"
    for ranks in (2, 4):
        eager = rank_processes.run(ranks, rank_jobs.driven, tmp_path, CONFIG, LENS, True)
        replayed = rank_processes.run(ranks, rank_jobs.driven, tmp_path, CONFIG, LENS, False)
        assert f"cpu by the path of a GPU, {ranks} ranks" in replayed[0][3]
        for by_slot, chosen, used, _ in replayed:
            assert (chosen, used) == (tokens, graphs)
            for slot, logits in by_slot.items():
                assert np.array_equal(logits, eager[0][0][slot])
                assert np.array_equal(logits, replayed[0][0][slot]), "the same bits on all ranks"
                gap = np.abs(logits - alone[slot]).max() / np.abs(alone[slot]).max()
                assert gap < 1e-4


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    save_dense(folder)
    return folder


def planned(processes: RankProcesses, ranks: int, *args: Any) -> list[Any]:
    return processes.run(ranks, rank_jobs.room, *args)


AUTO = dataclasses.replace(CONFIG, pages=None, slots=10**5, device_memory_share=1.0)


def test_all_ranks_get_the_pages_of_the_one_with_the_least_room(
    dense: Path, rank_processes: RankProcesses
) -> None:
    config = dataclasses.replace(AUTO, host_fraction=1.0, budget=Budget(4 * 2**20, "a test"))
    free = [5 * GIB, 4 * GIB, 4 * GIB - 2**24, 5 * GIB]
    found = planned(rank_processes, 4, dense, config, free)
    assert len({(pages, host, context) for pages, host, context, _, _ in found}) == 1
    pages, host_pages, _, _, memory = found[2]
    assert re.search(
        rf"^{pages} KV pages of 16 tokens \(rank 2 has room for the fewest: .* leaves ", found[2][3]
    )
    for rank in (0, 1, 3):
        assert "(all that rank 2 of 4 has room for, this one for " in found[rank][3]
    page_bytes = memory["kv"] // pages
    assert host_pages == 4 * 2**20 // 4 // 2 // page_bytes, "ranks share the host"


def test_a_rank_plans_for_its_share(dense: Path, rank_processes: RankProcesses) -> None:
    config = dataclasses.replace(CONFIG, device_memory_share=1.0)
    whole = rank_jobs.room(Alone(), dense, config, [40 * GIB])
    for ranks in (2, 4):
        for _, _, _, words, memory in planned(rank_processes, ranks, dense, config, [40 * GIB] * 4):
            kv = whole[4]["kv"] // 2  # of two key-value heads each rank has one
            assert memory["kv"] == kv
            assert memory["weights"] < whole[4]["weights"] * (0.55 if ranks == 2 else 0.35)
            assert words.startswith("80 KV pages of 16 tokens (as configured)")


def test_a_rank_without_room_ends_all_with_a_sentence(dense: Path, rank_processes: RankProcesses) -> None:
    found = planned(rank_processes, 2, dense, AUTO, [40 * GIB, GIB // 2])
    assert found[0] == "rank 1 of 2 has too little memory, and says of what in its own log"
    assert found[1].startswith("too little memory: ")
