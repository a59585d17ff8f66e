"""The ends of a ring, over real memory and sockets."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shared.engine.parallel.orders import (
    BUFFERS,
    COMMAND_BYTES_MAX,
    Operation,
    OrderKind,
    Words,
    command_of,
    operation,
    operations_of,
)
from shared.primitives.errors import InvariantError, RankError
from shared.worker.rank_channel import FollowerEnd, LeaderEnd, ReportKind

CAPACITY = 64
NONE = np.empty(0, dtype=np.int32)


class Ends:
    """Rank 0 and two followers in one process; each maps the memory for itself."""

    def __init__(self) -> None:
        self.memory = os.memfd_create("a test")
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        self.leader = LeaderEnd([own for own, _ in pairs], self.memory)
        self.theirs = [theirs for _, theirs in pairs]
        self.followers = [FollowerEnd(theirs, self.memory) for theirs in self.theirs]
        self.leader.open(CAPACITY)
        for each in self.followers:
            each.open(CAPACITY)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for each in (*ends.leader.sockets, *ends.theirs):
        each.close()
    os.close(ends.memory)


def words(number: int) -> Words:
    return np.full(number % 20, number, dtype=np.int32)


def test_every_follower_gets_every_order_over_many_turns_of_the_ring(ends: Ends) -> None:
    found: list[list[tuple[list[int], list[int]]]] = [[], []]

    def follow(at: int) -> None:
        while (order := ends.followers[at].take()) is not None and order.kind is not OrderKind.END:
            ((kind, numbers),) = operations_of(order.operations)
            assert kind is Operation.WRITE
            found[at].append((numbers.tolist(), order.words.tolist()))
            ends.followers[at].give_back()

    threads = [threading.Thread(target=follow, args=(at,)) for at in range(2)]
    for each in threads:
        each.start()
    count = 20 * BUFFERS
    for number in range(count):
        ends.leader.step(operation(Operation.WRITE, number, 7), words(number))
    ends.leader.end()
    for each in threads:
        each.join(30)
    assert found[0] == found[1] == [([number, 7], words(number).tolist()) for number in range(count)]


def test_a_copy_is_done_when_all_followers_say_so(ends: Ends) -> None:
    ends.leader.copy(2**40, [3, 4], [0, 1], backup=True)
    for follower in ends.followers:
        assert not ends.leader.copied(2**40)
        order = follower.take()
        assert order is not None
        assert (order.kind, order.name, order.words.tolist()) == (OrderKind.BACKUP, 2**40, [3, 4, 0, 1])
        follower.give_back()
        follower.copied(order.name)
    assert ends.leader.copied(2**40)


def test_rank_0_waits_for_a_follower_that_is_a_ring_behind(ends: Ends) -> None:
    told: list[int] = []

    def lead() -> None:
        for number in range(BUFFERS + 1):
            ends.leader.step(NONE, words(number))
            told.append(number)

    thread = threading.Thread(target=lead)
    thread.start()
    first, second = ends.followers
    for _ in range(BUFFERS):
        first.take()
        first.give_back()
    thread.join(0.2)
    assert told == list(range(BUFFERS)), "the second has taken nothing"
    second.take()
    second.give_back()
    thread.join(30)
    assert told == list(range(BUFFERS + 1))


def test_the_end_of_a_process_is_the_end_of_its_socket(ends: Ends) -> None:
    ends.followers[1].say(ReportKind.FAILED, "no more memory")
    ends.theirs[1].close()
    assert ends.leader.read(0)
    assert not ends.leader.read(1)
    assert ends.leader.sentences == {1: (ReportKind.FAILED, "no more memory")}
    with pytest.raises(RankError, match="rank 2 has ended"):
        ends.leader.step(NONE, words(1))
    for each in ends.leader.sockets:
        each.close()
    order = ends.followers[0].take()
    assert order is not None, "what was told before is still there"
    assert order.words.tolist() == words(1).tolist()
    assert ends.followers[0].take() is None


def test_the_end_is_told_without_waiting_for_a_follower_that_is_a_ring_behind(ends: Ends) -> None:
    """It may be frozen; it finds the end of its socket behind what it was told."""
    for number in range(BUFFERS):
        ends.leader.step(NONE, words(number))
    first, second = ends.followers
    for _ in range(BUFFERS):
        first.take()
        first.give_back()
    ended = threading.Thread(target=ends.leader.end, daemon=True)
    ended.start()
    ended.join(30)
    assert not ended.is_alive()
    for _ in range(BUFFERS):
        assert second.take() is not None
        second.give_back()
    assert first.take() is second.take() is None


def test_rank_0_that_has_ended_without_reading_reports_has_ended(ends: Ends) -> None:
    ends.followers[0].copied(1)
    ends.leader.sockets[0].close()
    assert ends.followers[0].take() is None


def test_commands_and_reports_of_kv_pass_between_steps(ends: Ends) -> None:
    """Of any length, byte by byte; all followers see whom a command is for."""
    commands = [bytes(range(size)) for size in (1, 2, 3, 4, 5, 255)] + [b"x" * COMMAND_BYTES_MAX]
    for number, command in enumerate(commands):
        ends.leader.step(NONE, words(number))
        ends.leader.tell(2, command)
        for follower in ends.followers:
            step = follower.take()
            assert step is not None
            assert step.words.tolist() == words(number).tolist()
            follower.give_back()
            order = follower.take()
            assert order is not None
            assert (order.kind, order.name, command_of(order)) == (OrderKind.KV, 2, command)
            follower.give_back()
    ends.followers[1].tell_kv(b"first")
    ends.followers[1].tell_kv(b"second" * 1000)
    ends.leader.wait(2, 10)
    assert ends.leader.reports(2) == [b"first", b"second" * 1000]
    assert ends.leader.reports(2) == ends.leader.reports(1) == []
    with pytest.raises(InvariantError, match="a buffer holds"):
        ends.leader.tell(1, b"x" * (COMMAND_BYTES_MAX + 8))


def test_reports_that_nobody_reads_keep_no_follower_from_its_steps(ends: Ends) -> None:
    """Rank 0 waits for a step, and hundreds of reads and copies end meanwhile."""
    follower, count = ends.followers[0], 1000

    def report_reads() -> None:
        for number in range(count):
            follower.tell_kv(b"%d" % number)

    def report_copies() -> None:
        for _ in range(count):
            follower.copied(1)

    def work() -> None:
        for _ in range(BUFFERS):
            assert follower.take() is not None
            follower.give_back()

    ends.leader.copy(1, [], [], backup=True)
    for number in range(BUFFERS - 1):
        ends.leader.step(NONE, words(number))
    reporting = [threading.Thread(target=each, daemon=True) for each in (report_reads, report_copies)]
    for each in reporting:
        each.start()
        each.join(0.2)
        assert each.is_alive(), "they do not fit the socket"
    working = threading.Thread(target=work, daemon=True)
    working.start()
    working.join(10)
    assert not working.is_alive()
    found: list[bytes] = []
    while any(each.is_alive() for each in reporting) or len(found) < count:
        ends.leader.wait(1, 0.1)
        found += ends.leader.reports(1)
    assert found == [b"%d" % number for number in range(count)]


def test_a_report_that_another_thread_has_read_is_not_waited_for(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of KV is made on a thread of its own, which reads whatever lies in the sockets."""
    for number in range(BUFFERS):
        ends.leader.step(NONE, words(number))

    def read_first(*asked: Any) -> Any:
        """What the other thread does between rank 0's look and its wait."""
        monkeypatch.undo()
        for at, follower in enumerate(ends.followers):
            for _ in range(BUFFERS):
                follower.take()
                follower.give_back()
            assert ends.leader.read(at)
        return select.select(*asked)

    monkeypatch.setattr(select, "select", read_first)
    telling = threading.Thread(target=ends.leader.step, args=(NONE, words(0)), daemon=True)
    telling.start()
    telling.join(10)
    assert not telling.is_alive()


def test_memory_behind_the_ring_is_that_of_all_ranks(ends: Ends) -> None:
    offset, memory = ends.leader.share_memory(10_000)
    memory[9_999] = 7
    for follower in ends.followers:
        shared = follower.map_shared(offset, 10_000)
        assert (shared[0], shared[9_999]) == (0, 7)
    ends.leader.step(NONE, words(3))
    order = ends.followers[0].take()
    assert order is not None
    assert order.words.tolist() == words(3).tolist()
    assert memory[9_999] == 7
    ends.theirs[0].close()
    with pytest.raises(RankError, match="rank 1 has ended"):
        ends.leader.reports(1)
