"""What may be typed after `segue up`: the model by its place, and names that other servers have."""

from __future__ import annotations

import re

import pytest

from shared.local.config import ROLE_CONFIGS, LocalConfig, load_local
from shared.local.foreign_flags import FOREIGN_FLAGS
from shared.local.spelling import ALIASES, spelled_out
from shared.primitives.errors import ConfigError
from shared.process.settings import Settings, flag_of


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


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ["m", "--tensor-parallel-size", "2"],
            "--tensor-parallel-size is not supported: a worker has one GPU",
        ),
        (["m", "--max-num-seqs=256"], "--max-num-seqs is --max-running-requests N here"),
        (["m", "--gpu-memory-utilization", "0.9"], "is --max-total-tokens N here"),
        (["m", "--enable-auto-tool-choice"], "is --tool-call-parser here"),
        (["m", "--trust-remote-code"], "code that comes with a model is never run"),
        (["m", "--quantization", "awq"], "weights are served as"),
        (["m", "-ngl", "99"], "on a GPU whole"),
    ],
)
def test_flags_of_other_servers_are_answered_by_name(words: list[str], answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        spelled_out(words)


def test_no_flag_of_our_own_is_called_foreign_and_what_an_answer_names_is_one() -> None:
    models: list[type[Settings]] = [LocalConfig, *ROLE_CONFIGS.values()]
    own = {flag_of(name) for model in models for name in model.model_fields}
    assert not FOREIGN_FLAGS.keys() & (own | ALIASES.keys() | {"--config"})
    named = {word for answer in FOREIGN_FLAGS.values() for word in re.findall(r"--[a-z-]+", answer)}
    assert named
    assert named <= own | {"--config"}
