"""How an unexpected exception is told to the log: its type and the places it came through, never its values.

The message of an exception may quote what a client wrote, so only an error of Segue's own is quoted. Knows no process.
"""

from __future__ import annotations

import traceback

from shared.primitives.errors import SegueError

PLACES_MAX = 6  # the innermost ones


def describe_failure(error: BaseException) -> dict[str, object]:
    """Fields of a log line about `error`."""
    fields: dict[str, object] = {"error": type(error).__name__, "at": places(error)}
    return fields | {"reason": str(error)} if isinstance(error, SegueError) else fields


def places(error: BaseException) -> list[str]:
    """The innermost frames that the error came through, the last one first to fail."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES_MAX:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
