"""What transformers answers in float32, greedily, compared up to the first near tie; near ties are counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.deployments.streams import StreamedAnswer

NEAR_TIE = 1e-3  # a gap between the two best logits that rounding may turn
NEAR_TIES_MAX = 0.1  # of the prompts: more of them are no chance


def assert_answers_of_transformers(
    model: Path, prompts: Sequence[list[int]], answers: Sequence[StreamedAnswer], tokens: int
) -> None:
    """Each answer has so many tokens, which say its text, and transformers would have chosen each after those before.

    All its logits come at once: as far as the tokens are its own, so is what is before each.
    """
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    near_ties: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        found = list(answer.token_ids)
        assert len(found) == tokens
        assert answer.text == tokenizer.decode(found, skip_special_tokens=True)
        with torch.inference_mode():
            rows = reference(torch.tensor([prompt + found[:-1]]), logits_to_keep=tokens).logits[0]
        wrong = [step for step, row in enumerate(rows) if int(row.argmax()) != found[step]]
        if wrong:
            row, token = rows[wrong[0]], found[wrong[0]]
            near_ties.append(float(row.max() - row[token]))
            assert near_ties[-1] < NEAR_TIE, (
                f"a prompt of {len(prompt)} tokens differs from token {wrong[0]} on"
            )
    assert len(near_ties) <= NEAR_TIES_MAX * len(prompts), f"too many near ties to be chance: {near_ties}"
