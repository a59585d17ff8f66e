"""A chat with something that is no router: one sentence."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from shared.local.chat_command import DIM, PLAIN, AnswerLines, AnswerPiece, ChatSession
from shared.primitives.errors import StartError
from tests.unit.router.scripted_workers import RunningRouter
from tests.unit.router.tiny_model import CONTEXT_LEN, write_folder


def listed(*models: tuple[str, str]) -> bytes:
    """What `/v1/models` says, of names and what they are names of."""
    return json.dumps({"data": [{"id": name, "root": root} for name, root in models]}).encode()


ANSWERS = {
    "html": b"<html>",
    "object": b"{}",
    "list": b"[1]",
    "aliases": listed(("qwen", "qwen"), ("Qwen/Qwen3-0.6B", "qwen")),
    "two": listed(("qwen", "qwen"), ("llama", "llama")),
}


class SomethingElse(BaseHTTPRequestHandler):
    """Answers each path with what the path says."""

    def do_GET(self) -> None:
        """Answer `/html/v1/models` with HTML."""
        self.send_response_only(200)
        self.end_headers()
        self.wfile.write(ANSWERS[self.path.split("/")[1]])


@pytest.fixture
def other_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), SomethingElse)
    threading.Thread(target=server.handle_request, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.server_close()


@pytest.mark.parametrize("what", ["html", "object", "list"])
def test_what_is_no_router_is_said_to_be_none(other_server: str, what: str) -> None:
    with pytest.raises(StartError, match="is no router"):
        ChatSession(f"{other_server}/{what}")


@pytest.mark.parametrize("port", ["99999", "x", "0"])
def test_a_port_that_cannot_be_is_no_url(port: str) -> None:
    with pytest.raises(StartError, match="is no URL of a router"):
        ChatSession(f"http://127.0.0.1:{port}")


def test_a_model_of_several_names_is_one(other_server: str) -> None:
    assert ChatSession(f"{other_server}/aliases").model == "qwen"


def test_of_two_models_one_must_be_named(other_server: str) -> None:
    with pytest.raises(StartError, match="serves 2 models; name one with --model"):
        ChatSession(f"{other_server}/two")


def test_an_answer_is_as_long_as_the_context_leaves_where_that_is_less_than_max_tokens(
    tmp_path: Path,
) -> None:
    with RunningRouter(write_folder(tmp_path / "model")) as router:
        router.says("the quick brown fox")
        conversation = ChatSession(router.url, options={"max_tokens": CONTEXT_LEN})
        assert "".join(piece.text for piece in conversation.answer("hi")) == "the quick brown fox"
        assert router.last_prefill.params.max_new_tokens == CONTEXT_LEN - len(router.last_prefill.token_ids)
        assert [turn["role"] for turn in conversation.turns] == ["user", "assistant"]
        with pytest.raises(StartError, match="messages has more than 256 tokens"):
            list(conversation.answer("long " * CONTEXT_LEN))
        with pytest.raises(StartError, match="max_tokens must be at least 1"):
            list(ChatSession(router.url, options={"max_tokens": 0}).answer("hi"))


# ---- an answer at a terminal: lines are broken between words, and thoughts are told from the answer ------------------


class ShownText(io.StringIO):
    """A terminal that shows what was written."""

    def isatty(self) -> bool:
        """Say that a person reads it."""
        return True

    def lines(self) -> list[str]:
        """What it shows."""
        shown: list[str] = [""]
        for part in re.split(r"(\033\[\d*[A-Za-z]|\n)", self.getvalue()):
            if part == "\n":
                shown.append("")
            elif part.endswith("D") and part.startswith("\033"):
                shown[-1] = shown[-1][: -int(part[2:-1])]
            elif not part.startswith("\033"):
                shown[-1] += part
        return shown


def _written(pieces: Iterable[AnswerPiece], columns: int, monkeypatch: pytest.MonkeyPatch) -> ShownText:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = ShownText()
    lines = AnswerLines(terminal)
    for piece in pieces:
        lines.write(piece)
    lines.end()
    return terminal


@pytest.mark.parametrize("size", [1, 3, 100])
def test_lines_are_broken_between_words(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The quick brown fox jumps over the lazy dog.\nAnd then it sleeps."
    pieces = [AnswerPiece(text[at : at + size]) for at in range(0, len(text), size)]
    shown = _written(pieces, 16, monkeypatch).lines()
    assert [line.rstrip() for line in shown] == [
        "The quick brown", "fox jumps over", "the lazy dog.", "And then it", "sleeps.", "",
    ]  # fmt: skip


def test_a_word_that_is_longer_than_a_line_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _written([AnswerPiece("a " + "x" * 40)], 16, monkeypatch).lines()
    assert all(len(line) < 16 for line in shown)
    assert "".join(shown).replace(" ", "") == "a" + "x" * 40


def test_wide_characters_take_two_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _written([AnswerPiece("漢字" * 10)], 16, monkeypatch).lines()
    assert max(map(len, shown)) == 7


def test_thoughts_are_dimmed_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _written(
        [AnswerPiece("Hm, ", True), AnswerPiece("two.", True), AnswerPiece("2")], 80, monkeypatch
    )
    assert terminal.getvalue() == f"{DIM}Hm, two.{PLAIN}\n\n2\n"


def test_a_pipe_gets_the_answer_alone() -> None:
    output = io.StringIO()
    lines = AnswerLines(output)
    for piece in (AnswerPiece("Hm.", True), AnswerPiece("word " * 50)):
        lines.write(piece)
    lines.end()
    assert output.getvalue() == "word " * 50 + "\n"
