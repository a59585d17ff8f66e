"""Logs: one JSON object a line, from every thread and library, without anybody's text."""

from __future__ import annotations

import ast
import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import structlog

from shared.batch.effects import Note
from shared.process import logs
from shared.process.logs import (
    LINE_BYTES_MAX,
    NOTE_BYTES,
    QUEUE_BYTES_MAX,
    LineWriter,
    LogCounters,
    configure,
    counters,
    write_note,
)
from tests.tidy.source_files import source_files
from tests.waiting import comes_true, until


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    finish()
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
    finish()
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
    writer = LineWriter(stream, logging.INFO, {}, "json", LogCounters())
    writer.write_note(NOTE, "core")
    assert comes_true(lambda: '"event":"request.state"' in stream.getvalue(), 5.0)
    writer.end()


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


def test_no_line_has_a_field_that_would_be_withheld() -> None:
    calls = [
        (file.path, call)
        for file in source_files()
        if not str(file.path).startswith("tests")
        for call in ast.walk(file.tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("log.")
    ]
    assert len(calls) > 30
    hidden = [
        f"{path}:{call.lineno}: {field.arg}"
        for path, call in calls
        for field in call.keywords
        if field.arg in logs.CONFIDENTIAL
    ]
    assert hidden == []


def test_a_line_on_a_console_does_not_repeat_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "console", role="router", uid="router-of-all")
    write_note(Note("stream.failed", {"rid": "r1"}, "warning"), "core")
    finish()
    shown = capsys.readouterr().err
    assert "stream.failed" in shown
    assert "router-of-all" not in shown


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


@pytest.fixture
def blocked() -> Iterator[tuple[BlockedStream, LineWriter, LogCounters]]:
    """A writer whose thread waits in its first write."""
    stream, counters = BlockedStream(), LogCounters()
    writer = LineWriter(stream, logging.INFO, {}, "json", counters)
    writer.write_note(NOTE, "core")
    assert stream.waits.wait(5)
    yield stream, writer, counters
    stream.reader.set()
    writer.end()


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("a.library", logging.WARNING, "", 0, text, None, None)


def test_a_stderr_that_nobody_reads_blocks_nobody_and_what_was_dropped_is_counted_and_told_once(
    blocked: tuple[BlockedStream, LineWriter, LogCounters],
) -> None:
    stream, writer, counters = blocked
    notes_max = QUEUE_BYTES_MAX // NOTE_BYTES
    for _ in range(notes_max + 7):
        writer.write_note(NOTE, "core")
    for _ in range(3):
        writer.handle(record("a line of a library" * 1000))
    assert counters.dropped == 10
    stream.reader.set()
    writer.flush()
    written = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(written) == 1 + notes_max + 1
    assert written[-1].items() >= {"event": "log.dropped", "lines": 10, "level": "warning"}.items()
    writer.write_note(NOTE, "core")
    writer.flush()
    assert "log.dropped" not in stream.getvalue().splitlines()[-1]


def test_lines_and_notes_stay_in_order_and_a_long_line_is_cut(
    blocked: tuple[BlockedStream, LineWriter, LogCounters],
) -> None:
    stream, writer, _ = blocked
    writer.handle(record("first"))
    writer.write_note(NOTE, "core")
    writer.handle(record("x" * 10 * LINE_BYTES_MAX))
    writer.handle(record("last"))
    stream.reader.set()
    writer.flush()
    _, first, note, long, last = stream.getvalue().splitlines()
    assert (first, last) == ("first", "last")
    assert "request.state" in note
    assert len(long) < LINE_BYTES_MAX + 10


def test_the_end_of_a_process_does_not_wait_for_a_reader_for_ever(
    blocked: tuple[BlockedStream, LineWriter, LogCounters], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, writer, _ = blocked
    monkeypatch.setattr(logs, "FLUSH_SECONDS_MAX", 0.1)
    writer.handle(record("never read"))
    writer.end()
    assert writer._thread.is_alive(), "it still waits for a reader, and nobody waits for it"


def test_a_note_with_a_name_that_is_no_text_loses_no_other() -> None:
    stream = io.StringIO()
    writer = LineWriter(stream, logging.INFO, {}, "json", LogCounters())
    for name in ("one", "\udcff", "two"):
        writer.write_note(Note("link.down", {"reason": name}), "links")
    writer.end()
    reasons = [json.loads(line)["reason"] for line in stream.getvalue().splitlines()]
    assert reasons == ["one", "\\udcff", "two"]


def test_lines_that_clients_can_cause_without_end_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    before = counters.repeated
    configure("info", "json", role="router", uid="r")
    logging.getLogger("uvicorn.error").setLevel(logging.NOTSET)  # a server of another test may have raised it
    for _ in range(1000):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    for _ in range(3):
        try:
            raise RuntimeError("a handle at 0x7f")
        except RuntimeError:
            logging.getLogger("asyncio").exception("unhandled error in a transport at %x", 7)
    logging.getLogger("uvicorn.error").info("Started")
    events = [str(line["event"]) for line in lines(capsys)]
    assert len(events) == 10 + 2 + 1
    assert events[:3] == [
        "Invalid HTTP request received.",
        "Invalid HTTP request received. [2 times so far]",
        "Invalid HTTP request received. [4 times so far]",
    ]
    assert events[11] == "unhandled error in a transport at 7 [2 times so far]"
    assert counters.repeated - before == 990 + 1


def test_a_process_whose_stderr_nobody_reads_goes_on_and_ends(tmp_path: Path) -> None:
    """More than a pipe holds, from the main thread, through structlog; then the end, which waits for no reader long."""
    program = f"""
import structlog
from pathlib import Path
from shared.process import logs, role_main
logs.FLUSH_SECONDS_MAX = 0.2
logs.configure("info", "json", role="router", uid="r")
for number in range(20_000):
    structlog.get_logger().info("a line", number=number, filler="x" * 100)
Path({str(tmp_path / "went on")!r}).touch()
role_main.exit_now()
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        until((tmp_path / "went on").exists, 60, "its way through its lines")
        assert process.wait(60) == 0


def test_a_library_that_configures_logging_for_itself_ends_no_log() -> None:
    """`logging.config` closes every handler that exists; NIXL calls it when it is loaded."""
    program = """
import logging.config
import structlog
from shared.batch.effects import Note
from shared.process import logs, role_main
logs.configure("info", "json", role="decode", uid="d")
structlog.get_logger().info("before")
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
structlog.get_logger().info("after")
for number in range(1000):
    logs.write_note(Note("link.down", {"number": number}), "links")
role_main.exit_now()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    events = [json.loads(line)["event"] for line in ended.stderr.splitlines()]
    assert events == ["before", "after", *["link.down"] * 1000]


def test_a_process_that_exits_at_once_has_written_its_notes() -> None:
    program = """
from shared.batch.effects import Note
from shared.process import logs
from shared.process import logs, role_main
logs.configure("info", "json", role="router", uid="r")
for number in range(1000):
    logs.write_note(Note("request.state", {"number": number}), "core")
role_main.exit_now()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [json.loads(line)["number"] for line in ended.stderr.splitlines()] == list(range(1000))
