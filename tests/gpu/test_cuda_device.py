"""The device on a GPU: graphs, padding, copies and memory. Each test is rehearsed on CPU by the same code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode, PageGrant
from shared.engine.cuda.extend_graphs import ExtendGraphs, token_buckets
from shared.engine.cuda.graphs import DecodeGraphs, buckets_for
from shared.engine.cuda.platform import Platform
from shared.wire.sampling_params import SamplingParams
from tests.gpu.small_device import PAGES_EACH, PROMPT_LEN, SmallDevice
from tests.simulation.oracle.toy_grammar import FIRM, allowed, state_of
from tests.unit.engine.tiny_models import VOCAB_SIZE

SLOTS = 9  # buckets 1, 2, 4, 8 and 9
MANY_STEPS = {"cpu": 40, "cuda": 10_000}


@pytest.fixture
def small(platform: Platform, tmp_path: Path) -> SmallDevice:
    return SmallDevice(platform, tmp_path, SLOTS)


@contextmanager
def eagerly(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plan fits a graph: every step runs the work that was captured, but does not replay it."""
    real = DecodeGraphs.stage

    def stage(self: DecodeGraphs, *args: object) -> object:
        self.forget_plan()
        real(self, *args)  # type: ignore[arg-type]
        self._fits = False
        return real(self, *args)  # type: ignore[arg-type]

    with patch.context() as patched:
        patched.setattr(DecodeGraphs, "stage", stage)
        yield


