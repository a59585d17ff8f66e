"""Serves tiny models with the small one's tokenizer, and compares their answers with transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.integration.deployments.aggregated import AGGREGATED, PROMPT_ROLE
from tests.integration.deployments.cut_model import cut_model
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.streams import StreamedAnswer, crowd
from tests.integration.models.answers_of_transformers import assert_answers_of_transformers
from tests.integration.models.prompts import varied_prompts
from tests.unit.engine.tiny_models import save_model
from tests.waiting import until

TOKENS = 12
PROMPT_TOKENS_MAX = 200
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": TOKENS,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}
WORKER = {"kvPages": 160, "contextLen": 256, "maxRunningRequests": 4}


def vocab_size() -> int:
    """That of the small model."""
    return int(json.loads((cut_model() / "config.json").read_text())["vocab_size"])


def saved_as_clients_call_it(
    make: Callable[[], PreTrainedModel], folder: Path
) -> tuple[PreTrainedModel, Path]:
    """Save a model of that vocabulary below `folder`, with the small one's tokenizer and name."""
    served = folder / cut_model().name
    model = save_model(make, served)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(cut_model() / name, served)
    return model, served


def prompts_of(folder: Path) -> list[list[int]]:
    """Prompts that fit the workers."""
    return [prompt for prompt in varied_prompts(folder) if len(prompt) <= PROMPT_TOKENS_MAX][::2]


def served_answers(served: Path, device: str, **settings: Any) -> list[StreamedAnswer]:
    """Greedy answers to `prompts_of` the model, computed at a prefill worker and by one that has fetched the pages."""
    worker = WORKER | settings
    flags = ("--model", str(served), "--threads", "1", "--device", device)
    with deployment(*flags, config={"prefill": worker, "decode": worker}) as running:
        answers = crowd(running.url, prompts_of(served), 4, **GREEDY)
        assert running.total(PROMPT_ROLE, "segue_steps_total{mode=extend}") > 0
        assert (_fetched(running) > 0) != AGGREGATED
        until(lambda: not running.held(), 10, "everything given back")
    return answers


def assert_served_as(model: Any, served: Path, device: str) -> None:
    """The deployment's answers are those of transformers' `model`, which may be stored otherwise in `served`."""
    reference = served.parent / "reference"
    shutil.copytree(served, reference)  # for the tokenizer
    model.save_pretrained(reference)
    answers = served_answers(served, device)
    assert_answers_of_transformers(reference, prompts_of(served), answers, TOKENS)


def _fetched(running: LocalDeployment) -> float:
    """Bytes of KV that decode workers have read."""
    pages = [running.metrics(process) for process in running.processes("decode")]
    return sum(
        value
        for page in pages
        for name, value in page.items()
        if name.startswith("segue_kv_transport_bytes_total")
    )
