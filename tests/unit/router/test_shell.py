"""The shell on uvloop, the event loop that a router runs on."""

from __future__ import annotations

import asyncio

import uvloop

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.effects import Outcome, RequestAborted, RequestFailed
from router.shell import RouterShell
from shared.messages import Hello
from tests.doubles.memory_links import MemoryLinks
from tests.unit.router.deployment import request


class EndOf:
    """Implements `TokenSink`: keeps how its request ended."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def tokens(self, token_ids: tuple[int, ...]) -> None:
        raise AssertionError(f"no worker is there, but tokens came: {token_ids}")

    def ended(self, outcome: Outcome) -> None:
        self.outcome.set_result(outcome)


async def requests_beside_a_deadline_that_is_due() -> list[Outcome]:
    """Two requests and a cancellation in one turn of the loop; each wait for a worker is over at once."""
    config = RouterConfig(served_model_name="m", waiting_seconds_max=1e-6)
    core = RouterCore(config, asyncio.get_running_loop().time())
    shell = RouterShell(core, MemoryLinks(Hello(session=1, role="router", uid="router", epoch=1)))
    ends = [EndOf(), EndOf()]
    for rid, end in zip(("first", "second"), ends, strict=True):
        shell.submit(request(rid), end)
    shell.cancel("first")
    outcomes = [await asyncio.wait_for(end.outcome, 10) for end in ends]
    shell.close()
    assert not any(core.requests_by_state.values())
    return outcomes


def test_a_deadline_that_is_due_already_disturbs_no_other_request() -> None:
    """uvloop gives a plain handle, without `when()`, for a deadline within half a millisecond."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cancelled, expired = runner.run(requests_beside_a_deadline_that_is_due())
    assert isinstance(cancelled, RequestAborted)
    assert isinstance(expired, RequestFailed)
    assert expired.status == 503
