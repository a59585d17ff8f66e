"""Logs: one line a state change, JSON by default, the request id bound by whoever knows it.

Nothing is logged per token, and no line holds what clients wrote or models answered: a field whose name says that it
carries text, token ids or keys is withheld here, whoever passed it. Tracebacks come without local variables for the
same reason. Lines of libraries (stdlib logging) take the same way. Everything goes to stderr.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

CONFIDENTIAL = frozenset(
    {"prompt", "messages", "text", "content", "token_ids", "tokens", "seed", "key", "secret", "body", "token"}
)
CHATTY = ("httpcore2", "httpx2", "urllib3", "filelock", "huggingface_hub", "transformers", "uvicorn.access")


def configure(level: str, form: Literal["json", "console"], **bound: str) -> None:
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

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
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
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def _rendering(form: Literal["json", "console"]) -> list[Processor]:
    if form == "console":
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _withhold(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name in CONFIDENTIAL & event.keys():
        event[name] = "withheld"
    return event
