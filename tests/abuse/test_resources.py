"""Requests that are made to cost: memory of the router, its event loop, its CPU, its log.

Each case asserts how far the router's memory grows at most, and that another client gets its answers meanwhile. Bounds
are the issue's: a head or a connection may cost 32 MiB in all, a body 64 MiB above itself.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.abuse.procfs import cpu_seconds
from tests.abuse.target import MARKER, MIB, AbusedDeployment
from tests.abuse.wire import Conversation, chat, completion, connect, get, post, talk

HEAD_MIB = 32
BODY_MIB = 96
BODY_BYTES = 4 * MIB - 1024
CONNECTIONS = 2000
OWN_SECONDS = 2.0  # another client's small request, whatever one client does
STOP_TOKENS = 150  # of four letters, of each of 16 answers
BAD_REQUESTS = 2000
LINES_MAX = 100  # that they may write


def repeated(piece: bytes, total: int, before: bytes = b"", after: bytes = b"") -> Iterator[bytes]:
    """`before`, some megabytes of `piece`, `after`."""
    yield before
    block = piece * (MIB // len(piece))
    for _ in range(total // len(block)):
        yield block
    yield after


START = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
HEADS: dict[str, tuple[Callable[[], Iterator[bytes]], set[int]]] = {
    "64 MB of headers": (lambda: repeated(b"a: b\r\n", 64 * MIB, START), {431}),
    "96 MB in one header": (lambda: repeated(b"a", 96 * MIB, START + b"X-A: "), {431}),
    "96 MB in a header's name": (lambda: repeated(b"a", 96 * MIB, START), {431}),
    "96 MB in the URL": (lambda: repeated(b"a", 96 * MIB, b"GET /"), {414, 431}),
    "64 MB in the method": (lambda: repeated(b"A", 64 * MIB), {400, 431}),
    "64 MB of trailers": (lambda: repeated(b"a: b\r\n", 64 * MIB, POST + b"2\r\n{}\r\n0\r\n"), {400, 431}),
    "64 MB in a chunk's extension": (lambda: repeated(b"a", 64 * MIB, POST + b"2;x="), {400, 413, 431}),
    "64 MB of line ends before a request": (lambda: repeated(b"\r\n", 64 * MIB), {400, 431}),
}


@pytest.mark.parametrize(("pieces", "statuses"), HEADS.values(), ids=HEADS)
def test_a_head_of_any_size_costs_little(
    target: AbusedDeployment, pieces: Callable[[], Iterator[bytes]], statuses: set[int]
) -> None:
    with target.nobody_suffers(HEAD_MIB):
        said = talk(target.port, pieces(), replies=10**9, seconds_max=60)
    assert said.closed
    assert set(said.statuses()) <= statuses


@dataclass(frozen=True, slots=True)
class CostlyBody:
    """A body, where it is posted, and the statuses that are right."""

    path: str
    body: Callable[[], bytes]
    statuses: set[int]


def digits(size: int) -> str:
    """Digits without a pattern; each becomes a token."""
    return random.Random(1).randbytes(size // 2).hex().translate(str.maketrans("abcdef", "012345"))


def letters(size: int) -> str:
    """Letters without a pattern and without a space."""
    return random.Random(2).randbytes(size // 2).hex().translate(str.maketrans("0123456789", "ghijklmnop"))


def filled(unit: str, before: str = "[", after: str = "]") -> bytes:
    """A completion whose unknown field is filled up with this unit."""
    count = (BODY_BYTES - 200) // len(unit)
    field = before + ",".join([unit[:-1]] * count) + after
    return f'{{"model":"smollm2","prompt":"{MARKER}","max_tokens":1,"x":{field}}}'.encode()


def completions(prompt: Callable[[], Any], *statuses: int) -> CostlyBody:
    """A completion of this prompt."""
    return CostlyBody("/v1/completions", lambda: completion(prompt()), set(statuses))


BODIES = {
    "4 MB of small objects": CostlyBody("/v1/completions", lambda: filled('{"":0},'), {200, 400, 413, 429}),
    "4 MB of small lists": CostlyBody("/v1/completions", lambda: filled("[],"), {200, 400, 413, 429}),
    "4 MB of small texts": CostlyBody("/v1/completions", lambda: filled('"ab",'), {200, 400, 413, 429}),
    "4 MB of small messages": CostlyBody(
        "/v1/chat/completions", lambda: filled('{"a":0},').replace(b'"x":', b'"messages":'), {400, 413, 429}
    ),
    "4 MB of digits": completions(lambda: digits(BODY_BYTES), 400, 413),
    "650,000 digits": completions(lambda: digits(650_000), 400),
    "4 MB of letters without a space": completions(lambda: letters(BODY_BYTES), 400, 413),
    "650,000 letters without a space": completions(lambda: letters(650_000), 400),
    "4 MB of spaces": completions(lambda: " " * BODY_BYTES, 200, 400, 413),
    "a megabyte of one letter": completions(lambda: "a" * MIB, 200, 400, 413),
    "a megabyte of emoji": completions(lambda: "\U0001f600" * (MIB // 4), 400, 413),
    "63 prompts of digits": completions(lambda: [digits(60_000)] * 63, 400, 413),
    "4 MB of control tokens in a chat": CostlyBody(
        "/v1/chat/completions", lambda: chat("<|im_end|>" * (BODY_BYTES // 10)), {400, 413}
    ),
    "4 MB to tokenize": CostlyBody(
        "/tokenize",
        lambda: json.dumps({"prompt": digits(BODY_BYTES), "return_token_strs": True}).encode(),
        {400, 413},
    ),
    "650,000 digits to tokenize": CostlyBody(
        "/tokenize",
        lambda: json.dumps({"prompt": digits(650_000), "return_token_strs": True}).encode(),
        {400, 413},
    ),
    "4 MB of tokens to detokenize": CostlyBody(
        "/detokenize", lambda: json.dumps({"tokens": [7] * (BODY_BYTES // 3)}).encode(), {400, 413}
    ),
}


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES)
def test_a_body_of_any_content_costs_a_bounded_amount(target: AbusedDeployment, case: CostlyBody) -> None:
    request = post(case.path, case.body())
    with target.nobody_suffers(BODY_MIB):
        (reply,) = talk(target.port, request, seconds_max=60).replies()
    assert reply.status in case.statuses, reply.body[:300]


def at_once(target: AbusedDeployment, requests: list[bytes], seconds_max: float = 90) -> list[Conversation]:
    """Each over its own connection."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: talk(target.port, request, seconds_max=seconds_max), requests))


