"""Which connection goes when there are too many: never one with a request, and never a key's for a stranger's."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from router.listener.connections import KEYED_SHARE, Places
from shared.process.api_keys import key_line
from tests.unit.router.raw_http import GET, Answer, answered, answers, connect, post, received
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.waiting import comes_true, soon

KEY = "sk-segue-shop-0000000000"
COMPLETION = json.dumps({"model": MODEL, "prompt": "fox", "max_tokens": 100}).encode()
LAST_GET = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(key_line("shop", KEY) + "\n", encoding="utf-8")
    return str(path)


def with_key(path: str = "/v1/models", *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {KEY}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def one_answer(connection: socket.socket) -> Answer:
    """The next answer, of a connection that stays open."""
    data = b""
    while b"\r\n\r\n" not in data or not data.endswith(b"}"):
        part = connection.recv(1 << 16)
        assert part, "the router has closed the connection"
        data += part
    (answer,) = answers(data)
    return answer


def served(connection: socket.socket) -> socket.socket:
    """It was answered, and is kept open."""
    connection.sendall(GET)
    assert one_answer(connection).status == 200
    return connection


def is_open(connection: socket.socket) -> bool:
    """Whether the router has not closed it, and serves it."""
    try:
        served(connection)
    except (AssertionError, OSError):
        return False
    return True


def test_silent_sockets_keep_nobody_out(model_folder: Path, keys_file: str) -> None:
    """Ten addresses open 20 times as many as there are places; a client with a key is served all the while."""
    with (
        RunningRouter(model_folder, connections_max=40, api_keys_file=keys_file) as router,
        ExitStack() as stack,
    ):
        for number in range(800):
            stack.enter_context(connect(router, source=f"127.0.1.{number % 10}"))
            if number % 50 == 0:
                began_at = time.monotonic()
                (answer,) = answered(router, with_key("/v1/models", "connection: close"))
                assert answer.status == 200
                assert time.monotonic() - began_at < soon(1)
        assert len(router.clients) <= 40
        assert router.clients.counters.ended["connections"] >= 700


def test_what_a_client_with_a_key_keeps_open_stays(model_folder: Path, keys_file: str) -> None:
    with (
        RunningRouter(model_folder, connections_max=16, api_keys_file=keys_file) as router,
        ExitStack() as stack,
        connect(router, source="127.0.0.9") as kept,
    ):
        kept.sendall(with_key())
        assert one_answer(kept).status == 200
        for number in range(200):
            stack.enter_context(connect(router, source=f"127.0.1.{number % 3}")).sendall(GET)
        assert comes_true(lambda: router.clients.counters.ended["connections"] >= 180)
        kept.sendall(with_key("/v1/models", "connection: close"))
        assert answers(received(kept))[0].status == 200


def test_a_wrong_key_has_no_place_of_its_own(model_folder: Path, keys_file: str) -> None:
    with (
        RunningRouter(model_folder, connections_max=2, api_keys_file=keys_file) as router,
        connect(router, source="127.0.0.9") as stranger,
    ):
        stranger.sendall(with_key().replace(KEY.encode(), b"sk-segue-none-0000000000"))
        assert one_answer(stranger).status == 401
        with connect(router), connect(router):
            assert comes_true(lambda: router.clients.counters.ended["connections"] == 1)
            assert not is_open(stranger)


def test_a_request_under_way_is_never_displaced(model_folder: Path) -> None:
    with RunningRouter(model_folder, connections_max=4) as router, ExitStack() as stack:
        router.workers.script = Script(stalled=True)
        running = stack.enter_context(connect(router))
        running.sendall(post("/v1/completions", COMPLETION, "connection: close"))
        assert comes_true(lambda: len(router.workers.prefills) == 1)
        for _ in range(50):
            stack.enter_context(connect(router))
        assert comes_true(lambda: router.clients.counters.ended["connections"] >= 46)
        router.call(router.workers.go_on)
        assert answers(received(running))[0].status == 200


def test_the_address_with_most_gives_up_its_oldest(model_folder: Path) -> None:
    with RunningRouter(model_folder, connections_max=4) as router, ExitStack() as stack:
        modest = served(stack.enter_context(connect(router, source="127.0.0.2")))
        greedy = [served(stack.enter_context(connect(router, source="127.0.0.3"))) for _ in range(3)]
        (answer,) = answered(router, LAST_GET)
        assert answer.status == 200
        assert [is_open(connection) for connection in (modest, *greedy)] == [True, False, True, True]


def test_one_address_displaces_its_own_beyond_its_bound(model_folder: Path) -> None:
    with RunningRouter(model_folder, connections_per_address_max=1) as router, connect(router) as first:
        assert comes_true(lambda: len(router.clients) == 1)
        with connect(router, source="127.0.0.2") as other:
            assert answered(router, LAST_GET)[0].status == 200
            assert router.clients.counters.ended["address"] == 1
            assert not is_open(first)
            other.sendall(LAST_GET)
            assert answers(received(other))[0].status == 200


@pytest.mark.parametrize("bound", ["connections", "address"])
def test_where_every_connection_has_a_request_one_more_gets_503(model_folder: Path, bound: str) -> None:
    router = (
        RunningRouter(model_folder, connections_max=2)
        if bound == "connections"
        else RunningRouter(model_folder, connections_per_address_max=2)
    )
    with router:
        router.workers.script = Script(silent=True)
        with connect(router) as first, connect(router) as second:
            for connection in (first, second):
                connection.sendall(post("/v1/completions", COMPLETION))
            assert comes_true(lambda: len(router.workers.prefills) == 2)
            (answer,) = answered(router, LAST_GET)
            assert answer.status == 503
            assert answer.error["type"] == "service_unavailable_error"
            assert router.clients.counters.ended[bound] == 1
        assert comes_true(lambda: len(router.clients) == 0)
        assert answered(router, LAST_GET)[0].status == 200


def test_an_answer_that_is_on_its_way_is_sent_before_its_connection_goes(model_folder: Path) -> None:
    with (
        RunningRouter(model_folder, connections_max=1, send_bytes=4096) as router,
        connect(router, receive_bytes=2048) as slow,
    ):
        slow.sendall(GET * 200)
        assert comes_true(lambda: router._server.server_state.total_requests == 200)
        assert answered(router, LAST_GET)[0].status == 200
        assert len(answers(received(slow))) == 200


def test_when_crowded_silent_connections_go_sooner(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.listener.connections.SILENT_SECONDS_MAX", 0.1)
    with RunningRouter(model_folder, connections_max=4) as router, ExitStack() as stack:
        spoken = served(stack.enter_context(connect(router)))
        silent = [stack.enter_context(connect(router)) for _ in range(3)]
        assert all(received(connection) == b"" for connection in silent)
        assert router.clients.counters.ended["silent"] == 3
        assert is_open(spoken)


def test_strangers_that_ask_without_end_keep_no_place_from_a_key(model_folder: Path, keys_file: str) -> None:
    with (
        RunningRouter(model_folder, connections_max=8, send_bytes=4096, api_keys_file=keys_file) as router,
        ExitStack() as stack,
    ):
        for number in range(8):  # each has an answer under way that nobody reads, and many requests behind it
            stranger = stack.enter_context(
                connect(router, source=f"127.0.1.{number + 1}", receive_bytes=2048)
            )
            stranger.sendall(GET.replace(b"/health", b"/") * 300)
        assert comes_true(lambda: len(router.clients) == 8)
        keyed = stack.enter_context(connect(router, source="127.0.2.1"))
        keyed.sendall(with_key())
        assert one_answer(keyed).status == 200


@pytest.mark.parametrize("first", ["key", "request"])
def test_where_keys_are_asked_for_only_those_with_one_keep_their_place(first: str) -> None:
    places: Places[str] = Places(4, 4, keys_asked=True)
    for connection in ("stranger", "friend"):
        places.take(connection, connection)
    places.request_under_way("stranger")
    if first == "key":
        places.show_key("friend", "shop")
    places.request_under_way("friend")
    if first == "request":
        places.show_key("friend", "shop")
    assert places.to_displace() == "stranger"
    places.give_back("stranger")
    assert places.to_displace() is None
    places.request_ended("friend")
    assert places.to_displace() == "friend"


class CountedPlaces:
    """`Places` beside plain lists that are counted anew each time; every operation compares the two."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.places_max, self.holder_max = rng.randrange(1, 30), rng.randrange(1, 30)
        self.places: Places[int] = Places(self.places_max, self.holder_max)
        self.holders: dict[int, str] = {}  # what each counts for: "a…" an address, "k…" a key
        self.waiting: list[int] = []  # in the order in which they began

    def may_go(self, kind: str) -> set[int | None]:
        """The oldest of each holder of this kind with the most that wait."""
        counts = Counter(self.holders[each] for each in self.waiting if self.holders[each].startswith(kind))
        most = max(counts.values(), default=0)
        tops = [name for name, count in counts.items() if count == most]
        return {next(each for each in self.waiting if self.holders[each] == name) for name in tops}

    def arrive(self, connection: int) -> None:
        address = f"a{self.rng.randrange(4)}"
        own = sum(name == address for name in self.holders.values())
        bound = self.places.bound_met(address)
        if own >= self.holder_max:
            assert bound == "address"
            expected = self.may_go(address)
        elif len(self.holders) >= self.places_max:
            assert bound == "connections"
            expected = self.may_go("a") or self.may_go("k")
        else:
            assert bound is None
        if bound is not None:
            displaced = self.places.to_displace(address if bound == "address" else None)
            assert displaced in (expected or {None})
            if displaced is None:
                return
            self.end(displaced)
        self.places.take(connection, address)
        self.holders[connection] = address
        self.waiting.append(connection)

    def request(self, connection: int) -> None:
        self.places.request_under_way(connection)
        self.waiting = [each for each in self.waiting if each != connection]

    def answered(self, connection: int) -> None:
        self.places.request_ended(connection)
        if connection not in self.waiting:
            self.waiting.append(connection)

    def show_key(self, connection: int) -> None:
        key, before = f"k{self.rng.randrange(3)}", self.holders[connection]
        full = sum(name == key for name in self.holders.values()) >= self.holder_max
        crowded = sum(name[0] == "k" for name in self.holders.values()) >= int(self.places_max * KEYED_SHARE)
        expected = (
            self.may_go(key)
            if full
            else self.may_go("k")
            if crowded and before[0] == "a"
            else set[int | None]()
        )
        displaced = self.places.show_key(connection, key)
        if before == key:
            assert displaced is None
            return
        assert displaced in (expected or {None})
        if displaced is not None:
            self.end(displaced)
        elif full or (crowded and before[0] == "a"):
            return
        self.holders[connection] = key
        if connection in self.waiting:  # it begins anew among those of its key
            self.waiting.remove(connection)
            self.waiting.append(connection)

    def end(self, connection: int) -> None:
        assert self.places.give_back(connection)
        del self.holders[connection]
        self.waiting = [each for each in self.waiting if each != connection]

    def check_bounds(self) -> None:
        keyed = Counter(name for name in self.holders.values() if name[0] == "k")
        assert keyed.total() <= int(self.places_max * KEYED_SHARE)
        assert max(keyed.values(), default=0) <= self.holder_max
        assert len(self.places) == len(self.holders) <= self.places_max
        assert set(self.places) == set(self.holders)


@pytest.mark.parametrize("seed", range(20))
def test_places_agree_with_a_count_of_everything(seed: int) -> None:
    rng = random.Random(seed)
    counted = CountedPlaces(rng)
    for connection in range(1000):
        counted.arrive(connection)
        for _ in range(3):
            if counted.holders:
                act = rng.choices(
                    [counted.request, counted.answered, counted.show_key, counted.end], [4, 4, 4, 1]
                )
                act[0](rng.choice(list(counted.holders)))
        counted.check_bounds()
    for connection in list(counted.holders):
        counted.end(connection)
    assert counted.places.to_displace() is None
    assert not counted.places._addresses.open_of
    assert not counted.places._keys.open_of
