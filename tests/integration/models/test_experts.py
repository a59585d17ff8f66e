"""Mixtures of experts are served: prompts at a prefill worker, streams at a decode worker that fetched their KV.

The models have random weights and the small model's tokenizer; transformers computes the same ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.models.served_models import assert_served_as, saved_as_clients_call_it, vocab_size
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES, sized
from tests.unit.engine.quantized.mxfp4_models import store_in_mxfp4


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "device"),
    [
        ("qwen3-moe, 3 of 9, normalized", "cpu"),
        pytest.param("gpt-oss, sinks, windows, biases", "cuda-on-cpu", marks=pytest.mark.long),
    ],
)
def test_greedy_answers_are_those_of_transformers(family: str, device: str, tmp_path: Path) -> None:
    with sized(vocab_size=vocab_size()):
        model, served = saved_as_clients_call_it(EXPERT_FAMILIES[family], tmp_path)
    if "gpt-oss" in family:  # as it is published
        store_in_mxfp4(model, served)
    assert_served_as(model, served, device)
