"""Tenants take turns at the tokenizer, no slot is lost, and none of them can keep the others out."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.prompts.prompts import TokenizerQueue
from router.replies import DisconnectedError, OverloadedError

STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "end", "hang up", "cancel"]), st.integers(0, 3)), max_size=40
)


class Requests:
    """Requests at one queue: which of them have a slot, in the order in which they got it."""

    def __init__(self, queue: TokenizerQueue):
        self.queue = queue
        self.served: list[str] = []
        self.running = 0
        self.refused: list[str] = []
        self._hangups: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def come(self, tenant: str) -> None:
        hangup = asyncio.Event()
        self._hangups.append(hangup)
        self._tasks.append(asyncio.create_task(self._request(tenant, hangup)))
        await settled()

    async def _request(self, tenant: str, hangup: asyncio.Event) -> None:
        async def hangs_up() -> None:
            await hangup.wait()

        try:
            await self.queue.acquire(tenant, hangs_up)
        except OverloadedError:
            self.refused.append(tenant)
            return
        except DisconnectedError:
            return
        self.served.append(tenant)
        self.running += 1

    async def end_one(self) -> None:
        if self.running:
            self.running -= 1
            self.queue.release()
        await settled()

    async def hang_up(self, index: int) -> None:
        if index < len(self._hangups):
            self._hangups[-1 - index].set()
        await settled()

    async def cancel(self, index: int) -> None:
        if index < len(self._tasks):
            self._tasks[-1 - index].cancel()
        await settled()

    async def end_all(self) -> None:
        while self.running:
            await self.end_one()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def settled() -> None:
    """Let all tasks go as far as they can."""
    for _ in range(6):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@given(STEPS)
def test_all_slots_are_free_after_any_ends_hangups_and_cancels(steps: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        requests = Requests(TokenizerQueue(slots=2, waiting_max=5))
        for step, which in steps:
            match step:
                case "come":
                    await requests.come("abcd"[which])
                case "end":
                    await requests.end_one()
                case "hang up":
                    await requests.hang_up(which)
                case "cancel":
                    await requests.cancel(which)
            assert requests.running <= 2
            assert requests.queue.waiting <= 5
        await requests.end_all()
        assert requests.queue.waiting == 0
        for tenant in "ab":
            await requests.come(tenant)
        assert requests.running == 2

    run(scenario())


def test_tenants_take_turns_and_each_ones_requests_keep_their_order() -> None:
    async def scenario() -> None:
        requests = Requests(TokenizerQueue(slots=1, waiting_max=20))
        for tenant in "aaaaabbc":
            await requests.come(tenant)
        await requests.end_all()
        assert requests.served == list("aabcabaa")

    run(scenario())


def test_when_too_many_wait_the_tenant_with_the_most_loses_its_last() -> None:
    async def scenario() -> None:
        requests = Requests(TokenizerQueue(slots=1, waiting_max=4))
        for tenant in "aaaaaa":
            await requests.come(tenant)
        assert requests.refused == ["a"]
        await requests.come("b")
        assert requests.refused == ["a", "a"]
        await requests.end_all()
        assert requests.served == list("aabaa")

    run(scenario())


def test_a_client_that_hangs_up_leaves_the_queue_at_once() -> None:
    async def scenario() -> None:
        requests = Requests(TokenizerQueue(slots=1, waiting_max=4))
        await requests.come("a")
        await requests.come("b")
        await requests.hang_up(0)
        assert requests.queue.waiting == 0

    run(scenario())


def test_a_queue_that_is_full_of_one_tenant_refuses_that_tenant() -> None:
    async def scenario() -> None:
        queue = TokenizerQueue(slots=0, waiting_max=0)
        with pytest.raises(OverloadedError):
            await queue.acquire("a", settled)

    run(scenario())


def test_a_request_cancelled_in_the_turn_in_which_its_slot_came_gives_it_back() -> None:
    async def scenario() -> None:
        requests = Requests(TokenizerQueue(slots=1, waiting_max=4))
        await requests.come("a")
        await requests.come("b")
        requests.running -= 1
        requests.queue.release()  # b has its slot, and has not run yet
        await requests.cancel(0)
        await requests.come("c")
        assert requests.served == ["a", "c"]
        await requests.end_all()

    run(scenario())
