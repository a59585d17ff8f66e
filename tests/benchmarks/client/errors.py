"""The error of a benchmark that could not measure."""

from __future__ import annotations

from shared.primitives.errors import SegueError


class BenchError(SegueError):
    """The measured server cannot be reached, refused, or answered with something else than was asked for."""
