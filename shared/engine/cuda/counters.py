"""What the device has done so far: plain numbers, published by the shell and read by tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shared.primitives.metric_fields import CounterMetric, all_declared, counted, counted_by, total

BUSY_SECONDS = CounterMetric(
    "segue_device_busy_seconds_total", "Seconds that the GPU worked on steps, by forward mode.", ("mode",)
)
GRAPH_STEPS = CounterMetric(
    "segue_graph_steps_total",
    "Steps with rows that decode, by the batch size of the CUDA graph that ran those; eager: without one.",
    ("rows",),
)
EXTEND_GRAPH_STEPS = CounterMetric(
    "segue_extend_graph_steps_total",
    "Parts of steps with prompts, by the tokens of the CUDA graph that ran them; eager: none holds so many tokens, "
    "keys or requests.",
    ("tokens",),
)
EAGER = "eager"


@all_declared
@dataclass(slots=True)
class DeviceCounters:
    """Totals since the start."""

    extend_seconds: float = counted(BUSY_SECONDS, mode="extend")
    decode_seconds: float = counted(BUSY_SECONDS, mode="decode")
    mixed_seconds: float = counted(BUSY_SECONDS, mode="mixed")
    prebuilt_seconds: float = counted(BUSY_SECONDS, mode="prebuilt")
    idle_seconds: float = total(
        "segue_device_idle_seconds_total",
        "Seconds that the GPU stood still between two steps of one request. It should be near 0: the host is too slow "
        "otherwise. Time without requests does not count.",
    )
    graph_steps: Counter[str] = counted_by(GRAPH_STEPS, EAGER)
    extend_graph_steps: Counter[str] = counted_by(EXTEND_GRAPH_STEPS, EAGER)
