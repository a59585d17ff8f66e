"""Where a step's time goes on the device: seconds by kernel, and how long the device computes nothing meanwhile.

By torch's profiler, which sees each kernel of a graph. What it costs is in the figures: they are shares, not times to
quote.
"""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

KERNELS_SHOWN = 14
LONGEST = 96
FUNCTIONS_SHOWN = 30


def profiled(name: str, steps: int, work: Callable[[], None]) -> list[str]:
    """Lines about the kernels that `work`, so many steps, runs on the device; nothing where there is no GPU."""
    if not torch.cuda.is_available():
        work()
        return [f"{name}: no GPU, no kernels"]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type.name == "CUDA" and not _is_mark(event):
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name].append(event.time_range.elapsed_us())
    busy, span = _union(spans)
    lines = [
        f"{name}: {len(spans) / steps:.0f} kernels and copies a step, {span / steps:.0f} us a step, of which "
        f"{busy / steps:.0f} us some kernel runs"
    ]
    order = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:KERNELS_SHOWN]
    for kernel, each in order:
        count, total = len(each), sum(each)
        line = f"  {total / steps:8.1f} us a step, {count / steps:6.1f} of {total / count:7.1f} us  {kernel[:LONGEST]}"
        lines.append(line)
    return lines


def host_profiled(name: str, times: int, work: Callable[[], None]) -> list[str]:
    """Lines about the functions that take the host's time, by Python's own profiler: launches of kernels are calls."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(times):
        work()
    profile.disable()
    table = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    order = sorted(table.items(), key=lambda item: -item[1][2])[:FUNCTIONS_SHOWN]
    return [
        f"{name}, the host's time by function:",
        *(
            f"  {1e6 * own / times:8.1f} us, {calls / times:6.1f} calls  {path[-40:]}:{line} {function[:LONGEST]}"
            for (path, line, function), (calls, _, own, _, _) in order
        ),
    ]


def _is_mark(event: Any) -> bool:
    """Ranges that the profiler draws over kernels."""
    return bool(getattr(event, "is_user_annotation", False))


def _union(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Microseconds that any span covers, and from the first to the last."""
    covered, end = 0.0, 0.0
    ordered = sorted(spans)
    for begin, until in ordered:
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    return covered, end - ordered[0][0] if ordered else 0.0
