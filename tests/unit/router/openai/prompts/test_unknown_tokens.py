"""A tokenizer may have more tokens than the model: a text that takes one of those is refused by its number.

A worker would refuse it as well, as it refuses a router that errs: the client would hear 500.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from router.config import RouterConfig
from router.openai.prompts.prompts import Prompts
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError

KNOWN, BEYOND = "a", "the quick brown fox"


@pytest.fixture
def prompts(model_folder: Path, tmp_path: Path) -> Iterator[Prompts]:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    whole = Tokenizer(folder, template_seconds_max=5)
    largest = max(whole.encode(BEYOND, True, 99))
    assert max(whole.encode(KNOWN, True, 99)) < largest
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": largest}))
    shorter = Tokenizer(folder, template_seconds_max=5)
    assert whole.tokens <= whole.vocab_size
    assert shorter.tokens > shorter.vocab_size == largest, "of which the router warns at its start"
    made = Prompts(shorter, RouterConfig())
    yield made
    made.close()


def test_a_text_with_a_token_that_the_model_lacks_is_refused_by_its_number(prompts: Prompts) -> None:
    assert prompts.completion(msgspec.Raw(json.dumps(KNOWN).encode()), 99, 1)
    with pytest.raises(RequestError, match=r"prompt has token \d+ .* the model has 0 to \d+") as refused:
        prompts.completion(msgspec.Raw(json.dumps(BEYOND).encode()), 99, 1)
    assert refused.value.param == "prompt"
    chat = [{"role": "user", "content": BEYOND}]
    with pytest.raises(RequestError, match=r"messages has token \d+"):
        prompts.chat(msgspec.Raw(json.dumps(chat).encode()), 99)
