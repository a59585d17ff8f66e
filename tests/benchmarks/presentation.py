"""A comparison as a table in Markdown and as a picture: a panel a scenario, a bar a server."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.client.report import ScenarioResult, three_digits
from tests.benchmarks.comparison import Comparison, Measured, ratio_to_best_peer

SMALL_NOTE = "**Not figures**: a run of the small size, which shows that everything works."
BUSY_CORES_MAX = 0.2
BUSY_NOTE = (
    "**Not figures**: the machine was busy with something else. Servers whose threads spin while "
    "they wait for each other suffer most from that."
)
PANELS_PER_ROW = 4
PANEL_INCHES = (3.2, 2.6)
COLOURS = {
    "segue": "#c8553d",
    "llama": "#7d8ca3",
    "llama-256": "#b4bdcc",
    "vllm": "#588b8b",
    "vllm-256": "#a3c4c4",
}


def markdown(comparison: Comparison, picture: str) -> str:
    """The page: what was measured, the table, the picture, and with which settings."""
    machine, servers = comparison.machine, comparison.servers
    heads = ["", "unit", *(server.title for server in servers), "Segue against the best other"]
    lines = [
        "# Comparison",
        "",
        f"Written by `{comparison.command}`; medians of {comparison.rounds} rounds in turns, {comparison.date}, "
        f"{machine.cpu}, {machine.cores} cores, {machine.system}.",
        "",
        *([SMALL_NOTE, ""] if comparison.size == "small" else []),
        *([BUSY_NOTE, ""] if comparison.busy_cores > BUSY_CORES_MAX else []),
        _row(heads),
        _row(["---"] * 2 + ["---:"] * (len(servers) + 1)),
        *(_scenario_row(comparison, result) for result in servers[0].scenarios),
    ]
    if any(server.pss_bytes for server in servers):
        sizes = [f"{server.pss_bytes / 1e6:.0f}" if server.pss_bytes else "" for server in servers]
        lines.append(_row(["memory after the mixed requests (PSS)", "MB", *sizes, ""]))
    lines += ["", f"![the same figures as bars]({picture})", "", "Settings:", ""]
    lines += [f"- **{server.title}** ({server.package}): `{server.settings}`" for server in servers]
    return "\n".join(lines) + "\n"


def _scenario_row(comparison: Comparison, result: ScenarioResult) -> str:
    found = [server.result(result.name) for server in comparison.servers]
    ratio = ratio_to_best_peer(comparison, result.name)
    return _row(
        [
            f"{result.what} ({result.better} is better)",
            result.unit,
            *(three_digits(one.value) if one else "" for one in found),
            f"{ratio:.2f} times" if ratio else "",
        ]
    )


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(comparison: Comparison, file: Path) -> None:
    """Write the picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = comparison.servers[0].scenarios
    rows = -(-len(results) // PANELS_PER_ROW)
    figure = Figure(figsize=(PANELS_PER_ROW * PANEL_INCHES[0], rows * PANEL_INCHES[1]), layout="constrained")
    FigureCanvasAgg(figure)
    for place, result in enumerate(results):
        axes = figure.add_subplot(rows, PANELS_PER_ROW, place + 1)
        taking_part = [server for server in comparison.servers if server.result(result.name)]
        bars = axes.barh(
            [server.title.replace(", ", ",\n") for server in taking_part],
            [_value(server, result.name) for server in taking_part],
            color=[COLOURS.get(server.name, "#888888") for server in taking_part],
        )
        axes.bar_label(
            bars, [three_digits(_value(s, result.name)) for s in taking_part], padding=3, fontsize=8
        )
        axes.set_title(f"{result.name}: {result.unit}, {result.better} is better", fontsize=9, loc="left")
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.tick_params(labelsize=8, length=0)
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(file, dpi=150)


def _value(server: Measured, scenario: str) -> float:
    result = server.result(scenario)
    assert result is not None
    return result.value
