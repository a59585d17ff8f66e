"""What each step of a worker's device took, and how many rows it had: plain numbers, published by the shell.

The loop notes them as it settles a step, so they are there for every device and for both roles.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shared.batch.schedule_batch import ForwardMode, ScheduleBatch
from shared.primitives.metric_fields import ROWS, HistogramMetric, all_declared, observed

STEP_SECONDS = HistogramMetric(
    "segue_step_seconds",
    "Seconds of each device step, as its device measured them, by forward mode. Steps that compute nothing do not "
    "count.",
    ("mode",),
    (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
STEP_ROWS = HistogramMetric(
    "segue_step_rows", "Rows of each device step, each of one request, by forward mode.", ("mode",), ROWS
)


@all_declared
@dataclass(slots=True)
class StepCounters:
    """Measurements since they were last published."""

    extend_seconds: deque[float] = observed(STEP_SECONDS, mode="extend")
    decode_seconds: deque[float] = observed(STEP_SECONDS, mode="decode")
    mixed_seconds: deque[float] = observed(STEP_SECONDS, mode="mixed")
    extend_rows: deque[float] = observed(STEP_ROWS, mode="extend")
    decode_rows: deque[float] = observed(STEP_ROWS, mode="decode")
    mixed_rows: deque[float] = observed(STEP_ROWS, mode="mixed")

    def settled(self, batch: ScheduleBatch, seconds: float) -> None:
        """A step has settled; 0.0 seconds: its device does not know."""
        match batch.mode:
            case ForwardMode.DECODE:
                all_rows, all_seconds = self.decode_rows, self.decode_seconds
            case ForwardMode.EXTEND:
                all_rows, all_seconds = self.extend_rows, self.extend_seconds
            case ForwardMode.MIXED:
                all_rows, all_seconds = self.mixed_rows, self.mixed_seconds
            case ForwardMode.PREBUILT:
                return
        all_rows.append(len(batch.decode_slots) + len(batch.extend))
        if seconds:
            all_seconds.append(seconds)
