"""What transformers answers in float32, greedily, compared but for near ties, which are counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.deployments.streams import StreamedAnswer

NEAR_TIE = 1e-3  # a gap between the two best logits that rounding may turn
NEAR_TIES_MAX = (
    0.1  # of the answers, or one in a thousand tokens where they are long: more of them are no chance
)


def assert_answers_of_transformers(
    model: Path, prompts: Sequence[list[int]], answers: Sequence[StreamedAnswer], tokens: int
) -> None:
    """Each answer has so many tokens, which say its text, and transformers would have chosen each after those before.

    Its logits of an answer come at once, each after the answer's own tokens: what follows a near tie is judged, too.
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
        gaps = {
            step: float(row.max() - row[found[step]])
            for step, row in enumerate(rows)
            if int(row.argmax()) != found[step]
        }
        wrong = [step for step, gap in gaps.items() if gap >= NEAR_TIE]
        assert not wrong, f"a prompt of {len(prompt)} tokens has other tokens at {wrong[:3]} of its answer"
        if gaps:
            near_ties.append(max(gaps.values()))
    few = len(prompts) * max(NEAR_TIES_MAX, tokens / 1000)
    assert len(near_ties) <= few, f"too many near ties to be chance: {near_ties}"
