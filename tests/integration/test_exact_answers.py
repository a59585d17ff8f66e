"""The default model, disaggregated, says what transformers says: alone, in a crowd, and when pages run short.

Greedy tokens are compared by one teacher-forced pass of transformers' own model in float32 over prompt and answer: each
token must be the argmax, or lie within a near tie of it. Segue against itself is compared without any tolerance.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.integration.deployment import Deployment, deployment, until
from tests.integration.prompts import varied_prompts
from tests.integration.streams import crowd
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.model_store import resolve

NEAR_TIE = 1e-3  # a gap between the two best logits that rounding may turn
TOKENS = 24
GREEDY = {"temperature": 0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model() -> Path:
    return Path(resolve("smollm2", lambda _line: None))


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    return varied_prompts(model)


@pytest.fixture(scope="module")
def alone(one_each: Deployment, prompts: list[list[int]]) -> list[str]:
    """Each prompt by itself."""
    return [answer.text for answer in crowd(one_each.url, prompts, 1, **GREEDY)]


@pytest.mark.timeout(600)
def test_greedy_answers_are_those_of_transformers(
    model: Path, prompts: list[list[int]], alone: list[str]
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    near_ties, widest = 0, 0.0
    for prompt, text in zip(prompts, alone, strict=True):
        answer = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([prompt + answer])
        with torch.inference_mode():
            logits = reference(tokens).logits[0, len(prompt) - 1 : -1]  # [answer, vocab]
        chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
        gaps = logits.max(dim=-1).values - chosen
        assert gaps.max() < NEAR_TIE, f"a prompt of {len(prompt)} tokens: gaps {gaps.tolist()}"
        near_ties += int((gaps > 0).sum())
        widest = max(widest, float(gaps.max()))
    print(f"{near_ties} near ties, the widest {widest:.1e}")  # noqa: T201


@pytest.mark.timeout(600)
def test_sixteen_at_a_time_get_the_answers_each_got_alone(
    one_each: Deployment, prompts: list[list[int]], alone: list[str]
) -> None:
    before = one_each.total("decode", "segue_kv_fetched_bytes_total")
    together = crowd(one_each.url, prompts, 16, **GREEDY)
    assert [answer.text for answer in together] == alone
    assert one_each.total("decode", "segue_kv_fetched_bytes_total") > before


@pytest.mark.timeout(900)
def test_retracted_requests_get_the_answers_they_got_alone(
    prompts: list[list[int]], alone: list[str]
) -> None:
    """A decode pool that holds one long request or a few short ones, and forgets none of them."""
    short = [place for place, prompt in enumerate(prompts) if len(prompt) <= 600]
    tight = ("--set", "prefill.pages=1200,decode.pages=60,decode.host_share=4.0,decode.init_new_token_ratio=0.01")
    with deployment(*tight) as running:
        together = crowd(running.url, [prompts[place] for place in short], 16, **GREEDY)
        assert [answer.text for answer in together] == [alone[place] for place in short]
        assert running.total("decode", "segue_retractions_total") >= 1
        assert running.total("decode", "segue_resumes_total") >= 1
        until(lambda: not running.held(), 5, "everything given back")
