"""The engine by itself: linears, decode steps and prefill, with the machine's limits beside them.

python -m tests.benchmarks.engine --threads 2 [--kernels avx2] [--kv-cache-dtype float32]

A machine of one's own, please: every figure is the best of some tries, but a busy core is a busy core.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, process_time

import torch

from shared.batch.schedule_batch import ExtendRow, ForwardMode
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.gguf.packed_file import PACKED_FILE
from shared.engine.gguf.packing import BLOCK_INPUTS
from shared.engine.native.build import FLAGS, GCC_FLAGS, SOURCES, InstructionSet, choose
from shared.local.model_store import resolve
from shared.process.resources import usable_cores
from shared.wire.sampling_params import SamplingParams
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.product import KINDS, Product, packed_weight

OUTPUTS, INPUTS = 1536, 576  # of the small model's largest linears
ROWS = (1, 2, 4, 8, 16, 64, 512)
STEPS = ((1, 40), (8, 40), (32, 40), (16, 280), (16, 470), (32, 1024))  # requests, context
PROMPTS = (512, 2048)
CHUNKS = (128, 256, 512, 1024, 2048)
CROWDS = ((1, 256), (21, 12), (64, 4), (64, 1))  # requests of a step, tokens of each
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


def operations_limit(instruction_set: InstructionSet, threads: int) -> float:
    """Float32 operations a second in registers, on all threads."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "peak.so"
        flags = [*FLAGS, *GCC_FLAGS, *instruction_set.flags, f"-I{SOURCES}"]
        subprocess.run(
            ["g++", *flags, str(Path(__file__).with_name("peak.cpp")), "-o", str(target)], check=True
        )
        library = ctypes.CDLL(str(target))
        rounds, work = 2**22, library.segue_operations_of_a_round()
        library.segue_rounds.argtypes = [ctypes.c_long]
        with ThreadPoolExecutor(threads) as pool:
            seconds = best_seconds(lambda: list(pool.map(library.segue_rounds, [rounds] * threads)))
    return float(rounds * work * threads / seconds)


def reading_limit() -> float:
    """Bytes of memory read a second, by torch on its threads."""
    large = torch.ones(2**28)
    return large.nbytes / best_seconds(large.sum)


def linears(name: str, threads: int, peak: float) -> None:
    """Products of rows with matrices of every kind; weights lie in a core's cache."""
    say(
        f"GFLOP/s of x [rows, {INPUTS}] · Wᵀ, {OUTPUTS} outputs; {threads} threads of {name} can do {peak / 1e9:.0f}"
    )
    say("rows  " + "".join(f"{rows:>8}" for rows in ROWS))
    product, generator = Product(name, threads), torch.Generator().manual_seed(1)
    assert INPUTS % BLOCK_INPUTS == 0
    for kind in KINDS:
        packed = packed_weight(kind, OUTPUTS, INPUTS, generator)
        figures = []
        for rows in ROWS:
            x, y = torch.randn(rows, INPUTS), torch.zeros(rows, OUTPUTS)
            work = 2 * rows * OUTPUTS * INPUTS
            seconds = best_seconds(lambda: product.write(y, x, kind, packed), times=max(1, int(1e9 / work)))  # noqa: B023
            figures.append(work / seconds / 1e9)
        say(f"{kind:6}" + "".join(f"{figure:8.0f}" for figure in figures))
    product.close()


def steps(driver: Driver, weight_bytes: int, peak: float, bandwidth: float) -> None:
    """Steps of the device, sampling included; the limit is the longer of arithmetic and reading weights and KV once."""
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
        reading = (weight_bytes + requests * context * cell_bytes) / bandwidth
        limit = max(2 * requests * config.parameters / peak, reading)
        say(f"{requests:8} {context:8} {seconds * 1e3:7.1f} {limit * 1e3:7.1f} {requests / seconds:9.0f}")


def prefills(driver: Driver, peak: float) -> None:
    """Whole prompts in one step."""
    config = driver.engine.config
    assert isinstance(config, ModelConfig), "the dense decoder is measured here"
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


def chunks(driver: Driver) -> None:
    """A long prompt in steps of other sizes, and steps of many short prompts; CPU time, so that other work adds little.

    What one step takes is what a request that comes may have to wait.
    """
    vocab_size, length = driver.engine.config.vocab_size, PROMPTS[-1]
    prompt, pages = tokens_of(0, length, vocab_size), range(length // driver.engine.cache.page_size)
    say()
    say("chunk  CPU s of a step  tokens a CPU second")
    for size in CHUNKS:
        seconds = best_cpu_seconds(lambda: driver.prefill(0, prompt, pages, chunk=size))  # noqa: B023
        say(f"{size:5} {seconds * size / length:16.2f} {length / seconds:20.0f}")
    say()
    say("requests of a step  tokens of each  CPU s")
    for requests, tokens in CROWDS:
        seconds = best_cpu_seconds(lambda: crowd(driver, requests, tokens))  # noqa: B023
        say(f"{requests:18} {tokens:15} {seconds:6.2f}")


def crowd(driver: Driver, requests: int, tokens: int) -> None:
    """One step of so many whole prompts, with sampling."""
    pages = -(-tokens // driver.engine.cache.page_size)
    prompts = [tokens_of(slot, tokens, driver.engine.config.vocab_size) for slot in range(requests)]
    sampling = SamplingParams(max_new_tokens=4, seed=1, temperature=1.0)
    joins = [
        driver.join(slot, range(slot * pages, (slot + 1) * pages), prompt_len=tokens, params=sampling)
        for slot in range(requests)
    ]
    rows = [ExtendRow(slot, prompts[slot], 0, True) for slot in range(requests)]
    driver.run(ForwardMode.EXTEND, joins=joins, extend=rows)


def best_cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of all threads for one piece of work, the best of some tries."""
    found = []
    for _ in range(TRIES):
        start = process_time()
        work()
        found.append(process_time() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.engine", description=__doc__)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    instruction_set = choose(given.kernels)
    peak, bandwidth = operations_limit(instruction_set, given.threads), reading_limit()
    linears(instruction_set.name, given.threads, peak)
    folder = Path(resolve("smollm2", lambda _line: None))
    driver = Driver(
        folder,
        pages=2304,
        slots=64,
        threads=given.threads,
        kernels=given.kernels,
        kv_cache_dtype=given.kv_cache_dtype,
    )
    say()
    say(driver.engine.description)
    steps(driver, (folder / PACKED_FILE).stat().st_size, peak, bandwidth)
    prefills(driver, peak)
    chunks(driver)
    driver.close()


if __name__ == "__main__":
    main()
