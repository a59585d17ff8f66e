"""Logs: one line a state change, JSON by default, the request id bound by the code that knows it.

Nothing is logged per token, and no line holds what clients wrote or models answered: a field whose name says that it
carries text, token ids or keys is withheld here, whatever its source. Tracebacks come without local variables for the
same reason. Lines that clients can cause without end are counted, and the 1st, 2nd, 4th, 8th … of each is written.
Everything goes to stderr through `log_writer`, which blocks nobody.
"""

from __future__ import annotations

import logging
import sys
import traceback

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from shared.batch.effects import Note
from shared.primitives.errors import SegueError
from shared.primitives.tally import Tally
from shared.process.log_writer import CONFIDENTIAL, LEVELS, LineWriter, LogCounters, LogForm

CHATTY = ("httpcore2", "httpx2", "urllib3", "filelock", "huggingface_hub", "transformers", "uvicorn.access")
CAUSED_BY_CLIENTS = ("uvicorn.error", "asyncio")  # malformed requests, upgrades, hang-ups at a bad moment
CAUSE_CHARACTERS_MAX = 100
PLACES_MAX = 6  # of a failure, the innermost ones

_FOREIGN = msgspec.json.Encoder(enc_hook=repr)  # a library may log any object


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


counters = LogCounters()
_writer: LineWriter | None = None


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
