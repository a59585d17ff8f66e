"""Host work of the schedulers: CPU seconds a step costs before and after the device, with a device that does nothing.

    python -m tests.benchmarks.schedulers [--steps 400] [--lines]

Decode: `rows` requests of 512 tokens run; `steady` plans and settles DECODE steps of all of them, `churn` also ends
one request and takes one in at every step. Prefill: prompts of 512 tokens in steps of 128; and one plan, in which a
step of 8,192 tokens is made of waiting prompts of 1,024 tokens while others are under lease, of three tenants. One
core, `process_time`; the best of five runs, because other work on the machine only adds. `--lines` counts the lines of
Python that run instead, a loop's as often as it turns: those are the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from time import process_time
from types import FrameType
from typing import Any

from decode.config import DecodeConfig
from decode.scheduler import DecodeScheduler
from prefill.config import PrefillConfig
from prefill.scheduler import PrefillScheduler
from shared.batch.effects import Send, StartFetch, WorkerEffect
from shared.links.events import PeerUp, Received
from shared.transfer.protocol import FetchLanded
from shared.wire.baton import Baton
from shared.wire.messages import Decode, Hello, Prefill, Release
from shared.wire.sampled import Sampled
from shared.wire.sampling_params import SamplingParams
from tests.unit.scheduling.worker_bench import HOLDER, PlainWords

PAGE_SIZE, PROMPT_LEN, CONTEXT_LEN = 16, 512, 4096
SHORT_LEN = 1024  # tokens of a prompt of which eight are in one step
ROUNDS = 5
PLANS = 20
ROUTER = "router/1"
Cost = Callable[[Callable[[], None], int], float]  # of a turn, where so many are taken


def decode_scheduler(
    rows: int, pages: int, host_pages: int, context_len: int, eos_token_ids: frozenset[int] = frozenset()
) -> DecodeScheduler:
    """A decode core in which so many requests of one tenant may run."""
    return DecodeScheduler(
        DecodeConfig(max_running_requests=rows, page_size=PAGE_SIZE, tenant_share_max=1.0),
        pages=pages,
        host_pages=host_pages,
        context_len=context_len,
        holder=HOLDER,
        words=PlainWords([0] * rows),
        kv_format="format",
        vocab_size=10**9,
        eos_token_ids=eos_token_ids,
    )


class DecodeUnderTest:
    """A decode scheduler whose device and transfer answer at once."""

    def __init__(self, rows: int, max_new_tokens: int):
        pages = 2 * rows * CONTEXT_LEN // PAGE_SIZE  # ample: this measures bookkeeping, not pressure
        self.core = decode_scheduler(rows, pages, 64, CONTEXT_LEN)
        self.now = 0.0
        self.number = 0
        self.core.on_link(PeerUp(ROUTER, Hello(session=1, role="router", uid="router", epoch=1)), self.now)
        for row in range(rows):
            self.arrive(max_new_tokens + row)
        self.step()
        assert self.core.slots_used == rows

    def arrive(self, max_new_tokens: int) -> None:
        """One request, its pages fetched at once."""
        self.number += 1
        rid, start = f"r{self.number}", 1000 * self.number
        pages = tuple(range(PROMPT_LEN // PAGE_SIZE))
        baton = Baton(rid, 1, HOLDER, "format", 0, 1, PROMPT_LEN, PROMPT_LEN, pages)
        params = SamplingParams(max_new_tokens=max_new_tokens, seed=1)
        token_ids = tuple(range(start, start + PROMPT_LEN + 1))
        self.core.on_link(Received(ROUTER, Decode(rid, 1, token_ids, PROMPT_LEN, params, baton)), self.now)
        for effect in self.core.take_effects():
            if isinstance(effect, StartFetch):
                self.core.on_fetch(FetchLanded(effect.fetch_id, 1, 0.001), self.now)

    def step(self) -> None:
        """One turn of the loop without its device."""
        self.now += 0.02
        self.core.tick(self.now)
        batch = self.core.plan(self.now)
        self.core.take_effects()
        if batch is not None:
            self.core.reclaim(batch.step)
            self.core.settle(batch, Sampled([9] * len(batch.decode_slots)), self.now)
            self.core.take_effects()
        self.core.next_deadline()


def decode_steady(rows: int, steps: int, cost: Cost) -> float:
    """What a DECODE step of `rows` rows costs."""
    worker = DecodeUnderTest(rows, 10 * steps)
    return cost(worker.step, steps)


def decode_churn(rows: int, steps: int, cost: Cost) -> float:
    """The same where at each step a request ends by length and another one joins, by steps of two turns."""
    worker = DecodeUnderTest(rows, 3)

    def turn() -> None:
        worker.step()
        worker.step()
        if worker.core.slots_used < rows:
            worker.arrive(rows)

    return cost(turn, steps)


def _prefill_core(config: PrefillConfig, words: int) -> PrefillScheduler:
    """A prefill scheduler with so many lease words, to which one router is connected."""
    core = PrefillScheduler(
        config,
        pages=64 * 1024,
        context_len=CONTEXT_LEN,
        holder=HOLDER,
        words=PlainWords([0] * words),
        kv_format="format",
        vocab_size=10**9,
        eos_token_ids=frozenset(),
    )
    core.on_link(PeerUp(ROUTER, Hello(session=1, role="router", uid="router", epoch=1)), 0.0)
    return core


def prefill(steps: int, cost: Cost) -> float:
    """What a prompt costs: intake, EXTEND, lease, and its release."""
    core = _prefill_core(PrefillConfig(page_size=PAGE_SIZE), 64)
    numbers = iter(range(10**9))

    def prompt() -> None:
        number = next(numbers)
        token_ids = tuple(range(1000 * number, 1000 * number + PROMPT_LEN))
        command = Prefill(
            f"r{number}", 1, token_ids, PROMPT_LEN, SamplingParams(max_new_tokens=64, seed=number)
        )
        core.on_link(Received(ROUTER, command), float(number))
        core.tick(float(number))
        batch = core.plan(float(number))
        assert batch is not None
        core.reclaim(batch.step)
        core.settle(batch, Sampled([9]), float(number))
        core.on_link(Received(ROUTER, Release(f"r{number}", 1)), float(number))
        _sent(core.take_effects())
        core.next_deadline()

    return cost(prompt, steps)


def prefill_plan(leases: int, waiting: int, plans: int, cost: Cost) -> float:
    """What a plan costs: `waiting` prompts, and `leases` others whose pages are under lease."""
    config = PrefillConfig(page_size=PAGE_SIZE, chunked_prefill_size=8192, max_running_requests=256)
    spent = 0.0
    for _ in range(plans):
        core = _prefill_core(config, 1024)
        _send_prompts(core, 0, leases)
        while (batch := core.plan(0.0)) is not None:
            core.reclaim(batch.step)
            core.settle(batch, Sampled([9] * len(batch.extend)), 0.0)
        assert core.leases_held == leases
        _send_prompts(core, leases, waiting)
        spent += cost(lambda core=core: core.plan(1.0), 1)  # type: ignore[misc]
    return spent / plans


def _send_prompts(core: PrefillScheduler, first: int, count: int) -> None:
    for number in range(first, first + count):
        token_ids = tuple(range(1000 * number, 1000 * number + SHORT_LEN))
        params = SamplingParams(max_new_tokens=64, seed=number)
        command = Prefill(f"r{number}", 1, token_ids, SHORT_LEN, params, tenant=f"tenant {number % 3}")
        core.on_link(Received(ROUTER, command), 0.0)
    core.take_effects()


def _sent(effects: list[WorkerEffect]) -> int:
    return sum(isinstance(effect, Send) for effect in effects)


def seconds(turn: Callable[[], None], count: int) -> float:
    """Seconds of CPU a turn."""
    started = process_time()
    for _ in range(count):
        turn()
    return (process_time() - started) / count


def lines(turn: Callable[[], None], count: int) -> float:
    """Lines of Python that a turn runs."""
    ran = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal ran
        ran += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(count):
            turn()
    finally:
        sys.settrace(before)
    return ran / count


def main() -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lines", action="store_true", help="count lines of Python, not seconds")
    given = parser.parse_args()
    steps, cost = given.steps, lines if given.lines else seconds
    unit, factor = ("lines", 1.0) if given.lines else ("us", 1e6)
    figures: list[tuple[str, Callable[[], float]]] = [
        ("decode, 64 rows, steady", lambda: decode_steady(64, steps, cost)),
        ("decode, 256 rows, steady", lambda: decode_steady(256, steps, cost)),
        ("decode, 64 rows, churn", lambda: decode_churn(64, steps, cost)),
        ("prefill, a prompt of 512 tokens", lambda: prefill(steps, cost)),
        ("prefill, a plan, 405 leases, 100 waiting", lambda: prefill_plan(405, 100, PLANS, cost)),
        ("prefill, a plan, 480 leases, 1,000 waiting", lambda: prefill_plan(480, 1000, PLANS, cost)),
    ]
    for name, figure in figures:
        best = min(figure() for _ in range(1 if given.lines else ROUNDS))
        sys.stdout.write(f"{name:44} {best * factor:8.0f} {unit}\n")


if __name__ == "__main__":
    main()
