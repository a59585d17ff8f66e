"""The engine by itself: linears, decode steps and prefill, with the machine's limits beside them.

python -m tests.benchmarks.engine --threads 2 [--kernels avx2] [--kv-dtype float32]

A machine of one's own, please: every figure is the best of some tries, but a busy core is a busy core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from shared.engine.native.build import choose
from shared.engine.packing import BLOCK_INPUTS
from shared.machine import usable_cores
from shared.model_store import resolve
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.product import KINDS, Product, packed_weight

OUTPUTS, INPUTS = 1536, 576  # of the small model's largest linears
ROWS = (1, 2, 4, 8, 16, 64, 512)
STEPS = ((1, 40), (8, 40), (32, 40), (16, 280), (16, 470), (32, 1024))  # requests, context
PROMPTS = (512, 2048)
TRIES = 5


def say(line: str = "") -> None:
    sys.stdout.write(f"{line}\n")


def best_seconds(work: Callable[[], object], times: int = 1) -> float:
    """Of one piece of work, done `times` times in each of some tries."""
    found = []
    for _ in range(TRIES):
        start = perf_counter()
        for _ in range(times):
            work()
        found.append((perf_counter() - start) / times)
    return min(found)


def limits() -> tuple[float, float]:
    """What the machine can do: float32 operations and bytes read a second, by torch on its threads."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    operations = 2 * 2048**3 / best_seconds(lambda: torch.mm(a, b))
    large = torch.ones(2**28)
    return operations, large.nbytes / best_seconds(large.sum)


def linears(name: str, threads: int, peak: float) -> None:
    """Products of rows with matrices of every kind; weights lie in a core's cache."""
    say(f"GFLOP/s of x [rows, {INPUTS}] · Wᵀ, {OUTPUTS} outputs; MKL with 2,048² floats: {peak / 1e9:.0f}")
    say("rows  " + "".join(f"{rows:>8}" for rows in ROWS))
    product, generator = Product(name, threads), torch.Generator().manual_seed(1)
    assert INPUTS % BLOCK_INPUTS == 0
    for kind in KINDS:
        packed = packed_weight(kind, OUTPUTS, INPUTS, generator)
        figures = []
        for rows in ROWS:
            x, work = torch.randn(rows, INPUTS), 2 * rows * OUTPUTS * INPUTS
            seconds = best_seconds(lambda: product(x, kind, packed, OUTPUTS), times=max(1, int(1e9 / work)))  # noqa: B023
            figures.append(work / seconds / 1e9)
        say(f"{kind:6}" + "".join(f"{figure:8.0f}" for figure in figures))
    product.close()


def steps(driver: Driver, peak: float, bandwidth: float) -> None:
    """Steps of the device, sampling included; the limit is that of arithmetic and of reading KV once, one by one."""
    config = driver.engine.config
    cell_bytes = driver.engine.cache.page_bytes // driver.engine.cache.page_size
    say()
    say(
        f"decode steps; memory is read at {bandwidth / 1e9:.0f} GB/s, a token of KV has {cell_bytes / 1e3:.1f} kB"
    )
    say("requests  context      ms   limit  tokens/s")
    for requests, context in STEPS:
        pages = -(-(context + 64) // 16)
        for slot in range(requests):
            driver.prefill(
                slot,
                tokens_of(slot, context, config.vocab_size),
                range(slot * pages, (slot + 1) * pages),
                chunk=512,
            )
        seconds = best_seconds(lambda: driver.decode(range(requests), 1), times=4)  # noqa: B023
        limit = 2 * requests * config.parameters / peak + requests * context * cell_bytes / bandwidth
        say(f"{requests:8} {context:8} {seconds * 1e3:7.1f} {limit * 1e3:7.1f} {requests / seconds:9.0f}")


def prefills(driver: Driver, peak: float) -> None:
    """Whole prompts in one step."""
    config = driver.engine.config
    per_token = 2 * (config.parameters - config.vocab_size * config.hidden_size)
    say()
    say("prefill        s   limit  tokens/s")
    for length in PROMPTS:
        prompt = tokens_of(length, length, config.vocab_size)
        seconds = best_seconds(lambda: driver.prefill(0, prompt, range(length // 16)))  # noqa: B023
        attention = 2 * config.layers * config.heads * config.head_dim * length**2
        say(
            f"{length:7} {seconds:8.2f} {(length * per_token + attention) / peak:7.2f} {length / seconds:9.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.engine", description=__doc__)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    peak, bandwidth = limits()
    linears(choose(given.kernels).name, given.threads, peak)
    folder = Path(resolve("smollm2", lambda _line: None))
    driver = Driver(
        folder, pages=2304, slots=32, threads=given.threads, kernels=given.kernels, kv_dtype=given.kv_dtype
    )
    say()
    say(driver.engine.description)
    steps(driver, peak, bandwidth)
    prefills(driver, peak)
    driver.close()


if __name__ == "__main__":
    main()
