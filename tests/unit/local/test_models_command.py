"""`segue pull` says where a model lies, `segue models` lists what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.local.cli import run
from shared.local.model_store import models, pull
from shared.primitives.errors import ConfigError, ModelError


def test_a_pulled_model_is_listed_by_the_name_that_up_takes(capsys: pytest.CaptureFixture[str]) -> None:
    pull("smollm2")
    folder = capsys.readouterr().out.strip()
    assert (Path(folder) / "config.json").exists()
    models()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (line,) = (line for line in lines if line[0] == "smollm2")
    assert float(line[1]) > 0.05
    assert line[-1] == folder


def test_an_empty_cache_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    models()
    assert "segue pull MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["pull"], "arguments are required: MODEL"),
        (["pull", "a", "b"], "unknown argument b"),
        (["pull", "a", "--all"], "unknown flag --all"),
        (["models", "a"], "unknown argument a"),
    ],
)
def test_pull_takes_one_model_and_models_takes_none(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run(words)


def test_a_model_that_is_nowhere_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="there is no model"):
        pull("/nowhere/model")
