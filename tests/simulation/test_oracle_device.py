"""The oracle sees every mistake: what is right gives the expected output, what is wrong gives another one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shared.batch.schedule_batch import ExtendRow, ForwardMode, PageGrant, ScheduleBatch, SlotJoin
from shared.wire.sampling_params import SamplingParams
from tests.simulation.mistakes.mutations import mutated
from tests.simulation.oracle.device import OracleDevice, Pages, Speed
from tests.simulation.oracle.model import expected_output
from tests.simulation.world.timeline import Timeline, TimelineProcess

PAGE_SIZE = 4
PROMPT = tuple(range(3, 14))  # two pages and three tokens
PARAMS = SamplingParams(max_new_tokens=6, seed=9, ignore_eos=True, frequency_penalty=0.5)
EXPECTED = expected_output(PROMPT, PARAMS)[0]


def a_device(pages: int = 16) -> OracleDevice:
    return OracleDevice(
        process=TimelineProcess(Timeline(), "device"),
        pages=Pages(pages, PAGE_SIZE, salt=1),
        host_pages=Pages(pages, PAGE_SIZE, salt=2),
        speed=Speed(),
        rng=random.Random(0),
        on_copied=lambda: None,
    )


def run(device: OracleDevice, batch: ScheduleBatch) -> list[int]:
    device.launch(batch)
    return device.wait(batch.step).token_ids


def prefill(
    device: OracleDevice, pages: Sequence[int], chunks: Sequence[int], prompt_len: int = len(PROMPT)
) -> int:
    """Compute the prompt in chunks that end at `chunks`; returns the first token."""
    join = SlotJoin(0, tuple(pages), 0, PARAMS, prompt_len, PROMPT)
    token_ids: list[int] = []
    for number, (start, end) in enumerate(zip((0, *chunks), chunks, strict=False)):
        row = ExtendRow(0, PROMPT[start:end], start, samples=end == len(PROMPT))
        joins = () if number else (join,)
        token_ids = run(device, ScheduleBatch(device.launched + 1, ForwardMode.EXTEND, joins, extend=(row,)))
    return token_ids[0]


def decode(device: OracleDevice, steps: int, grant: PageGrant | None = None) -> list[int]:
    token_ids = []
    for number in range(steps):
        grants = (grant,) if grant and number == 0 else ()
        batch = ScheduleBatch(device.launched + 1, ForwardMode.DECODE, grants=grants, decode_slots=[0])
        token_ids += run(device, batch)
    return token_ids


def a_prefilled_device() -> OracleDevice:
    device = a_device()
    prefill(device, [5, 2, 7], [11])
    return device


def join(device: OracleDevice, pages: Sequence[int], prompt_len: int = len(PROMPT)) -> None:
    """Continue in slot 0 behind the first token, as after a fetch."""
    token_ids = (*PROMPT, EXPECTED[0])
    joined = SlotJoin(0, tuple(pages), len(PROMPT), PARAMS, prompt_len, token_ids, token_ids[-1])
    run(device, ScheduleBatch(device.launched + 1, ForwardMode.PREBUILT, (joined,)))


def test_whole_and_in_chunks_the_answer_is_the_expected_one() -> None:
    for chunks in ([11], [4, 11], [4, 8, 11]):
        device = a_device()
        first = prefill(device, [5, 2, 7], chunks)
        assert (first, *decode(device, 5, PageGrant(0, (1, 3)))) == EXPECTED


def test_a_request_that_joins_with_its_pages_continues_as_expected() -> None:
    device = a_prefilled_device()
    join(device, [5, 2, 7, 4])
    assert tuple(decode(device, 5)) == EXPECTED[1:]


def test_pages_in_another_order_change_the_output() -> None:
    device = a_prefilled_device()
    join(device, [2, 5, 7, 4])
    assert tuple(decode(device, 5)) != EXPECTED[1:]


def test_a_forgotten_prompt_len_changes_the_output() -> None:
    device = a_prefilled_device()
    join(device, [5, 2, 7, 4], prompt_len=len(PROMPT) + 1)
    assert tuple(decode(device, 5)) != EXPECTED[1:]


def test_a_missing_page_is_the_invalid_page_and_no_crash() -> None:
    device = a_prefilled_device()
    join(device, [5, 2, 7])
    assert decode(device, 1) == [EXPECTED[1]]
    assert tuple(decode(device, 4)) != EXPECTED[2:]


def test_a_page_overwritten_between_launch_and_completion_changes_the_output() -> None:
    device = a_prefilled_device()
    join(device, [5, 2, 7, 4])
    device.launch(ScheduleBatch(3, ForwardMode.DECODE, decode_slots=[0]))
    device.pages.copy(2, device.pages, 9)
    assert device.wait(3).token_ids != [EXPECTED[1]]


def test_a_step_has_no_effect_before_it_completes() -> None:
    device = a_device()
    before = [list(cells) for cells in device.pages.cells]
    row = ExtendRow(0, PROMPT, 0, samples=True)
    joined = SlotJoin(0, (5, 2, 7), 0, PARAMS, len(PROMPT), PROMPT)
    device.launch(ScheduleBatch(1, ForwardMode.EXTEND, (joined,), extend=(row,)))
    assert (device.pages.cells, device.completed()) == (before, 0)
    while device.process.timeline.advance():
        pass
    assert device.pages.cells != before
    assert device.completed() == 1


def test_a_step_tells_the_seconds_that_were_drawn_for_it() -> None:
    device = a_prefilled_device()
    join(device, [5, 2, 7, 4])
    began_at = device.process.now
    device.launch(ScheduleBatch(3, ForwardMode.DECODE, decode_slots=[0]))
    assert device.wait(3).seconds == pytest.approx(device.process.now - began_at)


# ---- rows of prompts beside a row that decodes ----


def run_mixed(seed: int, pages: tuple[int, ...], kv_len: int = 0, slot: int = 1) -> list[int]:
    """Decode the request of slot 0 in the step that computes its prompt again, from `kv_len` on, in `slot`."""
    device = a_prefilled_device()
    device.rng = random.Random(seed)
    joined = SlotJoin(slot, pages, kv_len, PARAMS, len(PROMPT), PROMPT)
    row = ExtendRow(slot, PROMPT[kv_len:], kv_len, samples=True)
    grant = PageGrant(0, (3,))
    return run(device, ScheduleBatch(2, ForwardMode.MIXED, (joined,), (grant,), (row,), decode_slots=[0]))


def test_in_any_order_a_mixed_step_gives_the_row_that_decodes_first() -> None:
    assert {tuple(run_mixed(seed, (4, 6, 8))) for seed in range(20)} == {(EXPECTED[1], EXPECTED[0])}
    assert {tuple(run_mixed(seed, (5, 2, 8), kv_len=8)) for seed in range(20)} == {(EXPECTED[1], EXPECTED[0])}


def test_a_prompt_that_reads_what_its_step_writes_gets_other_tokens_in_some_order() -> None:
    device_orders = {tuple(run_mixed_twins(seed)) for seed in range(20)}
    assert (EXPECTED[1], EXPECTED[0], EXPECTED[0]) in device_orders
    assert len(device_orders) > 1


def run_mixed_twins(seed: int) -> list[int]:
    """The prompt computed on fresh pages, and in the same step by another one that takes its first page for cached."""
    device = a_prefilled_device()
    device.rng = random.Random(seed)
    joins = (
        SlotJoin(1, (4, 6, 8), 0, PARAMS, len(PROMPT), PROMPT),
        SlotJoin(2, (4, 9, 10), 4, PARAMS, len(PROMPT), PROMPT),
    )
    rows = (ExtendRow(1, PROMPT, 0, True), ExtendRow(2, PROMPT[4:], 4, True))
    return run(device, ScheduleBatch(2, ForwardMode.MIXED, joins, extend=rows, decode_slots=[0]))


def test_two_rows_of_a_slot_are_refused() -> None:
    with pytest.raises(AssertionError, match="two rows of a slot"):
        run_mixed(0, (4, 6, 8), slot=0)


def test_pages_come_back_from_the_host_as_they_went() -> None:
    device = a_prefilled_device()
    device.start_backup(1, [5, 2, 7], [0, 1, 2])
    device.start_restore(2, [0, 1, 2], [10, 11, 12])
    assert device.copies_done() == []
    while device.process.timeline.advance():
        pass
    assert device.copies_done() == [1, 2]
    join(device, [10, 11, 12, 4])
    assert tuple(decode(device, 5)) == EXPECTED[1:]


def test_the_history_before_a_join_matters_to_penalties() -> None:
    device = a_prefilled_device()
    joined = SlotJoin(0, (5, 2, 7, 4), len(PROMPT), PARAMS, len(PROMPT), (), EXPECTED[0])
    run(device, ScheduleBatch(2, ForwardMode.PREBUILT, (joined,)))
    assert tuple(decode(device, 5)) != EXPECTED[1:]


@pytest.mark.parametrize("mistake", ["", "retracted pages are free when rank 0 has copied them"])
def test_a_copy_of_several_ranks_is_done_when_all_slices_are_there(mistake: str) -> None:
    device = a_prefilled_device()
    device.ranks = 4
    with mutated(mistake):
        device.start_backup(1, [5, 2, 7], [0, 1, 2])
        done: list[int] = []
        while not done and device.process.timeline.advance():
            done = device.copies_done()
        copied = [
            device.host_pages.cells[to] == device.pages.cells[of] for to, of in ((0, 5), (1, 2), (2, 7))
        ]
        while device.process.timeline.advance():
            done += device.copies_done()
    assert done == [1], "it is told once"
    assert all(copied) == (not mistake)
