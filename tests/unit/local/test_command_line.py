"""What may be typed after `segue`: commands, and after `up` the model by its place and names of other servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from shared.local.cli import COMMANDS, run
from shared.local.config import FOREIGN_FLAGS, ROLE_CONFIGS, LocalConfig, load_local
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
        (["--kv-pages", "64", "-p", "9003", "a"], "a", 9003),
    ],
)
def test_a_model_has_its_place_and_the_port_its_usual_name(words: list[str], model: str, port: int) -> None:
    config = load_local(words, {}).config
    assert (config.model, config.router_port) == (model, port)


@pytest.mark.parametrize("again", [["--model", "b"], ["--model=b"]])
def test_a_model_that_is_named_twice_is_refused(again: list[str]) -> None:
    with pytest.raises(ConfigError, match="named twice: a and --model"):
        load_local(["a", *again], {})


def test_a_second_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown argument b"):
        load_local(["a", "b"], {})


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ["m", "-tp", "2"],
            "-tp is --tensor-parallel-size N here, with --prefill 0",
        ),
        (["m", "--max-num-seqs=256"], "--max-num-seqs is --max-running-requests N here"),
        (["m", "--gpu-memory-utilization", "0.9"], "is --max-total-tokens N here"),
        (["m", "--enable-auto-tool-choice"], "is --tool-call-parser here"),
        (["m", "--trust-remote-code"], "code that comes with a model is never run"),
        (["m", "--quantization", "awq"], "weights are served as"),
        (["m", "-ngl", "99"], "on a GPU whole"),
        (["m", "--hf-token", "hf_x"], "--hf-token is the variable HF_TOKEN here"),
        (["m", "--task", "generate"], "--task is not needed: leave it out"),
        (["m", "-n", "64"], "-n is max_tokens of a request here"),
        (["m", "--ssl-certfile", "c.pem"], "--ssl-certfile is --tls-cert FILE here"),
        (["m", "--disaggregation-mode", "prefill"], "--prefill N and --decode N say how many"),
    ],
)
def test_flags_of_other_servers_are_answered_by_name(words: list[str], answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        load_local(words, {})


def test_no_flag_of_our_own_is_called_foreign_and_what_an_answer_names_is_one() -> None:
    models: list[type[Settings]] = [LocalConfig, *ROLE_CONFIGS.values()]
    own = {flag_of(name) for model in models for name in model.model_fields}
    assert not FOREIGN_FLAGS.keys() & (own | {"--config", "-p", "--port", "--max-model-len"})
    assert [flag for flag in FOREIGN_FLAGS if not flag.startswith("-") or flag.endswith("-")] == []
    named = {word for answer in FOREIGN_FLAGS.values() for word in re.findall(r"--[a-z-]+", answer)}
    assert named
    assert named <= own | {"--config"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["srve", "m"], "unknown command srve; did you mean serve?"),
        (["--port", "9"], f"unknown command --port; there are {', '.join(COMMANDS)}: see segue --help"),
        (["chat", "--modl", "m"], "unknown flag --modl; did you mean --model?"),
        (["chat", "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        (["run"], "the following arguments are required: MODEL"),
        (["run", "--device", "cpu", "m"], "the model comes first: segue run MODEL [PROMPT] [FLAGS]"),
        (["up", "m", "--modell", "n"], "unknown flag --modell; did you mean --model?"),
        (["serve", "-pp", "2"], "-pp is not supported: --tensor-parallel-size N gives a worker N GPUs"),
    ],
)
def test_a_slip_is_one_sentence_that_names_what_was_meant(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        run(words)


def test_the_help_names_each_command_and_loads_nothing_heavy() -> None:
    code = """
import sys
from shared.local.cli import run
try:
    run(["--help"])
finally:
    heavy = sorted({"torch", "transformers", "numpy", "huggingface_hub"} & set(sys.modules))
    sys.stderr.write(f"loaded {heavy}")
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stderr) == (0, "loaded []")
    assert all(f"    {name} " in child.stdout for name in COMMANDS)


def test_a_reader_that_has_gone_ends_a_command_without_a_traceback() -> None:
    """As `segue doctor | head -1` does, or `segue run smollm2 … | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as output:
        command = [sys.executable, "-P", "-m", "shared.local.cli", "doctor"]
        child = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (child.returncode, child.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("words", [[name] for name in COMMANDS] + [["keys", "new"], ["keys", "check"]])
def test_each_command_has_a_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run([*words, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
