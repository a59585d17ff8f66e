"""Agents of the command line, unmodified and with their default tools, against a router whose model is a script.

A small model chooses no tool by itself, and an agent lets nobody force one. So the workers say the calls; everything
else is real: the agent, its requests, the router, and the commands that the agent runs. Prompts are those of the agent,
which are longer than the context of the small model.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.text.tokenizer import Tokenizer
from shared.wire.messages import Limits, Prefill
from tests.clients.environments import client_folder
from tests.unit.router.openai.tools.agents import TEMPLATE, call
from tests.unit.router.scripted_workers import FEATURES, RunningRouter, Script
from tests.unit.router.tiny_model import END_ID, write_folder

CONTEXT_LEN = 200_000
SECONDS_MAX = 240  # of one run of an agent; it takes two where nothing else runs
Turn = Callable[[str], str]  # the answer to a prompt
PATCH = "*** Begin Patch\n*** Add File: told.txt\n+made by a patch\n*** End Patch"


class ScriptedModel:
    """A running router, and the prompts that its model was shown."""

    def __init__(self, router: RunningRouter, tokenizer: Tokenizer):
        self.url = f"{router.url}/v1"
        self._router = router
        self._tokenizer = tokenizer

    @property
    def prompts(self) -> list[str]:
        return [self._tokenizer.decode_all(prefill.token_ids) for prefill in self._router.workers.prefills]

    def answers(self, turn: Turn) -> None:
        """Let the model answer each prompt as `turn` says."""

        def output(prefill: Prefill) -> tuple[int, ...]:
            text = turn(self._tokenizer.decode_all(prefill.token_ids))
            return (*self._tokenizer.encode(text, add_special_tokens=False), END_ID)

        self._router.workers.script = Script(output=output, tokens_a_row=8)


@contextmanager
def scripted_model(folder: Path, name: str) -> Iterator[ScriptedModel]:
    limits = Limits(context_len=CONTEXT_LEN, page_size=16, pages=100_000, slots=1000, vocab_size=400)
    write_folder(folder, chat_template=TEMPLATE, context_len=CONTEXT_LEN)
    with RunningRouter(folder, limits=limits, features=(*FEATURES, "grammar"), model=name) as router:
        yield ScriptedModel(router, Tokenizer(folder, template_seconds_max=5))


def run_agent(command: list[str | Path], home: Path, **variables: str) -> str:
    """What an agent tells on its standard output. Its home and its folder of work are its own."""
    work = home / "work"
    work.mkdir(parents=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home / ".codex")}
    environment |= variables
    ended = subprocess.run(
        command,
        check=False,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


def codex(home: Path, url: str, model: str) -> str:
    settings = home / ".codex" / "config.toml"
    settings.parent.mkdir(parents=True)
    provider = f'[model_providers.segue]\nname = "segue"\nbase_url = "{url}"\nwire_api = "responses"\n'
    settings.write_text(f'model = "{model}"\nmodel_provider = "segue"\n{provider}')
    program = client_folder("codex") / "node_modules" / ".bin" / "codex"
    anywhere = "--dangerously-bypass-approvals-and-sandbox"  # the test's machine has no sandbox to offer
    return run_agent([program, "exec", "--skip-git-repo-check", anywhere, "Do what there is to do."], home)


def opencode(home: Path, url: str, model: str) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "segue",
        "options": {"baseURL": url, "apiKey": "any"},
        "models": {model: {"name": model, "limit": {"context": CONTEXT_LEN, "output": 1000}}},
    }
    settings = {
        "provider": {"segue": provider},
        "share": "disabled",
        "autoupdate": False,
        "permission": "allow",
    }
    file = home / ".config" / "opencode" / "opencode.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(settings))
    (program,) = client_folder("opencode").glob("node_modules/opencode-linux-*64/bin/opencode")
    return run_agent([program, "run", "--model", f"segue/{model}", "Do what there is to do."], home)


def claude_code(home: Path, url: str, model: str) -> list[dict[str, Any]]:
    """What it tells of its run, a line each."""
    program = client_folder("claude_code") / "node_modules" / ".bin" / "claude"
    asked = ["-p", "Do what there is to do.", "--allowedTools", "Bash"]
    told = run_agent(
        [program, *asked, "--output-format", "stream-json", "--verbose"],
        home,
        ANTHROPIC_BASE_URL=url.removesuffix("/v1"),
        ANTHROPIC_API_KEY="any",
        ANTHROPIC_MODEL=model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    return [json.loads(line) for line in told.splitlines() if line.startswith('{"')]


@pytest.mark.timeout(900)
def test_codex_answers_with_its_default_tools(tmp_path: Path) -> None:
    with scripted_model(tmp_path / "model", "smollm2") as model:
        model.answers(lambda _prompt: "Nothing is to be done.")
        assert "Nothing is to be done." in codex(tmp_path / "home", model.url, "smollm2")
        (prompt,) = model.prompts
    for name in ("exec_command", "update_goal", "multi_agent_v1__spawn_agent"):
        assert f"{name} " in prompt
    assert "external_web_access" not in prompt


@pytest.mark.timeout(900)
def test_codex_runs_what_the_model_calls_and_sends_it_back(tmp_path: Path) -> None:
    """A function, a tool of a namespace, and the answer: three turns."""

    def turn(prompt: str) -> str:
        if "segue-42" not in prompt:
            return call("exec_command", cmd="echo segue-$((40 + 2))")
        if "invalid agent id" not in prompt:
            return call("multi_agent_v1__close_agent", target="nobody")
        return "All is done."

    with scripted_model(tmp_path / "model", "smollm2") as model:
        model.answers(turn)
        assert "All is done." in codex(tmp_path / "home", model.url, "smollm2")
        last = model.prompts[-1]
        assert len(model.prompts) == 3
    assert '<exec_command {"cmd": "echo segue-$((40 + 2))"}>' in last
    assert '<multi_agent_v1__close_agent {"target": "nobody"}>' in last


@pytest.mark.timeout(900)
def test_codex_edits_a_file_by_its_custom_tool(tmp_path: Path) -> None:
    """Which it has for models whose names it knows."""

    def turn(prompt: str) -> str:
        return "The file is there." if "Success" in prompt else call("apply_patch", input=PATCH)

    with scripted_model(tmp_path / "model", "gpt-5.5") as model:
        model.answers(turn)
        assert "The file is there." in codex(tmp_path / "home", model.url, "gpt-5.5")
        last = model.prompts[-1]
    assert (tmp_path / "home" / "work" / "told.txt").read_text() == "made by a patch\n"
    assert f"<apply_patch {json.dumps({'input': PATCH})}>" in last


@pytest.mark.timeout(900)
def test_opencode_runs_what_the_model_calls_and_sends_it_back(tmp_path: Path) -> None:
    def turn(prompt: str) -> str:
        if '"command"' not in prompt:  # without tools: it asks for a title
            return "A title"
        if "segue-42" in prompt:
            return "All is done."
        return call("bash", command="echo segue-$((40 + 2))", description="Says a word")

    with scripted_model(tmp_path / "model", "smollm2") as model:
        model.answers(turn)
        assert "All is done." in opencode(tmp_path / "home", model.url, "smollm2")
        assert any("segue-42" in prompt for prompt in model.prompts)


@pytest.mark.timeout(900)
def test_claude_code_runs_what_the_model_calls_and_sends_it_back(tmp_path: Path) -> None:
    def turn(prompt: str) -> str:
        if "segue-42" in prompt:
            return "All is done."
        asked = call("Bash", command="echo segue-$((40 + 2))", description="Says a word")
        return f"I look: {asked}"

    with scripted_model(tmp_path / "model", "smollm2") as model:
        model.answers(turn)
        told = claude_code(tmp_path / "home", model.url, "smollm2")
        last = model.prompts[-1]
    blocks = [block for line in told if line["type"] == "assistant" for block in line["message"]["content"]]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "text"], (
        "it asks for thoughts to be omitted"
    )
    ended = next(line for line in told if line["type"] == "result")
    assert (ended["is_error"], ended["result"], ended["stop_reason"]) == (False, "All is done.", "end_turn")
    assert ended["usage"]["input_tokens"] > 1000
    assert '<Bash {"command": "echo segue-$((40 + 2))"' in last
    assert "x-anthropic-billing-header" not in last
