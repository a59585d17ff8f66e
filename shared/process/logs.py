"""Logs: one line a request, at debug one for each of its steps; JSON by default, with the request's id in each.

Nothing is logged per token, and no line holds what clients wrote or models answered: a field whose name says that it
carries text, token ids or keys is withheld here, whatever its source. Tracebacks come without local variables for the
same reason. Lines that clients can cause without end are counted, and the 1st, 2nd, 4th, 8th … of each is written.
Everything goes to stderr through a `LineWriter`, which blocks nobody.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from shared.batch.effects import Note
from shared.primitives.errors import SegueError
from shared.primitives.metric_fields import all_declared, total
from shared.primitives.tally import Tally

LogForm = Literal["json", "console"]

CHATTY = ("httpcore2", "httpx2", "urllib3", "filelock", "huggingface_hub", "transformers", "uvicorn.access")
CAUSED_BY_CLIENTS = ("uvicorn.error", "asyncio")  # malformed requests, upgrades, hang-ups at a bad moment
CAUSE_CHARACTERS_MAX = 100
PLACES_MAX = 6  # of a failure, the innermost ones
CONFIDENTIAL = frozenset(
    {"prompt", "messages", "text", "content", "token_ids", "tokens", "seed", "key", "secret", "body", "token"}
)
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
QUEUE_BYTES_MAX = 16 << 20  # of lines that wait: 16,384 notes, which are 4 seconds of 1,000 requests a second
NOTE_BYTES = 1024  # what one takes in the queue, with its fields
LINE_BYTES_MAX = 32 << 10  # a longer one (a traceback) is cut
BATCH_LINES_MAX = 1024  # of one write
BATCH_SECONDS = 0.02  # lines wait at most this long for others to be written with
FLUSH_SECONDS_MAX = 2.0

_Line = str | tuple[float, Note, str]  # formatted, or a note with its time and its logger

_FOREIGN = msgspec.json.Encoder(enc_hook=repr)  # a library may log any object


@all_declared
@dataclass(slots=True)
class LogCounters:
    """Lines that were not written."""

    dropped: int = total(
        "segue_log_lines_dropped_total", "Log lines that were dropped because nobody read stderr."
    )
    repeated: int = total(
        "segue_log_lines_repeated_total",
        "Log lines that were only counted: clients can cause them without end.",
    )


counters = LogCounters()
_writer: LineWriter | None = None


def configure(level: str, form: LogForm, **bound: str) -> None:
    """Set up logging of this process once; `bound` (role, uid) is on every line of JSON. A console shows one process,
    or `segue up` writes its name in front.
    """
    on_each_line = bound if form == "json" else {}
    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _withhold,
    ]
    structlog.configure(
        processors=[*before, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )

    def add_bound(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        # Here, and not in a context variable, which threads would not see; and first what people look for.
        first = {key: event[key] for key in ("timestamp", "level", "event") if key in event}
        return {**first, **on_each_line, **event}

    global _writer
    if _writer is not None:
        _writer.end()
    _writer = LineWriter(sys.stderr, LEVELS[level], bound, form, counters)
    _writer.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                add_bound,
                *_rendering(form),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [_writer]
    root.setLevel(level.upper())
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in CAUSED_BY_CLIENTS:
        logging.getLogger(name).filters = [_Repetitions()]


def write_note(note: Note, logger: str) -> None:
    """Write a core's note, soon; `logger` says whose it is. Before `configure` notes go nowhere."""
    if _writer is not None:
        _writer.write_note(note, logger)


def is_written(level: str) -> bool:
    """Whether notes of this level are written: what a line needs is gathered only then."""
    return _writer is not None and LEVELS[level] >= _writer.threshold


def flush() -> None:
    """Wait until all lines are written, for FLUSH_SECONDS_MAX at most. `logging.shutdown` may know no writer."""
    if _writer is not None:
        _writer.flush()


def describe_failure(error: BaseException) -> dict[str, object]:
    """Fields of a log line about an unexpected error: its type and the places it came through, never its values.

    The message of an exception may quote what a client wrote, so only an error of Segue's own is quoted.
    """
    fields: dict[str, object] = {"error": type(error).__name__, "at": places(error)}
    return fields | {"reason": str(error)} if isinstance(error, SegueError) else fields


def places(error: BaseException) -> list[str]:
    """The innermost frames that the error came through, the last one first to fail."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES_MAX:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


class _Repetitions(logging.Filter):
    """Lets a library's warning through the 1st, 2nd, 4th, 8th … time."""

    def __init__(self) -> None:
        super().__init__()
        self._tally = Tally()

    def filter(self, record: logging.LogRecord) -> bool:
        """What an exception or the unformatted message tells apart is one cause."""
        if record.levelno < logging.WARNING:
            return True
        kind = record.exc_info[0] if record.exc_info else None
        times = self._tally.add(
            kind.__name__ if kind else str(record.msg).partition("\n")[0][:CAUSE_CHARACTERS_MAX]
        )
        if times > 1:
            record.msg = f"{record.msg} [{times} times so far]"
        elif not times:
            counters.repeated += 1
        return times > 0


def _rendering(form: LogForm) -> list[Processor]:
    if form == "console":
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, _as_json]


def _as_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    return _FOREIGN.encode(event).decode()


