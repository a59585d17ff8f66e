"""Which of many sockets can be read: none is overlooked, also when another call took the news of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import zmq

from shared.links.poller import SocketPoller

Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
PATIENCE_SECONDS = 10.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as near, context.socket(zmq.DEALER) as far:
        near.linger = far.linger = 0
        near.bind("inproc://here")
        far.connect("inproc://here")
        yield near, far


@pytest.fixture
def poller() -> Iterator[SocketPoller]:
    poller = SocketPoller()
    yield poller
    poller.close()


def test_a_message_whose_news_a_send_took_is_found(pair: Pair, poller: SocketPoller) -> None:
    near, far = pair
    poller.register(near)
    assert not poller.poll(0)
    far.send(b"a message")
    near.send(b"takes the news of it")
    poller.used(near)
    assert near in poller.poll(PATIENCE_SECONDS)


def test_a_socket_that_was_not_read_to_its_end_is_ready_again(pair: Pair, poller: SocketPoller) -> None:
    near, far = pair
    poller.register(near)
    for _ in range(3):
        far.send(b"a message")
    for _ in range(3):
        assert near in poller.poll(PATIENCE_SECONDS)
        near.recv()
    assert not poller.poll(0)


def test_a_socket_that_was_emptied_wakes_with_its_next_message(pair: Pair, poller: SocketPoller) -> None:
    near, far = pair
    poller.register(near)
    for number in range(200):
        for _ in range(1 + number % 3):
            far.send(b"a message")
        read = 0
        while read < 1 + number % 3:
            assert near in poller.poll(PATIENCE_SECONDS), number
            read += len(list(poller.read(near)))


def test_a_socket_that_was_read_in_part_is_ready_again(pair: Pair, poller: SocketPoller) -> None:
    near, far = pair
    poller.register(near)
    far.send(b"a message")
    far.send(b"another one")
    assert near in poller.poll(PATIENCE_SECONDS)
    assert next(poller.read(near)) == [b"a message"]
    assert near in poller.poll(0)
    assert list(poller.read(near)) == [[b"another one"]]
    assert not poller.poll(0)


def test_messages_of_any_number_wake_once_they_come(pair: Pair, poller: SocketPoller) -> None:
    near, far = pair
    poller.register(near)
    for number in range(200):
        far.send(b"a message")
        assert near in poller.poll(PATIENCE_SECONDS), number
        assert near.recv() == b"a message"
        if number % 3:
            near.send(b"an answer")
            poller.used(near)
            far.recv()


def test_a_plain_socket_is_ready_when_it_has_bytes_and_a_forgotten_one_never(poller: SocketPoller) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        poller.register(near)
        assert not poller.poll(0)
        far.send(b"x")
        assert near in poller.poll(PATIENCE_SECONDS)
        poller.unregister(near)
        poller.unregister(near)
        assert not poller.poll(0)
