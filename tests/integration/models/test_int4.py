"""Weights of 4 bits are served: prompts at a prefill worker, streams at a decode worker that fetched pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.integration.models.served_models import assert_served_as, saved_as_clients_call_it, vocab_size
from tests.unit.engine.int4_models import WIDE, store_in_int4


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**WIDE | {"vocab_size": vocab_size()}))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "device"), [("awq", "cpu"), pytest.param("gptq, asym", "cuda-on-cpu", marks=pytest.mark.long)]
)
def test_greedy_answers_are_those_of_the_dequantized_weights(name: str, device: str, tmp_path: Path) -> None:
    """On `cuda-on-cpu` dequantized as the kernel of a GPU does it."""
    model, served = saved_as_clients_call_it(llama, tmp_path)
    store_in_int4(name, model, served, rounded=device != "cpu")
    assert_served_as(model, served, device)
