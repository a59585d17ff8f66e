"""What one GPU holds of published mixtures of experts: the table of docs/operating.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.engine.checkpoint.dtypes import Dtypes
from shared.engine.checkpoint.model_config import ModelConfig, parse_model_config
from shared.engine.cuda.memory import graph_tokens, room_for
from shared.engine.model.experts import check_grouped
from shared.primitives.errors import ConfigError, ModelError
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.engine.cuda.cards import CARDS, CONFIG, card_memory

BF16 = Dtypes(torch.bfloat16, torch.bfloat16)
ROOMS: dict[str, tuple[int | None, ...]] = {
    "Qwen3-30B-A3B": (123_040, 279_328, 718_752),
    "Mixtral-8x7B-v0.1": (None, None, 287_600),
    "gpt-oss-20b": (636_032, 948_624, 1_827_472),
    "gpt-oss-120b": (None, None, None),
    "GLM-4.5-Air": (None, None, None),
    "Qwen3-235B-A22B": (None, None, None),
}


def _shape(name: str) -> ModelConfig:
    return parse_model_config(PUBLISHED[name].config)


@pytest.mark.parametrize("name", ROOMS)
def test_the_docs_say_how_many_tokens_of_kv_fit(name: str) -> None:
    docs = Path("docs/operating.md").read_text(encoding="utf-8")
    for tokens, gib in zip(ROOMS[name], CARDS.values(), strict=True):
        if tokens is None:
            with pytest.raises(ModelError, match="too little memory"):
                room_for(_shape(name), BF16, CONFIG, card_memory(gib))
            continue
        room = room_for(_shape(name), BF16, CONFIG, card_memory(gib))
        assert room.pages * 16 == tokens
        assert f"| {tokens:,} |" in docs


def test_graphs_of_prompts_follow_what_is_computed_and_not_what_is_stored() -> None:
    dense, experts = _shape("Qwen3-14B"), _shape("Qwen3-30B-A3B")
    assert experts.parameters > 2 * dense.parameters
    assert graph_tokens(experts, 2048) > 4 * graph_tokens(dense, 2048)


@pytest.mark.parametrize(
    ("name", "dtype", "capability", "message"),
    [
        ("Qwen3-30B-A3B", torch.bfloat16, (8, 0), "compute capability 9.0 or 10.0, found 8.0"),
        ("Qwen3-30B-A3B", torch.float16, (9, 0), "computed in bfloat16, got dtype float16"),
        ("Qwen3-30B-A3B", torch.bfloat16, (9, 0), None),
        ("GLM-4.5-Air", torch.bfloat16, (10, 0), None),
    ],
)
def test_a_gpu_without_the_kernel_is_refused(
    name: str, dtype: torch.dtype, capability: tuple[int, int], message: str | None
) -> None:
    if message is None:
        check_grouped(_shape(name), dtype, capability)
        return
    with pytest.raises(ConfigError, match=message):
        check_grouped(_shape(name), dtype, capability)
