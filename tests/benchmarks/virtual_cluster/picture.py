"""The runs of scenarios as a picture: how long requests waited for two tokens, and the tokens of each second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.virtual_cluster.scenario import RunCurves

PANEL_INCHES = (4.4, 3.4)
SHORTEST = 0.005  # seconds; the axis is logarithmic


def draw(curves: Mapping[str, RunCurves], path: Path) -> None:
    """Draw three panels, a line a run, into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * PANEL_INCHES[0], PANEL_INCHES[1]), layout="constrained")
    first, second, tokens = figure.subplots(1, 3)
    for name, run in curves.items():
        for axes, seconds in ((first, run.ttft), (second, run.second_token_gap)):
            axes.plot([max(SHORTEST, each) for each in seconds], range(len(seconds)), label=name)
        tokens.plot(range(len(run.tokens_by_second)), run.tokens_by_second, label=name)
    for axes, title in ((first, "arrival to the first token"), (second, "first token to the second")):
        axes.set_title(title)
        axes.set_xscale("log")
        axes.set_xlabel("seconds")
        axes.set_ylabel("% of requests within")
    tokens.set_title("tokens delivered")
    tokens.set_xlabel("second")
    tokens.set_ylabel("a second")
    tokens.set_ylim(bottom=0)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=110)
