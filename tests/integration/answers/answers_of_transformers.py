"""What transformers answers in float32, greedily, compared up to the first near tie; near ties are counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEAR_TIE = 1e-3  # a gap between the two best logits that rounding may turn
NEAR_TIES_MAX = 0.1  # of the prompts: more of them are no chance


def assert_answers_of_transformers(
    model: Path, prompts: Sequence[list[int]], texts: Sequence[str], tokens: int
) -> None:
    """Each text is what so many tokens after its prompt say; the end of a sequence ends nothing."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.generation_config.eos_token_id = None  # as ignore_eos: sampled like any other, ends nothing
    tokenizer = AutoTokenizer.from_pretrained(model)
    near_ties: list[float] = []
    for prompt, text in zip(prompts, texts, strict=True):
        generated = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        wanted = generated.sequences[0, len(prompt) :].tolist()
        step = _first_difference(tokenizer, wanted, text)
        if step is None:
            continue
        best = torch.topk(generated.logits[step][0], 2).values
        near_ties.append(float(best[0] - best[1]))
        assert near_ties[-1] < NEAR_TIE, f"a prompt of {len(prompt)} tokens differs from token {step} on"
    assert len(near_ties) <= NEAR_TIES_MAX * len(prompts), f"too many near ties to be chance: {near_ties}"


def _first_difference(tokenizer: Any, tokens: list[int], text: str) -> int | None:
    """The first of the tokens that the text does not have; None if it has them all."""
    for step in range(len(tokens)):
        piece = tokenizer.decode(tokens[: step + 1], skip_special_tokens=True).rstrip("\ufffd")
        if not text.startswith(piece):
            return step
    return None
