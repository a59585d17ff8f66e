"""lm-eval's `local-completions` beside its `hf` model: the loglikelihoods of 100 requests, and a few generations."""

from __future__ import annotations

import os
import random

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from told import BASE_URL, MODEL, Sums

REQUESTS = 100
TOLERANCE = 1e-3
TEXT = (
    "the river ran below a town of seven bridges where an old clock told two hours and nobody minded much because "
    "bread was good and boats came late with salt oranges news and letters for people who had moved away long ago"
)
WORDS = [*TEXT.split(" ")]


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def main() -> None:
    folder, rng = os.environ["SEGUE_MODEL_FOLDER"], random.Random(5)
    asked = [
        Instance(
            "loglikelihood", {}, (text(rng, rng.randint(3, 25)), " " + text(rng, rng.randint(1, 6))), number
        )
        for number in range(REQUESTS)
    ]
    served = LocalCompletionsAPI(
        model=MODEL,
        base_url=f"{BASE_URL}/completions",
        tokenizer=folder,
        tokenizer_backend="huggingface",
        num_concurrent=4,
        max_retries=1,
        batch_size=1,
    )
    found = served.loglikelihood(asked)
    expected = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=1).loglikelihood(asked)
    assert len(found) == len(expected) == REQUESTS
    for (one, _), (other, _) in zip(found, expected, strict=True):
        assert abs(one - other) < TOLERANCE, (one, other)
    told = Sums()
    told.answers += REQUESTS
    until = {"until": ["\n"], "max_gen_toks": 16}
    told.answers += len(
        served.generate_until(
            [Instance("generate_until", {}, (text(rng, 20), until), number) for number in range(5)]
        )
    )
    told.write()


main()
