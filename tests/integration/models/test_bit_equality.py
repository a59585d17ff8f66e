"""Segue against itself, bit for bit: however a request is served, each token is sampled from the same logits.

The reference is the request alone on fresh workers: its whole prompt in one step, then the overlap loop. Every other
way must give the same bits at every place of the output, and each test proves from counters that its way was taken.
Tokens are drawn at temperature 1, with penalties and filters too, so positions and histories are compared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch, SlotJoin
from shared.engine.config import EngineConfig
from shared.engine.engine import load
from shared.kv.page_pool import pages_for_tokens
from shared.wire.sampling_params import SamplingParams
from tests.integration.models.desk import DeskRequest
from tests.integration.models.one_process import DECODE, PREFILL, CollectedAnswer, OneProcess
from tests.integration.models.recording_device import Logbook, RecordingDevice
from tests.unit.engine.driver import tokens_of
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model, tiny_model_of_blocks

PAGE_SIZE = 16
BLOCKS = "mistral, 4-bit blocks, KV in float16"  # what `segue up` serves
FAMILIES = (
    "llama, biases, llama3 rope, inner size 1100",
    "mistral, sliding window",
    "qwen2, window in upper layers",
    "qwen3, qk-norm, head_dim 40",
    BLOCKS,
)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "min_new_tokens": 8},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": {3: 4.0, 99: -5.0}},
)
PROMPT_LENS = (1, 5, 15, 16, 17, 31, 32, 48, 63, 64, 65, 100, 129, 160, 200, 250)


def request_of(seed: int, prompt: Sequence[int], max_new_tokens: int, **fields: Any) -> DeskRequest:
    way = {"min_new_tokens": 2} | WAYS[seed % len(WAYS)]  # so that each takes a step on the decode worker
    params = SamplingParams(max_new_tokens=max_new_tokens, seed=seed, **way)
    return DeskRequest(tuple(prompt), msgspec.structs.replace(params, **fields))


CROWD = [
    request_of(seed, tokens_of(seed, length, VOCAB_SIZE), 9 + seed % 16)
    for seed, length in enumerate(PROMPT_LENS)
]
LONG = [
    request_of(seed, tokens_of(seed, 8 * (seed - 99), VOCAB_SIZE), 60, ignore_eos=True)
    for seed in range(100, 106)
]
TIGHT = DECODE.model_copy(update={"kv_pages": 16, "init_new_token_ratio": 0.05})  # LONG would fill 30 pages


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    if request.param == BLOCKS:
        tiny_model_of_blocks(path)
    else:
        tiny_model(request.param, path)
    return path


@contextmanager
def workers(folder: Path, **settings: Any) -> Iterator[OneProcess]:
    process = OneProcess(folder, **settings)
    try:
        yield process
    finally:
        process.close()


Alone = Callable[[DeskRequest], CollectedAnswer]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    """The answer to a request alone on fresh workers."""
    answers: dict[int, CollectedAnswer] = {}

    def serve(request: DeskRequest) -> CollectedAnswer:
        seed = request.params.seed
        if seed not in answers:
            with workers(folder) as process:
                [answers[seed]] = process.answers([request])
                assert process.prefill.counters.extend_steps == 1
                assert process.prefill.counters.cached_tokens == process.decode.counters.cached_tokens == 0
                assert process.decode_device.unsettled_max == 2
        return answers[seed]

    return serve


def assert_same_bits(found: CollectedAnswer, expected: CollectedAnswer, start: int = 0) -> None:
    """Every place from `start` on was computed, and whenever it was, from the logits of the reference."""
    assert found.token_ids == expected.token_ids
    assert found.finish == expected.finish
    assert sorted(found.logits) == list(range(start, len(expected.token_ids)))
    for index, rows in found.logits.items():
        [reference] = expected.logits[index]
        assert not reference.isnan().any()
        for row in rows:
            assert torch.equal(row, reference), (
                f"output {index} differs by {(row - reference).abs().max():.1e}"
            )


def assert_all_same_bits(process: OneProcess, requests: Sequence[DeskRequest], alone: Alone) -> None:
    for request in requests:
        assert_same_bits(process.answer(request), alone(request))


def test_the_references_are_worth_comparing(alone: Alone) -> None:
    answers = [alone(request) for request in CROWD]
    assert sum(len(answer.token_ids) for answer in answers) > 200
    assert sum(len(set(answer.token_ids)) for answer in answers) > 120
    rows = [rows[0] for answer in answers for rows in answer.logits.values()]
    assert len({row.numpy().tobytes() for row in rows}) == len(rows)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap loop", "normal loop"])
def test_a_crowd_of_16_changes_no_bit(folder: Path, alone: Alone, overlap: bool) -> None:
    with workers(folder, overlap=overlap) as process:
        process.answers(CROWD)
        assert process.prefill_device.rows_max[ForwardMode.EXTEND] == 16
        assert process.decode_device.rows_max[ForwardMode.DECODE] == 16
        assert process.decode_device.unsettled_max == (2 if overlap else 1)
        assert_all_same_bits(process, CROWD, alone)


@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_change_no_bit(folder: Path, alone: Alone, chunk: int) -> None:
    prefill = PREFILL.model_copy(update={"chunked_prefill_size": chunk})
    with workers(folder, prefill=prefill) as process:
        process.answers(CROWD)
        assert process.prefill.counters.chunks > 10
        assert_all_same_bits(process, CROWD, alone)


def test_a_cached_prefix_changes_no_bit(folder: Path, alone: Alone) -> None:
    prompt, whole_pages = tokens_of(200, 200, VOCAB_SIZE), tokens_of(201, 64, VOCAB_SIZE)
    first = request_of(200, prompt, 40, ignore_eos=True)
    again = request_of(201, prompt, 20)
    aligned, aligned_again = request_of(202, whole_pages, 20), request_of(204, whole_pages, 20)
    talk = [*prompt, *alone(first).token_ids, *tokens_of(202, 21, VOCAB_SIZE)]
    next_turn = request_of(206, talk, 20)
    with workers(folder) as process:
        process.answers([first, aligned])
        process.answers([again, aligned_again])
        assert (
            process.stream(again).prefill_cached_tokens == process.stream(again).decode_cached_tokens == 192
        )
        assert process.stream(aligned_again).prefill_cached_tokens == 48  # the last token must be computed
        assert process.stream(aligned_again).decode_cached_tokens == 64
        assert process.decode.counters.full_hits == 1
        process.answers([next_turn])
        assert process.stream(next_turn).prefill_cached_tokens == 192
        assert process.stream(next_turn).decode_cached_tokens == 224  # pages that DECODE steps wrote
        assert_all_same_bits(process, [first, again, aligned, aligned_again, next_turn], alone)


def test_a_prefix_shared_within_a_crowd_changes_no_bit(folder: Path, alone: Alone) -> None:
    prefix = tokens_of(300, 96, VOCAB_SIZE)
    crowd = [request_of(seed, [*prefix, *tokens_of(seed, 7, VOCAB_SIZE)], 20) for seed in range(300, 308)]
    with workers(folder) as process:
        process.answers(crowd)
        assert process.prefill.counters.cached_tokens == 7 * 96
        assert_all_same_bits(process, crowd, alone)


def test_retraction_to_host_memory_changes_no_bit(folder: Path, alone: Alone) -> None:
    with workers(folder, decode=TIGHT.model_copy(update={"host_fraction": 2.0})) as process:
        process.answers(LONG)
        counters = process.decode.counters
        assert counters.retractions >= 1
        assert counters.resumes == counters.backups == counters.retractions
        assert_all_same_bits(process, LONG, alone)


def test_retraction_without_host_memory_changes_no_bit(folder: Path, alone: Alone) -> None:
    """What is retracted is computed again where it was."""
    with workers(folder, decode=TIGHT) as process:
        process.answers(LONG)
        assert process.decode.counters.recomputed >= 1
        assert process.decode.counters.returned_to_router == 0
        assert {process.stream(request).attempt for request in LONG} == {1}
        assert_all_same_bits(process, LONG, alone)


def test_retraction_to_the_router_changes_no_bit(folder: Path, alone: Alone) -> None:
    with workers(folder, decode=TIGHT.model_copy(update={"local_tokens_max": 0})) as process:
        process.answers(LONG)
        assert process.decode.counters.returned_to_router >= 1
        assert process.decode.counters.resumes == 0
        assert max(process.stream(request).attempt for request in LONG) > 1
        assert_all_same_bits(process, LONG, alone)


def test_prompts_that_decode_computes_beside_its_streams_change_no_bit(folder: Path, alone: Alone) -> None:
    with workers(folder, whole=True, decode=DECODE.model_copy(update={"local_tokens_max": 32})) as process:
        process.answers(CROWD)
        counters = process.decode.counters
        assert counters.local_prompts == len(CROWD)
        assert counters.mixed_steps > 10
        assert process.prefill.counters.extend_steps == 0
        assert_all_same_bits(process, CROWD, alone)


def test_streams_that_decode_served_whole_are_retracted_without_another_bit(
    folder: Path, alone: Alone
) -> None:
    with workers(folder, whole=True, decode=TIGHT) as process:
        process.answers(LONG)
        assert process.decode.counters.retractions >= 1
        assert_all_same_bits(process, LONG, alone)


def test_a_continuation_on_fresh_workers_changes_no_bit(folder: Path, alone: Alone) -> None:
    with workers(
        folder, decode=DECODE.model_copy(update={"flush_seconds": 1e-6})
    ) as lost:  # tokens come at once
        for request in CROWD:
            lost.desk.submit(request)
        lost.turn_until(
            lambda: all(stream.finish or stream.output_len >= 5 for stream in lost.desk.streams.values())
        )
        streams = [lost.stream(request) for request in CROWD]
    halves = {
        stream.request.rid: stream.token_ids[len(stream.request.prompt) :]
        for stream in streams
        if not stream.finish
    }
    cut = [request for request in CROWD if request.rid in halves]
    assert len(cut) > 10
    with workers(folder) as process:
        for request in cut:
            process.desk.submit(request, halves[request.rid], attempt=2)
        process.finish()
        for request in cut:
            assert_same_bits(process.answer(request), alone(request), start=len(halves[request.rid]))


def test_pages_in_any_order_change_no_bit(folder: Path, alone: Alone) -> None:
    with workers(folder, shuffle_pages=True) as process:
        process.answers(CROWD)
        pages = process.stream(CROWD[-1]).pages
        assert list(pages) != list(range(pages[0], pages[0] + len(pages)))
        assert_all_same_bits(process, CROWD, alone)


def test_without_schedulers_and_transfer_the_bits_are_the_same(folder: Path, alone: Alone) -> None:
    logbook = Logbook()
    engine = load(folder, EngineConfig(pages=32, page_size=PAGE_SIZE, slots=1), on_logits=logbook.write)
    device = RecordingDevice(engine.device, logbook)
    step = 0

    def run(mode: ForwardMode, **fields: Any) -> int:
        nonlocal step
        step += 1
        device.launch(ScheduleBatch(step, mode, **fields))
        [token_id] = device.wait(step).token_ids
        return token_id

    for request in CROWD:
        expected, prompt_len = alone(request), len(request.prompt)
        pages = tuple(range(pages_for_tokens(prompt_len + len(expected.token_ids), PAGE_SIZE)))
        join = SlotJoin(0, pages, 0, request.params, prompt_len, request.prompt)
        token_ids = [run(ForwardMode.EXTEND, joins=(join,), extend=(ExtendRow(0, request.prompt, 0, True),))]
        while len(token_ids) < len(expected.token_ids):
            token_ids.append(run(ForwardMode.DECODE, decode_slots=[0]))
        seed = request.params.seed
        logits = {index: rows for (name, index), rows in logbook.logits.items() if name == seed}
        assert_same_bits(CollectedAnswer(tuple(token_ids), expected.finish, logits), expected)
    device.close()
