"""What grammars and logprobs cost: a decode step of eight such rows against one of eight free ones, and a compile.

    python -m tests.benchmarks.constrained [--steps 200]

Steps of each kind take turns on one device, so that other work on the machine meets all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from router.openai.tools.structured_output import json_grammar
from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch, SlotJoin
from shared.engine.config import EngineConfig
from shared.engine.engine import load
from shared.engine.parts import Engine
from shared.engine.sampling.grammars import Grammars
from shared.local.model_store import resolve
from shared.process.resources import usable_cores
from shared.wire.grammar import Grammar
from shared.wire.sampling_params import SamplingParams

ROWS = 8
PAGES = 24  # of a row
PAGE_SIZE = 16  # tokens
PROMPT = tuple(range(1000, 1016))
GOAL = 1.15
RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 200,
}
KINDS: dict[str, dict[str, Any]] = {  # parameters of sampling
    "free": {},
    "schema": {"grammar": json_grammar(RECORDS, "schema")},
    "regex": {"grammar": Grammar("regex", "([a-z]{1,12} )+")},
    "choice": {"grammar": Grammar("regex", "((north|south|east|west)-)+")},
    "top 5": {"logprobs": 5},
}


class Rows:
    """Eight rows of each kind on one device."""

    def __init__(self, engine: Engine):
        self._device = engine.device
        self._step = 0
        for number, asked in enumerate(KINDS.values()):
            slots = self.slots(number)
            # What a grammar may end would end: none of these rows may, before the steps are over.
            joins = tuple(
                SlotJoin(
                    slot,
                    tuple(range(slot * PAGES, (slot + 1) * PAGES)),
                    0,
                    SamplingParams(
                        max_new_tokens=1000, seed=slot, temperature=1.0, min_new_tokens=1000, **asked
                    ),
                    len(PROMPT),
                    PROMPT if "grammar" in asked else (),
                )
                for slot in slots
            )
            rows = tuple(ExtendRow(slot, PROMPT, 0, samples=True) for slot in slots)
            self._run(ForwardMode.EXTEND, joins=joins, extend=rows)

    @staticmethod
    def slots(number: int) -> range:
        """Those of a kind."""
        return range(number * ROWS, (number + 1) * ROWS)

    def decode(self, number: int) -> float:
        """Seconds of a step of one kind."""
        return self._run(ForwardMode.DECODE, decode_slots=self.slots(number))

    def _run(self, mode: ForwardMode, **parts: object) -> float:
        self._step += 1
        began = perf_counter()
        self._device.launch(ScheduleBatch(self._step, mode, **parts))  # type: ignore[arg-type]
        sampled = self._device.wait(self._step)
        assert not sampled.failed, sampled.failed
        return perf_counter() - began


def compile_seconds(folder: Path) -> tuple[float, float]:
    """Of a schema of 2 kB: until a matcher of it is there, the first time and the second; medians."""
    grammars = Grammars(folder / "tokenizer.json", 49_152, {0, 2})
    first, again = list[float](), list[float]()
    for number in range(20):
        properties = {f"field_{number}_{at}": {"type": ["string", "integer"][at % 2]} for at in range(55)}
        text = json.dumps({"type": "object", "properties": properties, "required": list(properties)[:10]})
        grammar = Grammar("json", text)
        for seconds in (first, again):
            began = perf_counter()
            grammars.matcher(grammar)
            seconds.append(perf_counter() - began)
    return statistics.median(first), statistics.median(again)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.constrained")
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    folder = Path(resolve("smollm2", lambda _line: None))
    first, again = compile_seconds(folder)
    sys.stdout.write(f"a schema of 2 kB is ready in {1e3 * first:.2f} ms, again in {1e3 * again:.3f} ms\n")
    slots = len(KINDS) * ROWS
    config = EngineConfig(pages=slots * PAGES, page_size=PAGE_SIZE, slots=slots, threads=usable_cores())
    engine = load(folder, config)
    rows = Rows(engine)
    seconds = [[rows.decode(number) for number in range(len(KINDS))] for _ in range(steps)]
    for number, kind in enumerate(KINDS):
        ratio = statistics.median(each[number] / each[0] for each in seconds)
        median = 1e3 * statistics.median(each[number] for each in seconds)
        sys.stdout.write(f"{kind:8} median step {median:5.1f} ms, {ratio:.3f} x free (goal {GOAL})\n")
    engine.device.close()


if __name__ == "__main__":
    main()
