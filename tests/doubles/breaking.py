"""A step that breaks off: an error at any line of the router's core, while it takes one message."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class BrokenOffError(Exception):
    """Raised in the middle of a step."""


def broken_off_at(line: int, act: Callable[[], None]) -> bool:
    """Raise at the `line`-th line of router/core that takes a message within `act`; returns whether there was one."""
    left, taking = line, False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left, taking
        del argument
        code = frame.f_code
        if "/router/core/" not in code.co_filename:
            return None
        if code.co_name == "_link" and event in ("call", "return"):
            taking = event == "call"
        elif event == "line" and taking:
            left -= 1
            if left == 0:
                raise BrokenOffError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return left <= 0
