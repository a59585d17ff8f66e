"""The ring of orders: nothing is lost, overwritten or taken twice, however late a follower is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.parallel.orders import (
    Operation,
    Order,
    OrderKind,
    OrderReader,
    OrderRing,
    OrderWriter,
    Words,
    operation,
    operations_of,
    words_for,
)
from shared.primitives.errors import InvariantError
from tests.unit.ranks.ring_world import Follower, RingWorld

SEEDS = 200
words = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


def array(numbers: list[int]) -> Words:
    return np.array(numbers, dtype=np.int32)


@given(
    st.lists(st.tuples(st.sampled_from(OrderKind), words, words, st.integers(0, 2**60)), max_size=12),
    st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_orders_come_as_they_were_written(
    orders: list[tuple[OrderKind, list[int], list[int], int]], buffers: int
) -> None:
    ring = OrderRing(np.full(words_for(40, buffers), -1, dtype=np.int32), 40, buffers)
    writer, reader = OrderWriter(ring, 1), OrderReader(ring)
    for kind, operations, content, name in orders:
        order = reader.take(writer.write(kind, array(operations), array(content), name))
        assert (order.kind, order.name) == (kind, name)
        assert (order.operations.tolist(), order.words.tolist()) == (operations, content)
        writer.give_back(0, reader.give_back())


@given(st.lists(st.tuples(st.sampled_from(Operation), words), max_size=6))
@settings(max_examples=100, deadline=None)
def test_operations_are_read_as_they_were_made(made: list[tuple[Operation, list[int]]]) -> None:
    every = [operation(kind, *numbers[:1], array(numbers[1:])) for kind, numbers in made]
    found = operations_of(np.concatenate(every)) if every else iter(())
    assert [(kind, numbers.tolist()) for kind, numbers in found] == made


def test_what_does_not_fit_or_is_cut_is_refused() -> None:
    ring = OrderRing(np.zeros(words_for(4), dtype=np.int32), 4)
    with pytest.raises(InvariantError, match="an order has 5 words, a buffer holds 4"):
        OrderWriter(ring, 1).write(OrderKind.STEP, array([1, 0]), array([1, 2, 3]))
    with pytest.raises(InvariantError, match="WRITE has 3 numbers, 1 words are left"):
        list(operations_of(array([Operation.WRITE, 3, 5])))


@pytest.mark.parametrize("sizes", [(2, 5), (-1, 3), (3, -1), (2**40, 0)])
def test_sizes_that_no_buffer_has_are_refused(sizes: tuple[int, int]) -> None:
    memory = np.zeros(words_for(6, 2), dtype=np.int32)
    ring = OrderRing(memory, 6, 2)
    ring.put(Order(1, OrderKind.STEP, 0, array([1, 0]), array([1, 2, 3])))
    memory.view(np.int64)[8:][3:5] = sizes  # no test writes them: a fault did
    with pytest.raises(
        InvariantError, match=rf"order 1 has {sizes[0]} and {sizes[1]} words, a buffer holds 6"
    ):
        ring.get(1)


def test_a_buffer_is_not_written_before_all_have_given_it_back() -> None:
    ring = OrderRing(np.zeros(words_for(4, 2), dtype=np.int32), 4, 2)
    writer, readers = OrderWriter(ring, 2), [OrderReader(ring), OrderReader(ring)]
    for number in (1, 2):
        assert writer.write(OrderKind.STEP, array([]), array([number])) == number
    readers[0].take(1)
    writer.give_back(0, readers[0].give_back())
    with pytest.raises(InvariantError, match="order 3 would overwrite one that a follower still reads"):
        writer.write(OrderKind.STEP, array([]), array([3]))
    with pytest.raises(InvariantError, match="follower 1 gives back order 2, expected 1 of 2"):
        writer.give_back(1, 2)
    with pytest.raises(InvariantError, match="order 2 is told after 0"):
        readers[1].take(2)


# ---- late followers, and mistakes that must be seen ------------------------------------------------------------------


def test_followers_do_what_rank_0_does_however_late_they_are() -> None:
    for seed in range(SEEDS):
        RingWorld(seed).run()


class ReusesBeforeTheSlowest(OrderWriter):
    @property
    def free(self) -> int:
        return self._ring.buffers - (self._written - max(self._given_back))


class SkipsAfterWrapAround(OrderReader):
    """Takes what lies in the buffer of the number that is told."""

    def take(self, number: int) -> Order:
        if number % 7 == 0:  # as a flag that has the same value again after a turn of the ring
            number -= 1
        self._taken, self._held = number, True
        return self._ring.get(number)


class TakesTokensOfTheStepBefore(Follower):
    """Launches the choice in front of the layers, so that it meets another collective."""

    def launch(self, slots: Words) -> None:
        self.stream += [("tokens", slots), ("layers", slots)]


class TakesTokensLate(Follower):
    """The slots of the step that is staged by then get them."""

    last: Words | None = None

    def launch(self, slots: Words) -> None:
        if len(self.stream) and self.stream[-1][0] == "tokens":
            self.stream[-1] = "tokens", slots
        Follower.launch(self, slots)


@pytest.mark.parametrize(
    "mistake",
    [
        {"writer_class": ReusesBeforeTheSlowest},
        {"reader_class": SkipsAfterWrapAround},
        {"follower_class": TakesTokensOfTheStepBefore},
        {"follower_class": TakesTokensLate},
    ],
    ids=lambda mistake: next(iter(mistake.values())).__name__,
)
def test_a_mistake_is_seen(mistake: dict[str, type]) -> None:
    mistaken = type("Mistaken", (RingWorld,), mistake)
    seen = 0
    for seed in range(SEEDS):
        try:
            mistaken(seed).run()
        except (AssertionError, InvariantError, ValueError):
            seen += 1
    assert seen > SEEDS // 10
