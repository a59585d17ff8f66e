"""The shell on uvloop, the event loop that a router runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import uvloop

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.effects import Outcome, RequestAborted, RequestFailed
from router.shell import RouterShell
from shared.links.events import LinkEvent, PeerDown, Received
from shared.links.inbox import EVENTS_A_TAKE
from shared.wire.messages import Hello, Load
from shared.wire.sampled import Logprobs
from tests.doubles.memory_links import MemoryLinks
from tests.unit.router.deployment import hello, request


class EndOf:
    """Implements `TokenSink`: keeps how its request ended."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def tokens(self, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        raise AssertionError(f"no worker is there, but tokens came: {token_ids} {logprobs}")

    def scored(self, logprobs: Logprobs) -> None:
        raise AssertionError(f"no worker is there, but its prompt was scored: {logprobs}")

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


class CoreWithAFault(RouterCore):
    """Raises in the middle of one input, behind what it has decided so far."""

    def cancel(self, rid: str, now: float) -> None:
        super().cancel(rid, now)
        if rid == "poison":
            raise KeyError(rid)


class DeafEnd(EndOf):
    """Cannot be told how its request ended, the first time."""

    def ended(self, outcome: Outcome) -> None:
        if isinstance(outcome, RequestAborted):
            raise ValueError("this answer cannot be written")
        super().ended(outcome)


def on_uvloop(scene: Callable[[RouterShell, list[BaseException]], Awaitable[None]]) -> None:
    """Play a scene with a shell around a core with a fault; the list gets what the shell calls broken."""

    async def play() -> None:
        core = CoreWithAFault(RouterConfig(served_model_name="m"), asyncio.get_running_loop().time())
        links = MemoryLinks(Hello(session=1, role="router", uid="router", epoch=1))
        broken: list[BaseException] = []
        shell = RouterShell(core, links, on_broken=broken.append)
        await scene(shell, broken)
        shell.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


def test_an_error_of_the_core_breaks_the_shell_once_what_it_had_decided_is_carried_out() -> None:
    async def scene(shell: RouterShell, broken: list[BaseException]) -> None:
        ends = {rid: EndOf() for rid in ("poison", "other", "late")}
        shell.submit(request("poison"), ends["poison"])
        shell.submit(request("other"), ends["other"])
        for rid in ("poison", "other"):  # a client hangs up: every choice of its answer is to be reached
            shell.cancel(rid)
        assert isinstance(ends["poison"].outcome.result(), RequestAborted)
        await asyncio.sleep(0)
        assert [type(error) for error in broken] == [KeyError]
        shell.submit(request("late"), ends["late"])
        late = ends["late"].outcome.result()
        assert isinstance(late, RequestFailed)
        assert late.status == 500

    on_uvloop(scene)


def test_an_answer_that_cannot_be_written_disturbs_no_other() -> None:
    async def scene(shell: RouterShell, broken: list[BaseException]) -> None:
        deaf, other = DeafEnd(), EndOf()
        shell.submit(request("deaf"), deaf)
        shell.submit(request("other"), other)
        shell.cancel("deaf")
        shell.cancel("other")
        failed = deaf.outcome.result()
        assert isinstance(failed, RequestFailed)
        assert failed.status == 500
        assert isinstance(other.outcome.result(), RequestAborted)
        await asyncio.sleep(0)
        assert broken == []

    on_uvloop(scene)


class CrowdedLinks(MemoryLinks):
    """Everything has come already, and is given a part at a time."""

    def __init__(self, events: list[LinkEvent]):
        super().__init__(Hello(session=1, role="router", uid="router", epoch=1))
        self.events = events

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        del timeout_seconds
        events, self.events = self.events[:EVENTS_A_TAKE], self.events[EVENTS_A_TAKE:]
        return events


def test_the_loop_has_a_turn_between_many_events_and_none_is_left_behind() -> None:
    events: list[LinkEvent] = [Received("nobody", Load()) for _ in range(3 * EVENTS_A_TAKE)]

    async def play() -> list[int]:
        core = RouterCore(RouterConfig(served_model_name="m"), asyncio.get_running_loop().time())
        links = CrowdedLinks(events)
        shell = RouterShell(core, links)
        shell.links_ready()
        progress = [0]
        for _ in range(20):
            await asyncio.sleep(0)
            progress.append(core.counters.dropped_messages["unknown_worker"])
            if progress[-1] and not progress[-2]:
                links.events.append(Received("nobody", Load()))  # the links say so only when nothing waits
        shell.close()
        return progress

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        progress = runner.run(play())
    assert progress[-1] == len(events) + 1
    assert EVENTS_A_TAKE in progress, "clients wait for all events"


def test_a_message_that_the_core_fails_at_ends_the_session_of_its_worker_and_not_the_router() -> None:
    async def play() -> None:
        core = RouterCore(RouterConfig(served_model_name="m"), asyncio.get_running_loop().time())
        links = MemoryLinks(Hello(session=1, role="router", uid="router", epoch=1))
        workers = [MemoryLinks(hello("prefill", uid)) for uid in ("liar", "honest")]
        for worker in workers:
            links.link(worker)
        broken: list[BaseException] = []
        shell = RouterShell(core, links, on_broken=broken.append)
        shell.links_ready()
        await asyncio.sleep(0)
        assert len(core.fleet.workers) == 2
        core.fleet.workers[workers[0].name].load = None  # type: ignore[assignment]
        workers[0].send(links.name, Load(queued=1))
        workers[1].send(links.name, Load(queued=2))
        shell.links_ready()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert broken == []
        assert [worker.load.queued for worker in core.fleet.workers.values()] == [2]
        downs = [[e for e in worker.receive(0) if isinstance(e, PeerDown)] for worker in workers]
        assert [len(each) for each in downs] == [1, 0]
        assert core.counters.worker_faults == {"Load": 1}
        shell.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())
