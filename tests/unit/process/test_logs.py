"""Logs: one JSON object a line, from every thread and library, without anybody's text."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator

import pytest
import structlog

from shared.process.logs import configure


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_is_one_object_with_what_was_bound(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json", role="decode", uid="d0")
    structlog.get_logger("decode").info("joined", rid="r1", fetched_bytes=4096)
    (line,) = lines(capsys)
    assert list(line)[:3] == ["timestamp", "level", "event"], "what people look for comes first"
    assert line.items() >= {
        "event": "joined", "rid": "r1", "fetched_bytes": 4096, "role": "decode", "uid": "d0", "level": "info"
    }.items()  # fmt: skip


def test_other_threads_and_libraries_log_alike(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json", role="router", uid="r")
    thread = threading.Thread(target=lambda: logging.getLogger("a.library").warning("odd: %s", 7))
    thread.start()
    thread.join()
    (line,) = lines(capsys)
    assert line.items() >= {"event": "odd: 7", "role": "router", "logger": "a.library"}.items()


@pytest.mark.parametrize("form", ["json", "console"])
def test_text_and_tokens_never_reach_a_line(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure("debug", "console" if form == "console" else "json", role="router", uid="r")
    secret = "marker-7f3a"
    try:
        prompt = secret * 2
        raise RuntimeError("tokenizer failed")
    except RuntimeError:
        structlog.get_logger().exception("failed", prompt=prompt, text=secret, token_ids=[secret])
    shown = capsys.readouterr().err
    assert "tokenizer failed" in shown
    assert secret not in shown


def test_the_level_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    configure("warning", "json", role="decode", uid="d")
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(capsys)] == ["loud"]
