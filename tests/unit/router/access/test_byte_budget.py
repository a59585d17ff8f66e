"""The budget of bodies counts what is held, refuses above it, and is empty after any end of any request."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.access.byte_budget import ByteBudget
from router.config import RouterConfig
from router.openai.fields.request_body import BodyReader
from router.replies import DisconnectedError, OverloadedError
from shared.primitives.errors import RequestError
from tests.fuzzing import fuzzed
from tests.unit.router.request_contexts import scope_of

BODY_BYTES, BUDGET_BYTES = 1000, 4000
EVENTS = st.one_of(st.integers(0, 700), st.just("end"), st.just("hang up"), st.just("cancel"))
CLIENTS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.lists(EVENTS, max_size=4)), max_size=12)


def settings() -> RouterConfig:
    return RouterConfig(max_body_bytes=BODY_BYTES, router_bytes_max=BUDGET_BYTES)


async def one_request(reader: BodyReader, tenant: str, events: list[Any]) -> None:
    """A client whose body arrives as `events` say; it holds the body for a while once it is whole."""
    scope = scope_of(type="http", headers=[], client=(tenant, 1))
    left = iter(events)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        match next(left, "end"):
            case int(size):
                return {"type": "http.request", "body": b"x" * size, "more_body": True}
            case "hang up":
                return {"type": "http.disconnect"}
            case "cancel":
                raise asyncio.CancelledError
        return {"type": "http.request", "body": b"", "more_body": False}

    async with reader.read(scope, receive) as body:
        assert len(body) <= BODY_BYTES
        for _ in range(5):
            await asyncio.sleep(0)
        if "hang up" in list(left):
            raise DisconnectedError


@fuzzed
@given(CLIENTS)
def test_nothing_is_held_after_any_ends_refusals_and_hangups(clients: list[tuple[str, list[Any]]]) -> None:
    async def scenario() -> None:
        reader = BodyReader(settings())
        tasks = [asyncio.create_task(one_request(reader, tenant, events)) for tenant, events in clients]
        while not all(task.done() for task in tasks):
            assert 0 <= reader.budget.held_bytes <= BUDGET_BYTES
            await asyncio.sleep(0)
        assert reader.budget.held_bytes == 0
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, RequestError | DisconnectedError)

    asyncio.run(scenario())


def test_a_body_weighs_until_its_request_is_done_with_it() -> None:
    async def scenario() -> None:
        reader = BodyReader(settings())
        chunks = [b"x" * 500, b"y" * 300]

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

        async with reader.read(scope_of(type="http", headers=[], client=("a", 1)), receive) as body:
            assert body == b"x" * 500 + b"y" * 300
            assert reader.budget.held_bytes == 800
        assert reader.budget.held_bytes == 0

    asyncio.run(scenario())


def test_the_body_of_one_client_leaves_room_for_another_ones() -> None:
    async def scenario() -> None:
        reader = BodyReader(settings())

        def body(client: str, size: int) -> AbstractAsyncContextManager[bytearray]:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"x" * size, "more_body": False}

            return reader.read(scope_of(type="http", headers=[], client=(client, 1)), receive)

        async with body("a", BODY_BYTES), body("a", BODY_BYTES):
            with pytest.raises(OverloadedError):
                async with body("a", 1):
                    pass
            async with body("b", BODY_BYTES):
                assert reader.budget.held_bytes == 3 * BODY_BYTES

    asyncio.run(scenario())


def test_one_tenant_gets_half_and_leaves_room_for_others() -> None:
    budget = ByteBudget(1000, "full", "bytes")
    with budget.hold("a") as of_a, budget.hold("b") as of_b:
        of_a.add(500)
        with pytest.raises(OverloadedError):
            of_a.add(1)
        of_b.add(400)
        assert budget.held_bytes == 900
    assert budget.held_bytes == 0
