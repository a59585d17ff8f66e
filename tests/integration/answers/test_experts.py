"""Mixtures of experts are served: prompts at a prefill worker, streams at a decode worker that fetched their KV.

The models have random weights and the small model's tokenizer; transformers computes the same ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.integration.answers.answers_of_transformers import assert_answers_of_transformers
from tests.integration.answers.prompts import varied_prompts
from tests.integration.deployments.aggregated import PROMPT_ROLE
from tests.integration.deployments.cut_model import cut_model
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.streams import crowd
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES, sized
from tests.unit.engine.quantized.mxfp4_models import store_in_mxfp4
from tests.unit.engine.tiny_models import save_model

TOKENS = 12
PROMPT_TOKENS_MAX = 200
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": TOKENS,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}
WORKER = {"kvPages": 160, "contextLen": 256, "maxRunningRequests": 4}


def model_with_tokenizer(make: Callable[[], PreTrainedModel], folder: Path) -> PreTrainedModel:
    """Save a model with the vocabulary of the small one."""
    vocab = json.loads((cut_model() / "config.json").read_text())["vocab_size"]
    with sized(vocab_size=vocab):
        model = save_model(make, folder)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(cut_model() / name, folder)
    return model


def fetched(running: LocalDeployment) -> float:
    """Bytes of KV that decode workers have read."""
    pages = [running.metrics(process) for process in running.processes("decode")]
    return sum(
        value
        for page in pages
        for name, value in page.items()
        if name.startswith("segue_kv_transport_bytes_total")
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "device"),
    [("qwen3-moe, 3 of 9, normalized", "cpu"), ("gpt-oss, sinks, windows, biases", "cuda-on-cpu")],
)
def test_greedy_answers_are_those_of_transformers(family: str, device: str, tmp_path: Path) -> None:
    served, reference = tmp_path / cut_model().name, tmp_path / "reference"  # as clients call it
    model = model_with_tokenizer(EXPERT_FAMILIES[family], served)
    shutil.copytree(served, reference)
    if "gpt-oss" in family:  # as it is published
        store_in_mxfp4(model, served)
        model.save_pretrained(reference)
    prompts = [prompt for prompt in varied_prompts(served) if len(prompt) <= PROMPT_TOKENS_MAX][::2]
    flags = ("--model", str(served), "--threads", "1", "--device", device)
    with deployment(*flags, config={"prefill": WORKER, "decode": WORKER}) as running:
        answers = crowd(running.url, prompts, 4, **GREEDY)
        assert_answers_of_transformers(reference, prompts, answers, TOKENS)
        assert running.total(PROMPT_ROLE, "segue_steps_total{mode=extend}") > 0
        assert fetched(running) > 0
        assert not running.held()
