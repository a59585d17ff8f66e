"""What transformers' own code costs a step, beside the dense decoder: `python -m tests.benchmarks.fallback`.

On one thread, in time of the CPU, which other work on the machine changes little.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from shared.batch.schedule_batch import ExtendRow, ForwardMode
from shared.local.model_store import resolve
from tests.unit.engine.driver import Driver, tokens_of

PROMPT, CONTEXT, STEPS = 512, 256, 20  # tokens, tokens, decode steps
WAYS: dict[str, dict[str, Any]] = {
    "dense decoder, the file's blocks": {},
    "dense decoder, float32": {"dtype": "float32", "kv_cache_dtype": "float32"},
    "transformers, float32": {"model_impl": "transformers", "kv_cache_dtype": "float32"},
}


def main() -> int:
    """Medians, in milliseconds."""
    folder = resolve("smollm2", lambda _line: None)
    say(f"SmolLM2-135M, one thread; a decode step at {CONTEXT} tokens of context, a prompt of {PROMPT}\n")
    say(f"{'ms of CPU':36}{'1 row':>10}{'8 rows':>10}{'prompt':>10}")
    for name, settings in WAYS.items():
        driver = Driver(folder, pages=400, slots=9, threads=1, **settings)
        figures = [decode(driver, 1), decode(driver, 8), prefill(driver)]
        say(f"{name:36}" + "".join(f"{1e3 * seconds:10.1f}" for seconds in figures))
        driver.close()
    return 0


def decode(driver: Driver, rows: int) -> float:
    """Seconds of CPU of a step of so many rows."""
    pages, prompt = CONTEXT // 16 + 2, tokens_of(1, CONTEXT, driver.engine.config.vocab_size)
    joins = [
        driver.join(slot, range(slot * pages, (slot + 1) * pages), prompt_len=CONTEXT) for slot in range(rows)
    ]
    for join in joins:
        driver.run(ForwardMode.EXTEND, joins=[join], extend=[ExtendRow(join.slot, prompt, 0, True)])
    return median(lambda: driver.decode(range(rows), 1))


def prefill(driver: Driver) -> float:
    """Of a whole prompt in one step."""
    prompt = tokens_of(2, PROMPT, driver.engine.config.vocab_size)
    return median(lambda: driver.prefill(8, prompt, range(300, 300 + PROMPT // 16)), 5)


def median(work: Callable[[], None], times: int = STEPS) -> float:
    """Without the first time."""
    found = []
    for _ in range(times + 1):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return statistics.median(found[1:])


def say(line: str) -> None:
    """One line of the report."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