def _withhold(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name in CONFIDENTIAL & event.keys():
        event[name] = "withheld"
    return event


# ---- lines are written to stderr by a thread of its own, so that logging blocks nobody -------------------------------
#     structlog, stdlib (libraries) ─► formatted by the caller ─┐
#     notes of cores ───────────────────────────────────────────┴► bounded queue ─► thread: one write a batch
#
# A line costs its caller an append, and a note not even its encoding. When nobody reads stderr (a paused terminal, a
# container runtime that restarts), only the thread waits: lines that find the queue full are dropped and counted, and
# one line says how many when the reader is back. A process that is killed loses the lines of its last 20 ms
# (`BATCH_SECONDS`); one that ends waits `FLUSH_SECONDS_MAX` for its reader.
#
# The thread writes to the descriptor itself: a lock of `sys.stderr` that it held while it waits would block others.


class LineWriter(logging.StreamHandler[TextIO]):
    """The one handler of a process."""

    def __init__(
        self, stream: TextIO, threshold: int, bound: Mapping[str, str], form: LogForm, counters: LogCounters
    ):
        super().__init__(stream)
        self._descriptor = _descriptor_of(stream)
        self.threshold = threshold
        self._bound = dict(bound)
        self._json = form == "json"
        self._counters = counters
        self._waiting: deque[_Line] = deque()
        self._waiting_bytes = 0
        self._unreported = 0  # lines dropped since the last line that said so
        self._writing = False
        self._queue = threading.Lock()
        self._written = threading.Condition(self._queue)
        self._any = threading.Event()
        self._ending = threading.Event()
        self._encoder = msgspec.json.Encoder(enc_hook=repr)
        self._thread = threading.Thread(target=self._write_batches, name="log lines", daemon=True)
        self._thread.start()

    def write_note(self, note: Note, logger: str) -> None:
        """Queue a note whose level is on; never blocks."""
        if LEVELS[note.level] < self.threshold:
            return
        if self._json:
            self._append((time.time(), note, logger), NOTE_BYTES)
        else:  # people read a console, so its lines are few
            structlog.get_logger(logger).log(LEVELS[note.level], note.event, **note.fields)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line of structlog or a library; never blocks."""
        try:
            line = self.format(record)
        except Exception:
            line = f"a line of {record.name} could not be formatted"
        if len(line) > LINE_BYTES_MAX:
            line = line[:LINE_BYTES_MAX] + " … cut"
        self._append(line, len(line))

    def flush(self) -> None:
        """Wait until all is written, FLUSH_SECONDS_MAX at most."""
        self._any.set()
        with self._written:
            self._written.wait_for(lambda: not (self._waiting or self._writing), FLUSH_SECONDS_MAX)

    def close(self) -> None:
        """Flush only: a library that calls `logging.config` closes every handler, and more lines come."""
        self.flush()

    def end(self) -> None:
        """Write what waits, as `flush`, and end the thread."""
        self.flush()
        self._ending.set()
        self._any.set()
        logging.Handler.close(self)

    def _append(self, line: _Line, line_bytes: int) -> None:
        with self._queue:
            if self._waiting_bytes + line_bytes > QUEUE_BYTES_MAX:
                self._counters.dropped += 1
                self._unreported += 1
                return
            self._waiting.append(line)
            self._waiting_bytes += line_bytes
        if not self._any.is_set():
            self._any.set()

    def _write_batches(self) -> None:
        while not self._ending.is_set():
            self._any.wait()
            self._ending.wait(BATCH_SECONDS)
            self._any.clear()
            while batch := self._take_batch():
                self._write(self._text(batch))
                self._note_written()

    def _take_batch(self) -> list[_Line]:
        with self._queue:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_LINES_MAX))]
            self._waiting_bytes -= sum(len(line) if isinstance(line, str) else NOTE_BYTES for line in batch)
            if self._unreported and not self._waiting:
                batch.append(
                    (time.time(), Note("log.dropped", {"lines": self._unreported}, "warning"), __name__)
                )
                self._unreported = 0
            self._writing = bool(batch)
        return batch

    def _note_written(self) -> None:
        with self._written:
            self._writing = False
            self._written.notify_all()

    def _write(self, text: str) -> None:
        try:
            if self._descriptor is None:
                self.stream.write(text)
                return
            data = memoryview(text.encode(errors="backslashreplace"))
            while data:
                data = data[os.write(self._descriptor, data) :]
        except (OSError, ValueError):  # stderr is closed
            pass

    def _text(self, batch: list[_Line]) -> str:
        return "".join(f"{line}\n" if isinstance(line, str) else self._note_text(*line) for line in batch)

    def _note_text(self, at: float, note: Note, logger: str) -> str:
        if not self._json:
            return f"{note.event} {note.fields}\n"  # of this file alone: `write_note` formats the others
        line = self._line(at, note, logger)
        try:
            return self._encoder.encode(line).decode() + "\n"
        except UnicodeEncodeError:  # a file name that is no UTF-8
            return self._encoder.encode(_printable(line)).decode() + "\n"

    def _line(self, at: float, note: Note, logger: str) -> dict[str, object]:
        fields = note.fields
        if not CONFIDENTIAL.isdisjoint(fields):
            fields = {name: "withheld" if name in CONFIDENTIAL else fields[name] for name in fields}
        return {
            "timestamp": datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z"),
            "level": note.level,
            "event": note.event,
            **self._bound,
            **fields,
            "logger": logger,
        }


def _descriptor_of(stream: TextIO) -> int | None:
    """Descriptor of a file; None: the stream is in memory."""
    try:
        return stream.fileno()
    except (io.UnsupportedOperation, AttributeError):
        return None


def _printable(line: dict[str, object]) -> dict[str, object]:
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in line.items()
    }
