"""Claims about the rows of prompts: the device learns each token and each page once, and nothing is changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.batch.req import Req
from shared.primitives.errors import InvariantError
from shared.scheduling.prefill_adder import Extend
from shared.scheduling.prompt_rows import prompt_rows, scored_messages
from shared.scheduling.slots import Slots
from shared.wire.messages import SCORES_MAX
from shared.wire.sampled import TokenLogprobs
from tests.unit.kv.lettered_pages import PAGE, new_memory, request


def _in_slot(tokens: int, slots: Slots) -> Req:
    req = request(list(range(tokens)), 1)
    slots.take(req)
    return req


@given(tokens=st.integers(1, 12 * PAGE), pages_a_chunk=st.integers(1, 5))
def test_the_device_learns_each_token_and_each_page_once(tokens: int, pages_a_chunk: int) -> None:
    memory, req = new_memory(), _in_slot(tokens, Slots(2))
    learnt_tokens, learnt_pages, start = list[int](), list[int](), 0
    while start < tokens:
        end = min(tokens, start + pages_a_chunk * PAGE)
        assert memory.allocate(req, memory.pages_missing(req, end)) is not None
        joins, grants, (row,) = prompt_rows([Extend(req, start, end, end == tokens)], memory)
        assert (len(joins), len(grants)) == ((1, 0) if start == 0 else (0, 1))
        assert (row.slot, row.start, row.samples) == (req.slot, start, end == tokens)
        learnt_tokens += row.token_ids
        learnt_pages += [page for each in (joins or grants) for page in each.pages]
        start = end
    assert (learnt_tokens, learnt_pages) == (req.token_ids, req.pages)
    assert (req.launched_len, req.kv_len) == (0, 0)


@given(count=st.integers(0, 3 * SCORES_MAX))
def test_scores_come_in_order_and_in_small_messages(count: int) -> None:
    scores = [TokenLogprobs(-float(at)) for at in range(count)]
    messages = list(scored_messages(request([1, 2], 1), 1, scores))
    assert [each for message in messages for each in message.logprobs] == scores
    index = 1
    for message in messages:
        assert message.index == index
        assert 0 < len(message.logprobs) <= SCORES_MAX
        index += len(message.logprobs)


def test_the_slot_that_was_given_back_first_is_taken_first() -> None:
    slots = Slots(3)
    first, second = _in_slot(1, slots), _in_slot(1, slots)
    assert (first.slot, second.slot, slots.used, slots.free) == (0, 1, 2, 1)
    for req in (second, first, first):
        slots.give_back(req)
    assert (slots.used, first.slot) == (0, None)
    assert [_in_slot(1, slots).slot for _ in range(3)] == [2, 1, 0]


def test_a_slot_is_taken_once() -> None:
    slots = Slots(1)
    req = _in_slot(1, slots)
    for other in (req, request([1], 2)):
        with pytest.raises(InvariantError):
            slots.take(other)
