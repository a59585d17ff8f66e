"""FP8 is served, of weights and of KV: prompts at a prefill worker, streams at a decode worker that fetched pages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.integration.answers.answers_of_transformers import assert_answers_of_transformers
from tests.integration.answers.prompts import varied_prompts
from tests.integration.answers.test_experts import (
    GREEDY,
    PROMPT_TOKENS_MAX,
    TOKENS,
    WORKER,
    fetched,
    model_with_tokenizer,
)
from tests.integration.deployments.aggregated import PROMPT_ROLE
from tests.integration.deployments.cut_model import cut_model
from tests.integration.deployments.deployment import deployment
from tests.integration.deployments.streams import crowd
from tests.unit.engine.driver import Driver
from tests.unit.engine.fp8_models import store_in_fp8
from tests.unit.engine.tiny_models import SIZES


def llama() -> PreTrainedModel:
    vocab = json.loads((cut_model() / "config.json").read_text())["vocab_size"]
    sizes = SIZES | {"hidden_size": 192, "intermediate_size": 272, "vocab_size": vocab}
    return LlamaForCausalLM(LlamaConfig(**sizes, head_dim=32))


def prompts_of(folder: Path) -> list[list[int]]:
    return [prompt for prompt in varied_prompts(folder) if len(prompt) <= PROMPT_TOKENS_MAX][::2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "device"), [("channel", "cpu"), ("block", "cuda-on-cpu")])
def test_greedy_answers_are_those_of_the_dequantized_weights(name: str, device: str, tmp_path: Path) -> None:
    served, reference = tmp_path / cut_model().name, tmp_path / "reference"  # as clients call it
    model = model_with_tokenizer(llama, served)
    shutil.copytree(served, reference)
    store_in_fp8(name, model, served)
    model.save_pretrained(reference)
    prompts = prompts_of(served)
    flags = ("--model", str(served), "--threads", "1", "--device", device)
    with deployment(*flags, config={"prefill": WORKER, "decode": WORKER}) as running:
        answers = crowd(running.url, prompts, 4, **GREEDY)
        assert_answers_of_transformers(reference, prompts, answers, TOKENS)
        assert running.total(PROMPT_ROLE, "segue_steps_total{mode=extend}") > 0
        assert fetched(running) > 0
        assert not running.held()


@pytest.mark.timeout(600)
def test_pages_of_8_bits_are_fetched(tmp_path: Path) -> None:
    """Answers are those of the same engine alone, but where rounding to e4m3 turns on a last bit of the batch."""
    served = tmp_path / cut_model().name
    model_with_tokenizer(llama, served)
    prompts, worker = prompts_of(served), WORKER | {"kvCacheDtype": "fp8_e4m3"}
    flags = ("--model", str(served), "--threads", "1", "--device", "cuda-on-cpu")
    with deployment(*flags, config={"prefill": worker, "decode": worker}) as running:
        answers = crowd(running.url, prompts, 4, **GREEDY)
        read = fetched(running)
        assert read > 0
        assert not running.held()
    settings: dict[str, Any] = {"device": "cuda-on-cpu", "kv_cache_dtype": "fp8_e4m3", "context_len": 256}
    driver, equal = Driver(served, slots=1, **settings), 0
    for prompt, answer in zip(prompts, answers, strict=True):
        driver.prefill(0, prompt, range(16))
        driver.decode([0], TOKENS - 1)
        equal += list(answer.token_ids) == driver.tokens[0]
    driver.close()
    assert equal >= 0.75 * len(prompts)
