"""Named cells of the table of `never_slower`: what routers choose is nearly as good as the better fixed choice."""

from __future__ import annotations

import pytest

from tests.benchmarks.virtual_cluster.never_slower import Cell, compared, run_candidate

SECONDS = 20.0


@pytest.mark.parametrize(
    ("cell", "share", "moves"),
    [
        # targets that a worker meets which does both
        (Cell("chat_1024_256_0", 2, "1s_100ms", 0.9), 0.98, False),
        (Cell("chat_512_512_0", 2, "2s_40ms", 0.9), 0.98, False),
        pytest.param(Cell("chat_1024_256_0", 4, "2s_40ms", 0.9), 0.98, False, marks=pytest.mark.long),
        # prompts are long for 40 ms: most is computed apart
        (Cell("chat_5000_250_50", 4, "2s_40ms", 0.9), 0.95, True),
        (Cell("chat_5000_250_0", 4, "2s_40ms", 0.9), 0.95, True),
        # long prompts that nobody shares: none may stand at prefill while decode has a turn for it soon
        (Cell("chat_5000_250_0", 4, "1s_100ms", 0.9), 0.85, False),
        (Cell("chat_5000_250_0", 4, "5s_20ms", 0.9), 0.98, True),
        # 20 ms between tokens: streams are packed, or a tenth of it is met
        pytest.param(Cell("chat_512_512_0", 2, "5s_20ms", 0.9), 0.98, True, marks=pytest.mark.long),
        pytest.param(Cell("chat_512_512_90", 2, "5s_20ms", 0.9), 0.98, True, marks=pytest.mark.long),
        (Cell("chat_1024_256_0", 2, "5s_20ms", 0.9), 0.98, True),
        (Cell("chat_5000_250_50", 2, "5s_20ms", 0.9), 0.98, True),
        pytest.param(Cell("chat_512_512_0", 4, "5s_20ms", 0.9), 0.98, True, marks=pytest.mark.long),
        pytest.param(Cell("chat_1024_256_0", 4, "5s_20ms", 0.9), 0.98, True, marks=pytest.mark.long),
        (Cell("chat_5000_250_50", 4, "5s_20ms", 0.9), 0.98, True),
    ],
    ids=lambda value: (
        "-".join(map(str, (value.load, value.gpus, value.slo))) if isinstance(value, Cell) else ""
    ),
)
def test_what_routers_choose_is_nearly_as_good_as_the_better_choice(
    cell: Cell, share: float, *, moves: bool
) -> None:
    runs = [run_candidate(cell, name, SECONDS, seed=0) for name in cell.candidates()]
    shown, automatic = compared(runs), runs[0]
    assert automatic["candidate"] == "automatic"
    assert automatic["local_prompts"], "no prompt was computed on decode"
    assert bool(automatic["moved_streams"]) >= moves, "no stream made room for prompts"
    assert float(str(shown["by_the_better"])) >= share, shown
