"""`segue chat` at a terminal and in a pipe, `segue run`, and what both say when something is wrong."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from shared.local.chat_command import ChatSession
from shared.primitives.errors import StartError
from tests.integration.deployments.deployment import LocalDeployment
from tests.integration.deployments.running import ended_within
from tests.waiting import comes_true

COMMAND = [sys.executable, "-m", "shared.local.cli"]


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, *words: str):
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: os.close(
                os.open(os.ttyname(theirs), os.O_RDWR)
            ),  # it becomes the controlling one
        )
        os.close(theirs)
        self.shown = ""
        self._found = 0  # how much of it was waited for

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, words: str, seconds: float = 60) -> None:
        """Read until the words are shown after what was read before."""
        deadline = monotonic() + seconds
        while (at := self.shown.find(words, self._found)) < 0:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - monotonic()))
            assert ready, f"no {words!r} in {self.shown!r}"
            try:
                self.shown += os.read(self._ours, 65536).decode("utf-8", "replace")
            except OSError:  # the other side is closed
                raise AssertionError(f"the command ended without {words!r}: {self.shown!r}") from None
        self._found = at + len(words)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_ctrl_c_ends_an_answer_and_exit_the_conversation(one_each: LocalDeployment) -> None:
    terminal = Terminal("chat", "--url", one_each.url)
    try:
        terminal.until("> ")
        terminal.type("Tell me a very long story about the sea.\n")
        terminal.until("sea.")
        terminal.until(" ")  # of the answer
        terminal.type("\x03")
        terminal.until("the answer was ended")
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(20) == 0
        assert "Traceback" not in terminal.shown
    finally:
        terminal.close()


def test_a_conversation_in_a_pipe_is_one_answer_a_line(one_each: LocalDeployment) -> None:
    ended = subprocess.run(
        [*COMMAND, "chat", "--url", one_each.url + "/v1", "--max-tokens", "16"],
        input="Say one word.\n/clear\n/halp\n",
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert len(ended.stdout) > len("smollm2: /help lists the commands, /exit or Ctrl-D ends\n") + 2
    assert ended.stderr == "segue chat: there is no /halp; /help lists what there is\n"


def _answered(one_each: LocalDeployment) -> int:
    """Requests that were answered so far."""
    return sum(
        int(one_each.total("router", f"segue_requests_total{{outcome={end}}}")) for end in ("length", "stop")
    )


def test_a_pasted_text_is_one_prompt(one_each: LocalDeployment) -> None:
    """As a terminal sends it: between the marks of a bracketed paste, which the program has asked for."""
    terminal = Terminal("chat", "--url", one_each.url, "--max-tokens", "2")
    try:
        terminal.until("> ")
        assert "\x1b[?2004h" in terminal.shown, "the terminal is asked for marks around what is pasted"
        before = _answered(one_each)
        terminal.type("\x1b[200~one\ntwo\nthree\x1b[201~\r")
        terminal.until("> ")
        assert comes_true(lambda: _answered(one_each) - before == 1)
        terminal.type("four\r")
        terminal.until("> ")
        assert comes_true(lambda: _answered(one_each) - before == 2)
    finally:
        terminal.close()


def test_lines_between_quotation_marks_are_one_prompt_and_commands_are_none(
    one_each: LocalDeployment,
) -> None:
    before = _answered(one_each)
    ended = subprocess.run(
        [*COMMAND, "chat", "--url", one_each.url, "--max-tokens", "2"],
        input='"""one\n\n/exit\ntwo"""\n/help\n/system Be brief.\n"""\nthree\n"""\n',
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert comes_true(lambda: _answered(one_each) - before == 2)
    assert "/system TEXT" in ended.stdout
    assert ended.stderr == ""


def test_system_and_options_go_with_each_request(one_each: LocalDeployment) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0}
    conversation = ChatSession(one_each.url, system="You are brief.", options=asked)
    said = "".join(piece.text for piece in conversation.answer("Count to a hundred."))
    turns: list[Any] = [{"role": "system", "content": "You are brief."}, conversation.turns[0]]
    answer = one_each.client.chat.completions.create(model="smollm2", messages=turns, **asked)
    assert said == answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert conversation.turns[0]["role"] == "user", "the system's message is no turn"


def test_the_turns_before_are_sent_again(one_each: LocalDeployment) -> None:
    # else it may talk to the end of its context
    conversation = ChatSession(one_each.url, options={"max_tokens": 64})
    pieces = [*conversation.answer("Tell me a long story about the sea.")]
    assert len(pieces) > 1
    assert [turn["role"] for turn in conversation.turns] == ["user", "assistant"]
    assert conversation.turns[1]["content"] == "".join(piece.text for piece in pieces)
    before = one_each.total("router", "segue_prompt_tokens_total")
    some = conversation.answer("Tell me another one.")
    next(some)
    assert one_each.total("router", "segue_prompt_tokens_total") - before > len(pieces) / 2
    some.close()
    assert len(conversation.turns) == 2, "what was not answered to its end is no part of it"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://127.0.0.1:9", r"does not answer .*is a router there"),
        ("127.0.0.1:8000", "is no URL of a router"),
        ("ftp://127.0.0.1", "is no URL of a router"),
    ],
)
def test_where_no_router_is_one_sentence_says_so(url: str, complaint: str) -> None:
    with pytest.raises(StartError, match=complaint):
        ChatSession(url)


def test_a_model_that_is_not_served_is_one_sentence(one_each: LocalDeployment) -> None:
    with pytest.raises(StartError, match=r"refused with status 404: .*smollm2"):
        list(ChatSession(one_each.url, model="other").answer("Hello."))


def test_run_writes_the_answer_alone_to_stdout_and_ends_everything(tmp_path: Path) -> None:
    settings = tmp_path / "small.yaml"
    settings.write_text("{prefill: {config: {kvPages: 64}}, decode: {config: {kvPages: 64}}}")
    words = ["run", "smollm2", "Why is the sky blue?", "--config", str(settings), "--max-model-len", "512"]
    ended = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout.strip()
    assert "router: " not in ended.stdout
    assert "ready in " not in ended.stdout
    assert "router: ready" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not processes_with(str(settings))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_run_ends_everything_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    """A terminal that is closed sends SIGHUP to the command alone; its deployment would serve on, for nobody."""
    with socket.create_server(("127.0.0.1", 0)) as hub:  # accepts, and never answers
        silent = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        running = subprocess.Popen([*COMMAND, "run", "org/name", "Hello."], env={**os.environ, **silent})
        hub.settimeout(200)
        connection, _ = hub.accept()
        with connection:
            (up,) = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
            running.send_signal(number)
            assert running.wait(30) == -number
            assert ended_within([int(up)], 4), "it waits 8 s for the Hub"


def test_run_of_a_model_that_is_nowhere_says_why() -> None:
    ended = subprocess.run(
        [*COMMAND, "run", "/nowhere", "Hello."], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert not ended.stdout
    assert "segue up: there is no model /nowhere" in ended.stderr
    assert ended.stderr.rstrip().endswith("the reason is above")


def processes_with(word: str) -> list[str]:
    """Command lines of this machine that hold the word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue
    return [line for line in found if word in line]
