"""Rank 0 and its followers over a ring, each as late as the seed says, without processes.

A follower holds a buffer for some turns before it has read all of it; its stream does what it was given some turns
later. Collectives meet by their order, as on a GPU: the third that a rank enters meets the third of the others.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

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

SLOTS, CAPACITY, BUFFERS, ORDERS = 6, 40, 3, 40


def slots_of(number: int) -> list[int]:
    """Those that sample in a step; they change from step to step."""
    return [slot for slot in range(SLOTS) if (number * 7 + slot * 3) % 5 < 3]


def token_of(number: int, slot: int) -> int:
    """What rank 0 chooses."""
    return number * 100 + slot


@dataclass(slots=True)
class Follower:
    """As `FollowerDevice`: it copies the words of an order, gives it back, and takes tokens behind its layers."""

    reader: OrderReader
    told: deque[int] = field(default_factory=deque)
    stream: deque[tuple[str, Words]] = field(default_factory=deque)
    entered: int = 0  # collectives
    tokens: dict[int, int] = field(default_factory=dict)  # the last one of each slot
    seen: list[int] = field(default_factory=list)
    held: tuple[Order, Words] | None = None

    def begin(self) -> None:
        """Read the first half of an order."""
        order = self.reader.take(self.told.popleft())
        self.held = order, order.words[: len(order.words) // 2].copy()

    def finish(self) -> int:
        """Read the second half, launch it, and give the buffer back."""
        assert self.held is not None
        order, half = self.held
        words = np.concatenate([half, order.words[len(half) :]])
        self.held = None
        self.seen.append(int(words[-1]))
        for kind, numbers in operations_of(order.operations):
            assert kind is Operation.TAKE_TOKENS
            place, count = numbers
            self.launch(words[place : place + count])
        return self.reader.give_back()

    def launch(self, slots: Words) -> None:
        """Layers, then tokens."""
        self.stream += [("layers", slots), ("tokens", slots)]

    def run(self, collectives: list[Words]) -> None:
        """Do the next piece of the stream, if rank 0 has entered its collective."""
        if not self.stream or self.entered >= len(collectives):
            return
        what, slots = self.stream.popleft()
        found = collectives[self.entered]
        self.entered += 1
        if what == "tokens":
            self.tokens.update(zip(slots.tolist(), found.tolist(), strict=False))


class RingWorld:
    """One run of so many orders."""

    writer_class = OrderWriter
    reader_class = OrderReader
    follower_class = Follower

    def __init__(self, seed: int) -> None:
        self.drawn = random.Random(seed)
        memory = np.full(words_for(CAPACITY, BUFFERS), -1, dtype=np.int32)
        self.ring = OrderRing(memory, CAPACITY, BUFFERS)
        count = self.drawn.choice((1, 3))
        self.writer = self.writer_class(self.ring, count)
        self.followers = [self.follower_class(self.reader_class(self.ring)) for _ in range(count)]
        self.collectives: list[Words] = []  # as rank 0 has entered them
        self.tokens: dict[int, int] = {}
        self.number = 0

    def run(self) -> None:
        """Until all has been done; an error of ring or world if any follower has done something else than rank 0."""
        while self.number < ORDERS or any(each.told or each.held or each.stream for each in self.followers):
            self._turn()
        for follower in self.followers:
            assert follower.seen == list(range(1, ORDERS + 1))
            assert follower.tokens == self.tokens
            assert follower.entered == len(self.collectives)

    def _turn(self) -> None:
        if self.number < ORDERS and self.writer.free and self.drawn.random() < 0.7:
            self._step()
        for at, follower in enumerate(self.followers):
            if follower.held and self.drawn.random() < 0.4:
                self.writer.give_back(at, follower.finish())
            elif not follower.held and follower.told and self.drawn.random() < 0.5:
                follower.begin()
            if self.drawn.random() < 0.5:
                follower.run(self.collectives)

    def _step(self) -> None:
        self.number += 1
        slots = slots_of(self.number)
        words = np.array([*range(self.number % 5), *slots, self.number], dtype=np.int32)
        take = operation(Operation.TAKE_TOKENS, self.number % 5, len(slots))
        assert self.writer.write(OrderKind.STEP, take, words) == self.number
        for follower in self.followers:
            follower.told.append(self.number)
        chosen = np.array([token_of(self.number, slot) for slot in slots], dtype=np.int32)
        self.collectives += [np.zeros(len(slots), dtype=np.int32), chosen]
        self.tokens.update(zip(slots, chosen.tolist(), strict=True))
