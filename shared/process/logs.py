"""Logs: one line a state change, JSON by default, the request id bound by the code that knows it.

Nothing is logged per token, and no line holds what clients wrote or models answered: a field whose name says that it
carries text, token ids or keys is withheld here, whatever its source. Tracebacks come without local variables for the
same reason. Everything goes to stderr, by two ways that meet in one handler:

    structlog, stdlib (libraries) ─► formatted and written at once
    notes of cores ─► bounded queue ─► a thread writes them in batches, each batch one encoding and one write

A note costs its caller an append: a request is four of them at the router. A note that finds the queue full is
dropped and counted. A line that is written at once writes the waiting notes first, so that lines stay in order.
A process that is killed loses the notes of its last 20 ms (`BATCH_SECONDS`).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from shared.effects import Note

LogForm = Literal["json", "console"]

CONFIDENTIAL = frozenset(
    {"prompt", "messages", "text", "content", "token_ids", "tokens", "seed", "key", "secret", "body", "token"}
)
CHATTY = ("httpcore2", "httpx2", "urllib3", "filelock", "huggingface_hub", "transformers", "uvicorn.access")
NOTES_MAX = 65536  # that wait to be written; a second of 10,000 requests
BATCH_SECONDS = 0.02  # notes wait at most this long for others to be written with

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FOREIGN = msgspec.json.Encoder(enc_hook=repr)  # a library may log any object


def configure(level: str, form: LogForm, **bound: str) -> None:
    """Set up logging of this process once; `bound` (role, uid) is on every line."""
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
        return {**first, **bound, **event}

    global _notes
    if _notes is not None:
        _notes.close()
    _notes = NoteWriter(sys.stderr, _LEVELS[level], bound, form)
    _notes.setFormatter(
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
    root.handlers = [_notes]
    root.setLevel(level.upper())
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def write_note(note: Note, logger: str) -> None:
    """Write a core's note, soon; `logger` says whose it is. Before `configure` notes go nowhere."""
    if _notes is not None:
        _notes.write_note(note, logger)


class NoteWriter(logging.StreamHandler[TextIO]):
    """The one handler of a process: lines at once, notes in batches by a thread that runs while any wait."""

    def __init__(self, stream: TextIO, threshold: int, bound: Mapping[str, str], form: LogForm):
        super().__init__(stream)
        self._threshold = threshold
        self._bound = dict(bound)
        self._json = form == "json"
        self._waiting: deque[tuple[float, Note, str]] = deque()
        self._dropped = 0
        self._any = threading.Event()
        self._ending = threading.Event()
        self._encoder = msgspec.json.Encoder(enc_hook=repr)
        self._thread = threading.Thread(target=self._write_batches, name="log notes", daemon=True)
        self._thread.start()

    def write_note(self, note: Note, logger: str) -> None:
        """Queue a note whose level is on; never blocks."""
        if _LEVELS[note.level] < self._threshold:
            return
        if not self._json:  # people read a console, so its lines are few and need no batches
            structlog.get_logger(logger).log(_LEVELS[note.level], note.event, **note.fields)
        elif len(self._waiting) >= NOTES_MAX:
            self._dropped += 1
        else:
            self._waiting.append((time.time(), note, logger))
            if not self._any.is_set():
                self._any.set()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line of structlog or a library now, behind the notes that came before it."""
        self._write_waiting()
        super().emit(record)

    def flush(self) -> None:
        """Write what waits; `logging.shutdown` calls this at the end of a process."""
        self._write_waiting()
        super().flush()

    def close(self) -> None:
        """Write what waits and end the thread."""
        self._ending.set()
        self._any.set()
        self._write_waiting()
        super().close()

    def _write_batches(self) -> None:
        while not self._ending.is_set():
            self._any.wait()
            self._ending.wait(BATCH_SECONDS)
            self._any.clear()
            self._write_waiting()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        self.acquire()
        try:
            lines = [self._line(*self._waiting.popleft()) for _ in range(len(self._waiting))]
            if dropped := self._dropped:
                self._dropped -= dropped
                lines.append(
                    self._line(time.time(), Note("log.dropped", {"lines": dropped}, "warning"), __name__)
                )
            self.stream.write(self._text(lines))
            self.stream.flush()
        except (OSError, ValueError):  # stderr is closed
            pass
        finally:
            self.release()

    def _text(self, lines: list[dict[str, object]]) -> str:
        try:
            return self._encoder.encode_lines(lines).decode()
        except UnicodeEncodeError:  # a file name that is no UTF-8: one such line must not lose the others
            return self._encoder.encode_lines([_printable(line) for line in lines]).decode()

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


_notes: NoteWriter | None = None


def _printable(line: dict[str, object]) -> dict[str, object]:
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in line.items()
    }


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
