"""What may be typed after `segue up`: the model by its place, and names that other servers have."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError
from shared.local.config import load_local
from shared.local.spelling import spelled_out


@pytest.mark.parametrize(
    ("words", "model", "port"),
    [
        ([], "smollm2", 8000),
        (["some/model"], "some/model", 8000),
        (["some/model", "-p", "9000"], "some/model", 9000),
        (["./file.gguf", "--port=9001"], "./file.gguf", 9001),
        (["--port", "9002", "--model", "other"], "other", 9002),
        (["--model=a=b"], "a=b", 8000),
        (["a", "--max-model-len", "512"], "a", 8000),
    ],
)
def test_a_model_has_its_place_and_the_port_its_usual_name(words: list[str], model: str, port: int) -> None:
    config = load_local(spelled_out(words), {}).config
    assert (config.model, config.router_port) == (model, port)


@pytest.mark.parametrize("again", [["--model", "b"], ["--model=b"]])
def test_a_model_that_is_named_twice_is_refused(again: list[str]) -> None:
    with pytest.raises(ConfigError, match="named twice: a and --model"):
        spelled_out(["a", *again])


def test_a_second_model_is_refused() -> None:
    with pytest.raises(ConfigError):
        load_local(spelled_out(["a", "b"]), {})
