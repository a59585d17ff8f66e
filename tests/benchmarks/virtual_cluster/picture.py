"""Pictures of runs: how long requests waited for two tokens, and the tokens of each second; or a table of shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


CELL_INCHES = (0.62, 0.3)
Shares = Mapping[tuple[str, str], float | None]  # by row and column; None: nobody met a target


def draw_table(panels: Mapping[str, Shares], path: Path) -> None:
    """Draw a panel for each table, with the number in each cell, into a PNG file. All have the same rows and columns.

    Green is as good or better, red is worse.
    """
    from matplotlib.figure import Figure

    cells = next(iter(panels.values()))
    rows, columns = list(dict.fromkeys(row for row, _ in cells)), list(dict.fromkeys(at for _, at in cells))
    width, height = CELL_INCHES[0] * len(columns) + 1.2, CELL_INCHES[1] * len(rows) + 1.5
    figure = Figure(figsize=(width * len(panels), height), layout="constrained")
    for axes, (title, shares) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        grid: Sequence[Sequence[float]] = [
            [float("nan") if (share := shares.get((row, at))) is None else share for at in columns]
            for row in rows
        ]
        axes.imshow(grid, cmap="RdYlGn", vmin=0.5, vmax=1.25, aspect="auto")
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", fontsize=7)
        axes.set_yticks(range(len(rows)), rows, fontsize=7)
        for y, line in enumerate(grid):
            for x, share in enumerate(line):
                axes.text(
                    x, y, "-" if share != share else f"{share:.2f}", ha="center", va="center", fontsize=7
                )
    figure.savefig(path, dpi=110)
