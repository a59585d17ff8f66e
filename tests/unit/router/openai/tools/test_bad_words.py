"""Which token ids a client's words become, and which requests could leave nothing to choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.openai.tools.structured_output import BAD_WORD_CHARS_MAX, BAD_WORDS_MAX, bad_word_ids
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError
from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.unit.router.tiny_model import END_ID

FEATURES = ("allowed_token_ids", "bad_words")


def post(router: RunningRouter, **fields: Any) -> httpx2.Response:
    body = {"model": MODEL, "prompt": "fox"} | fields
    return router.http.post("/v1/completions", json=body)


def test_a_word_is_masked_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    spelled = {tokenizer.decode_all(ids) for ids in bad_word_ids(["fox", " lazy"], tokenizer)}
    assert spelled == {"fox", " fox", "lazy", " lazy"}


def test_a_word_is_masked_once(tokenizer: Tokenizer) -> None:
    assert bad_word_ids(["fox", " fox", "fox"], tokenizer) == bad_word_ids(["fox"], tokenizer)


@pytest.mark.parametrize(
    ("words", "param"),
    [
        (["a"] * (BAD_WORDS_MAX + 1), "bad_words"),
        (["a", "x" * (BAD_WORD_CHARS_MAX + 1)], "bad_words[1]"),
        (["日" * 40], "bad_words[0]"),
        ([""], "bad_words[0]"),
        (["a", "  "], "bad_words[1]"),
    ],
    ids=["words", "characters", "tokens", "empty", "spaces"],
)
def test_words_that_are_too_many_or_too_long_are_refused(
    tokenizer: Tokenizer, words: list[str], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        bad_word_ids(words, tokenizer)
    assert refused.value.param == param


def test_workers_get_what_is_masked(model_folder: Path, tokenizer: Tokenizer) -> None:
    with RunningRouter(model_folder, features=FEATURES) as router:
        assert post(router, bad_words=["fox"], allowed_token_ids=[5, 6, END_ID]).status_code == 200
        params = router.last_prefill.params
        assert params.allowed_token_ids == (5, 6, END_ID)
        assert params.bad_words == bad_word_ids(["fox"], tokenizer)


def test_workers_that_would_ignore_it_are_not_asked(router: RunningRouter) -> None:
    heard = len(router.workers.prefills)
    refused = post(router, bad_words=["fox"])
    assert refused.status_code == 400
    assert "bad_words" in refused.json()["error"]["message"]
    assert len(router.workers.prefills) == heard


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [END_ID], "min_tokens": 2},
        {"allowed_token_ids": [400]},
        {"allowed_token_ids": [-1]},
    ],
    ids=["ends that may not come yet", "beyond the vocabulary", "negative"],
)
def test_nothing_to_choose_from_is_refused(router: RunningRouter, fields: dict[str, Any]) -> None:
    refused = post(router, **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "allowed_token_ids"


def test_bad_words_may_not_mask_all_that_is_allowed(router: RunningRouter, tokenizer: Tokenizer) -> None:
    last = bad_word_ids(["fox"], tokenizer)
    refused = post(router, allowed_token_ids=[ids[-1] for ids in last], bad_words=["fox"])
    assert refused.json()["error"]["param"] == "allowed_token_ids"