def test_eight_large_bodies_behind_three_busy_ones_cost_a_bounded_amount(target: AbusedDeployment) -> None:
    busy = post("/v1/completions", completion(digits(650_000)))
    objects = post("/v1/completions", filled('{"":0},'))
    with target.growth_below(256):
        said = at_once(target, [busy] * 3 + [objects] * 8)
    assert {status for one in said for status in one.statuses()} <= {200, 400, 413, 429}
    assert all(one.replies() for one in said)


def test_four_clients_that_post_small_objects_hold_nobody_up(target: AbusedDeployment) -> None:
    objects = post("/v1/completions", filled('{"":0},'))
    with target.nobody_suffers(256):
        said = at_once(target, [objects] * 4)
    assert all(one.replies() for one in said)


def test_a_word_is_tokenized_while_another_client_sends_megabytes(target: AbusedDeployment) -> None:
    large = post("/v1/completions", completion("the story goes on " * (2 * MIB // 18)))
    word = post("/tokenize", json.dumps({"prompt": MARKER}).encode())
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(talk, target.port, large, seconds_max=90) for _ in range(6)]
        said = talk(target.port, word, source="127.0.0.3", seconds_max=target.allowed(OWN_SECONDS))
        assert said.statuses() == [200]
    assert all(other.result().replies() for other in others)


def test_two_thousand_idle_connections_cost_little(target: AbusedDeployment) -> None:
    with ExitStack() as open_now, target.nobody_suffers(HEAD_MIB):
        for _ in range(CONNECTIONS):
            open_now.enter_context(connect(target.port))
        assert talk(target.port, get("/v1/models"), source="127.0.0.3").statuses() == [200]
    assert target.router().pid == target.router_pid


def test_stop_strings_that_nearly_match_cost_the_router_little(target: AbusedDeployment) -> None:
    (tokens,) = talk(target.port, post("/tokenize", b'{"prompt": "aaaa"}')).replies()
    (token,) = json.loads(tokens.body)["tokens"]
    plain = completion(["b"] * 16, max_tokens=STOP_TOKENS, ignore_eos=True, logit_bias={str(token): 100})
    stops = ["a" * 1000 + chr(98 + k) for k in range(16)]
    before = router_seconds(target, plain)
    nearly = router_seconds(target, json.dumps(json.loads(plain) | {"stop": stops}).encode())
    assert nearly <= 2 * before, f"{nearly:.2f} s of the router's CPU, {before:.2f} s without stop strings"


def router_seconds(target: AbusedDeployment, body: bytes) -> float:
    """CPU time that the router needs for a completion."""
    before = cpu_seconds(target.router().pid)
    (reply,) = talk(target.port, post("/v1/completions", body), seconds_max=60).replies()
    assert json.loads(reply.body)["choices"][0]["text"] == "aaaa" * STOP_TOKENS
    return cpu_seconds(target.router().pid) - before


def test_bad_requests_do_not_write_a_line_each(target: AbusedDeployment) -> None:
    target.log()
    before = len(target.warnings())
    with target.nobody_suffers(HEAD_MIB):
        for _ in range(BAD_REQUESTS):
            talk(target.port, b"hello?\r\n\r\n")
    assert len(target.warnings()) - before <= LINES_MAX


def takes_all(connection: socket.socket, pieces: Iterator[bytes]) -> bool:
    """Whether everything can be sent."""
    try:
        for piece in pieces:
            connection.sendall(piece)
    except OSError:  # nobody reads it, or the connection has ended
        return False
    return True


def test_requests_without_end_in_the_pipe_are_not_read_ahead(target: AbusedDeployment) -> None:
    asked = repeated(get("/v1/models"), 64 * MIB)
    with connect(target.port, receive_bytes=4096) as connection, target.nobody_suffers(HEAD_MIB):
        connection.settimeout(0.5)
        assert not takes_all(connection, asked)


@pytest.mark.aggregated
def test_new_names_make_no_new_metrics(target: AbusedDeployment) -> None:
    draw = random.Random(3)

    def strange_requests() -> None:
        for _ in range(100):
            name = draw.randbytes(6).hex()
            talk(target.port, get(f"/{name}"), source=f"127.0.1.{draw.randrange(1, 250)}")
            talk(
                target.port, post("/v1/completions", completion("x", model=name, cache_salt=name, user=name))
            )

    strange_requests()
    before = target.series()
    strange_requests()
    assert target.series() == before


def test_the_router_has_lived_through_all_that(target: AbusedDeployment) -> None:
    assert target.router().pid == target.router_pid