@pytest.mark.parametrize(
    "rows", sorted({size for each in buckets_for(SLOTS) for size in (each - 1, each)} - {0})
)
def test_a_graph_gives_the_bits_of_its_work_run_eagerly(
    small: SmallDevice, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = range(rows)
    small.prefill(slots)
    tokens = {slot: small.tokens[slot][-1] for slot in slots}

    def step() -> list[Tensor]:
        joins = tuple(small.join(slot, PROMPT_LEN, tokens[slot]) for slot in slots)
        small.decode(slots, joins=joins)
        return [small.logits[slot][-1].cpu() for slot in slots]

    by_graph = step()
    before = small.device.counters.graph_steps.copy()
    with eagerly(monkeypatch):
        alone = step()
    assert small.device.counters.graph_steps["eager"] > before["eager"]
    assert all(torch.equal(*pair) for pair in zip(by_graph, alone, strict=True))
    assert all(bool(row.isfinite().all()) for row in by_graph)


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_a_graph_of_prompts_gives_the_logits_of_a_step_run_eagerly(
    small: SmallDevice, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = range(requests)
    tokens = PROMPT_LEN * requests
    bucket = next(size for size in token_buckets(2048) if size >= tokens)
    small.prefill(slots)
    assert small.device.counters.extend_graph_steps == {str(bucket): 1, "eager": 0}
    with monkeypatch.context() as patched:
        patched.setattr(ExtendGraphs, "stage", lambda *_: None)
        small.prefill(slots)
    assert small.device.counters.extend_graph_steps.total() == 1
    for slot in slots:
        by_graph, eager = (each.float().cpu() for each in small.logits[slot])
        assert bool(by_graph.isfinite().all())
        # tiles of attention may differ, and with them the order of sums
        torch.testing.assert_close(by_graph, eager, rtol=0, atol=0.03 * float(eager.abs().max()))
    assert torch.isfinite(small.cache.store[: requests * PAGES_EACH : PAGES_EACH]).all()
    assert torch.isnan(small.cache.store[SLOTS * PAGES_EACH : small.cache.pages]).all()


@pytest.mark.parametrize("context_len", [49, 50])
def test_graphs_of_prompts_are_captured_where_a_context_fills_no_page(
    platform: Platform, tmp_path: Path, context_len: int
) -> None:
    small = SmallDevice(platform, tmp_path, SLOTS, context_len=context_len)
    small.prefill([0])
    assert small.device.counters.extend_graph_steps["32"] == 1


def test_padding_touches_no_page_of_the_pool(small: SmallDevice) -> None:
    slots = (0, 3, 7)
    small.prefill(slots)
    for _ in range(3):
        small.decode(slots)
    store = small.cache.store[: small.cache.pages].flatten(1).float().cpu()
    written = {page for page in range(small.cache.pages) if not bool(store[page].isnan().all())}
    assert written == {4 * slot + page for slot in slots for page in range(2)}


def test_pages_are_copied_while_steps_run(small: SmallDevice) -> None:
    """A slot goes to host pages and comes back on others; the steps of another one run meanwhile."""
    small.prefill((0, 1))
    small.decode((0, 1))
    known = small.cache.store[:2].clone()
    pages, elsewhere = [0, 1], [4 * SLOTS, 4 * SLOTS + 1]
    launched = [small.launch(ForwardMode.DECODE, decode_slots=(1,)) for _ in range(3)]
    small.device.start_backup(1, pages, [2, 3])
    launched += [small.launch(ForwardMode.DECODE, decode_slots=(1,)) for _ in range(3)]
    wait_for_copy(small, 1)
    small.device.start_restore(2, [2, 3], elsewhere)
    launched += [small.launch(ForwardMode.DECODE, decode_slots=(1,)) for _ in range(3)]
    wait_for_copy(small, 2)
    for step in launched:
        assert len(small.device.wait(step).token_ids) == 1
    assert torch.equal(small.cache.store[elsewhere].view(torch.uint8), known.view(torch.uint8))


def wait_for_copy(small: SmallDevice, copy_id: int) -> None:
    done: list[int] = []
    while not done:
        done = small.device.copies_done()
    assert done == [copy_id]


def test_no_launch_waits_for_the_device(small: SmallDevice, platform: Platform) -> None:
    """By CUDA's own word: torch raises where a call would wait."""
    small.prefill(range(4))
    small.decode(range(4))
    on_gpu = platform.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        steps = [small.launch(ForwardMode.DECODE, decode_slots=tuple(range(4))) for _ in range(4)]
        steps.append(
            small.launch(ForwardMode.PREBUILT, joins=(small.join(5, 3, 1),), grants=(PageGrant(6, (30,)),))
        )
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    assert [len(small.device.wait(step).token_ids) for step in steps] == [4, 4, 4, 4, 0]


def test_masks_and_what_is_told_of_tokens(small: SmallDevice) -> None:
    """A grammar's rows wait for the token before, beside one that has none; all are told of, the prompt too."""
    asked = SamplingParams(max_new_tokens=64, seed=5, temperature=0.8, logprobs=3, prompt_logprobs=2)
    firm = structs.replace(asked, grammar=FIRM, min_p=0.01)
    joins = (small.join(0, params=firm), small.join(1, params=firm), small.join(2, params=asked))
    rows = [ExtendRow(slot, small.prompt(slot), 0, True, small.prompt(slot)[1:]) for slot in range(3)]
    steps = [small.launch(ForwardMode.EXTEND, joins=joins, extend=tuple(rows))]
    sampled = []
    for _ in range(20):
        steps.append(small.launch(ForwardMode.DECODE, decode_slots=(0, 1, 2)))
        sampled.append(small.device.wait(steps[-2]))
    sampled.append(small.device.wait(steps[-1]))
    for slot in range(3):
        tokens = [step.token_ids[slot] for step in sampled]
        for place, token in enumerate(tokens):
            if slot < 2:
                assert token in allowed(state_of(tokens[:place]), VOCAB_SIZE)
            expected = small.logits[slot][place].double().log_softmax(-1).cpu()
            told = sampled[place].logprobs[slot]
            assert told.logprob == pytest.approx(float(expected[token]), abs=1e-6)
            assert [value for _, value in told.top] == pytest.approx(
                expected.topk(3).values.tolist(), abs=1e-6
            )
        assert len(sampled[0].scored[slot]) == PROMPT_LEN - 1


def test_memory_does_not_grow(small: SmallDevice, platform: Platform) -> None:
    slots = range(SLOTS - 1)
    small.prefill(slots)
    tokens = {slot: small.tokens[slot][-1] for slot in slots}
    on_gpu = platform.device.type == "cuda"
    joins = tuple(small.join(slot, PROMPT_LEN, tokens[slot]) for slot in slots)
    rounds, used = MANY_STEPS[platform.device.type] // 40, 0
    for number in range(rounds):
        small.decode(slots, joins=joins)
        for _ in range(39):
            small.decode(slots)
        for kept in small.logits.values():
            kept.clear()
        if number == 0 and on_gpu:
            used = memory_in_use()
    assert not on_gpu or memory_in_use() == used
    assert small.device.counters.graph_steps["8"] == 40 * rounds


def memory_in_use() -> int:
    """Bytes that torch has handed out, without what earlier tests left to the garbage collector."""
    gc.collect()
    return torch.cuda.memory_allocated()
