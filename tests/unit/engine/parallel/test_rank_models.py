"""Several ranks compute what one computes, and what transformers computes, for every family and format of weights.

Logits of 2 and 4 ranks differ from those of one by rounding alone. The largest gap that was measured is 1.0e-5 of the
largest logit; the bound is ten times that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from shared.engine.parallel.collectives import Alone
from tests.unit.engine import int4_models, tiny_models
from tests.unit.engine.driver import tokens_of
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES, sized
from tests.unit.engine.fp8_models import tiny_fp8
from tests.unit.engine.int4_models import tiny_int4
from tests.unit.engine.parallel import rank_jobs
from tests.unit.engine.parallel.rank_processes import RankProcesses
from tests.unit.engine.tiny_models import FAMILIES, VOCAB_SIZE, save_model

GAP_MAX = 1e-4  # of the largest logit
NEAR_TIE = 1e-3
PROMPT, DECODED = 37, 24
HEADS = {"hidden_size": 96, "num_attention_heads": 8}
# one of each architecture, and of each thing that is cut in its own way
DENSE = [
    "llama, tied, head_dim 24",
    "llama, biases, llama3 rope, inner size 1100",
    "mistral, sliding window",
    "qwen2, window in upper layers",
    "qwen3, qk-norm, head_dim 40",
    "gemma",
    "gemma2, caps and windows",
    "gemma3, two ropes",
    "phi3, partial rotation, window",
    "olmo2",
    "granite",
    "smollm3",
]
WITH_KV_HEADS = [
    ("llama, biases, llama3 rope, inner size 1100", 1),
    ("llama, biases, llama3 rope, inner size 1100", 8),
    ("olmo2", 1),
    ("olmo2", 8),
    ("phi3, partial rotation, window", 1),
]


class Ranks:
    """Compares models of several ranks with those of one, and with transformers'."""

    def __init__(self, processes: RankProcesses) -> None:
        self._processes = processes

    def compare(self, model: PreTrainedModel, folder: Path, counts: tuple[int, ...] = (2, 4)) -> None:
        """Logits of each step, the bits of all ranks, and greedy tokens."""
        prompt = tokens_of(5, PROMPT, VOCAB_SIZE)
        with torch.inference_mode():
            given: Any = model.generate(  # type: ignore[operator]
                torch.tensor([prompt]), max_new_tokens=DECODED, do_sample=False, eos_token_id=None
            )
            token_ids = given[0].tolist()
            exact = model(torch.tensor([token_ids])).logits[0].numpy()
        assert len(set(token_ids[PROMPT:])) > 2, "a model that repeats one token shows little"
        alone = self.run(1, folder, token_ids)
        for ranks in counts:
            found = self.run(ranks, folder, token_ids)
            assert_near(found, alone)
            assert_near(found, exact)
            for place in range(PROMPT - 1, len(token_ids) - 1):
                best = int(found[place].argmax())
                highest = np.sort(exact[place])[-2:]
                assert best == token_ids[place + 1] or highest[1] - highest[0] < NEAR_TIE

    def run(self, ranks: int, folder: Path, token_ids: list[int], *, rounded: bool = False) -> Any:
        """Logits, which are the same on all ranks."""
        steps = [20, PROMPT - 20, *[1] * (len(token_ids) - PROMPT)]
        if ranks == 1:
            return rank_jobs.logits(Alone(), folder, token_ids, steps, rounded)[0]
        found = self._processes.run(ranks, rank_jobs.logits, folder, token_ids, steps, rounded)
        assert len({bits for _, bits in found}) == 1, "all ranks have the same bits"
        return found[0][0]


def assert_near(found: Any, wanted: Any) -> None:
    gap = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert gap < GAP_MAX, f"{gap:.1e}"


@pytest.fixture
def ranks(rank_processes: RankProcesses) -> Ranks:
    return Ranks(rank_processes)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets sizes of the models that are made in a test."""

    def change(**changes: int) -> None:
        for name, size in changes.items():
            monkeypatch.setitem(tiny_models.SIZES, name, size)

    return change


@pytest.mark.parametrize(("family", "kv_heads"), [*((family, 2) for family in DENSE), *WITH_KV_HEADS])
def test_ranks_of_a_dense_family_compute_what_one_computes(
    family: str, kv_heads: int, ranks: Ranks, sizes: Callable[..., None], tmp_path: Path
) -> None:
    sizes(**HEADS, num_key_value_heads=kv_heads)
    ranks.compare(save_model(FAMILIES[family], tmp_path), tmp_path)


def test_every_dense_architecture_is_among_them() -> None:
    def architecture(family: str) -> str:
        return family.partition(",")[0]

    assert {architecture(family) for family in DENSE} == {architecture(family) for family in FAMILIES}


def test_fourteen_heads_are_shared_by_two(ranks: Ranks, tmp_path: Path) -> None:
    ranks.compare(save_model(FAMILIES["llama, 14 query heads on one kv head"], tmp_path), tmp_path, (2,))


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_ranks_that_hold_whole_experts_compute_what_one_computes(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Nine experts on two and four ranks, too."""
    with sized(num_attention_heads=8):
        model = save_model(EXPERT_FAMILIES[family], tmp_path)
    ranks.compare(model, tmp_path)


@pytest.mark.parametrize("name", ["channel", "tensor", "AutoFP8, static", "block"])
def test_ranks_read_parts_of_weights_of_8_bits(
    name: str, ranks: Ranks, sizes: Callable[..., None], tmp_path: Path
) -> None:
    sizes(**HEADS, head_dim=64)
    ranks.compare(tiny_fp8(name, "llama, biases, llama3 rope, inner size 1100", tmp_path), tmp_path)


def test_parts_of_a_row_are_rounded_to_8_bits_no_worse_than_the_row(
    ranks: Ranks, sizes: Callable[..., None], tmp_path: Path
) -> None:
    """Each rank rounds its part of a token with a scale of its own, so bits differ from those of one rank."""
    sizes(**HEADS, head_dim=64)
    model = tiny_fp8("channel", "llama, biases, llama3 rope, inner size 1100", tmp_path)
    token_ids = tokens_of(5, PROMPT + 4, VOCAB_SIZE)
    with torch.inference_mode():
        exact = model(torch.tensor([token_ids])).logits[0].numpy()
    errors = [
        float(np.square(ranks.run(count, tmp_path, token_ids, rounded=True) - exact).mean() ** 0.5)
        for count in (1, 2, 4)
    ]
    assert errors[0] > 1e-3, "inputs are rounded"
    assert max(errors) < 1.2 * errors[0]


@pytest.mark.parametrize(
    ("name", "family"), [("gptq, asym", "qwen3"), ("awq, rows", "llama"), ("packed, asym", "phi3")]
)
def test_ranks_read_parts_of_weights_of_4_bits(name: str, family: str, ranks: Ranks, tmp_path: Path) -> None:
    assert int4_models.WIDE["num_attention_heads"] == 4
    ranks.compare(tiny_int4(name, family, tmp_path, rounded=True), tmp_path)
