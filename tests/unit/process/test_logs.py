"""Logs: one JSON object a line, from every thread and library, without anybody's text."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Literal

import pytest
import structlog

from shared.effects import Note
from shared.process.logs import NOTES_MAX, NoteWriter, configure, write_note
from tests.waiting import comes_true


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


def finish() -> None:
    """Have everything written, as the end of a process does."""
    for handler in logging.getLogger().handlers:
        handler.flush()


NOTE = Note("request.state", {"rid": "r1", "from": "waiting", "to": "prefilling"})


def test_a_note_is_a_line_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json", role="router", uid="r")
    write_note(NOTE, "router.core")
    structlog.get_logger("router.core").info(NOTE.event, **NOTE.fields)
    noted, logged = lines(capsys)
    assert list(noted) == list(logged)
    assert noted | {"timestamp": ""} == logged | {"timestamp": ""}
    assert str(noted["timestamp"])[:17] == str(logged["timestamp"])[:17]
    assert str(noted["timestamp"]).endswith("Z")


def test_a_note_is_written_soon_without_being_asked_for() -> None:
    stream = io.StringIO()
    writer = NoteWriter(stream, logging.INFO, {}, "json")
    writer.write_note(NOTE, "core")
    assert comes_true(lambda: '"event":"request.state"' in stream.getvalue(), 5.0)
    writer.close()


@pytest.mark.parametrize("form", ["json", "console"])
def test_text_and_tokens_of_a_note_are_withheld(
    form: Literal["json", "console"], capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", form, role="router", uid="r")
    write_note(Note("request.state", {"rid": "r1", "prompt": "marker-7f3a", "token_ids": [77012]}), "core")
    finish()
    shown = capsys.readouterr().err
    assert "withheld" in shown
    assert "marker-7f3a" not in shown
    assert "77012" not in shown


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_note_below_the_level_is_not_written(
    form: Literal["json", "console"], capsys: pytest.CaptureFixture[str]
) -> None:
    configure("warning", form, role="router", uid="r")
    write_note(NOTE, "core")
    write_note(Note("worker.refused", {}, "warning"), "core")
    finish()
    shown = capsys.readouterr().err
    assert "worker.refused" in shown
    assert "request.state" not in shown


@contextlib.contextmanager
def stream_held(writer: NoteWriter) -> Iterator[None]:
    """Notes of this time are one batch: the thread waits for the lock that every write takes."""
    writer.acquire()
    try:
        yield
    finally:
        writer.release()


class BlockedStream(io.StringIO):
    """Nobody reads: a write waits."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = threading.Event()
        self.waits = threading.Event()

    def write(self, text: str) -> int:
        self.waits.set()
        assert self.reader.wait(10)
        return super().write(text)


def test_a_stderr_that_nobody_reads_blocks_no_core_and_what_was_dropped_is_counted() -> None:
    stream = BlockedStream()
    writer = NoteWriter(stream, logging.INFO, {}, "json")
    writer.write_note(NOTE, "core")
    assert stream.waits.wait(5)
    for _ in range(NOTES_MAX + 7):
        writer.write_note(NOTE, "core")
    stream.reader.set()
    writer.close()
    written = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(written) == 1 + NOTES_MAX + 1
    assert written[-1].items() >= {"event": "log.dropped", "lines": 7, "level": "warning"}.items()


def test_a_note_with_a_name_that_is_no_text_loses_no_other() -> None:
    stream = io.StringIO()
    writer = NoteWriter(stream, logging.INFO, {}, "json")
    with stream_held(writer):
        for name in ("one", "\udcff", "two"):
            writer.write_note(Note("link.down", {"reason": name}), "links")
    writer.close()
    reasons = [json.loads(line)["reason"] for line in stream.getvalue().splitlines()]
    assert reasons == ["one", "\\udcff", "two"]


def test_a_process_that_exits_at_once_has_written_its_notes() -> None:
    program = """
from shared.effects import Note
from shared.process import logs, role_main
logs.configure("info", "json", role="router", uid="r")
for number in range(1000):
    logs.write_note(Note("request.state", {"number": number}), "core")
role_main.exit_now()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [json.loads(line)["number"] for line in ended.stderr.splitlines()] == list(range(1000))
