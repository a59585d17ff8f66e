"""FP8 is served, of weights and of KV: prompts at a prefill worker, streams at a decode worker that fetched pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.integration.deployments.aggregated import needs_prefill
from tests.integration.models.served_models import (
    TOKENS,
    assert_served_as,
    prompts_of,
    saved_as_clients_call_it,
    served_answers,
    vocab_size,
)
from tests.unit.engine.driver import Driver
from tests.unit.engine.fp8_models import store_in_fp8
from tests.unit.engine.tiny_models import SIZES


def llama() -> PreTrainedModel:
    sizes = SIZES | {"hidden_size": 192, "intermediate_size": 272, "vocab_size": vocab_size()}
    return LlamaForCausalLM(LlamaConfig(**sizes, head_dim=32))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "device"), [("channel", "cpu"), ("block", "cuda-on-cpu")])
@pytest.mark.long
def test_greedy_answers_are_those_of_the_dequantized_weights(name: str, device: str, tmp_path: Path) -> None:
    model, served = saved_as_clients_call_it(llama, tmp_path)
    store_in_fp8(name, model, served)
    assert_served_as(model, served, device)


@needs_prefill("no pages are fetched")
@pytest.mark.timeout(600)
def test_pages_of_8_bits_are_fetched(tmp_path: Path) -> None:
    """Answers are those of the same engine alone, but where rounding to e4m3 turns on a last bit of the batch."""
    _, served = saved_as_clients_call_it(llama, tmp_path)
    answers = served_answers(served, "cuda-on-cpu", kvCacheDtype="fp8_e4m3")
    settings: dict[str, Any] = {"device": "cuda-on-cpu", "kv_cache_dtype": "fp8_e4m3", "context_len": 256}
    driver, equal = Driver(served, slots=1, **settings), 0
    for prompt, answer in zip(prompts_of(served), answers, strict=True):
        driver.prefill(0, prompt, range(16))
        driver.decode([0], TOKENS - 1)
        equal += list(answer.token_ids) == driver.tokens[0]
    driver.close()
    assert equal >= 0.75 * len(answers)
