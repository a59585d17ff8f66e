"""Whatever workers, clients and time do: tokens come once and in order, and every request ends exactly once.

The workers here are honest about what they say but not about when they die, and they keep saying what nobody waits
for any more. Token i of every request is i on every worker, so a doubled, lost or swapped token shows.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.effects import RequestCompleted, Usage
from shared.batch.effects import Send
from shared.wire.messages import (
    Cancel,
    Decode,
    Finished,
    Generated,
    Joined,
    Limits,
    Message,
    Prefill,
    Prefilled,
    RefusalReason,
    Refused,
    Release,
    Row,
)
from tests.unit.router.deployment import ScriptedDeployment, request

LENGTH = 8  # tokens of every output
SMALL = Limits(context_len=64, page_size=4, pages=12, slots=2, vocab_size=100)
REASONS: list[RefusalReason] = ["no_room", "stale", "unreachable", "internal"]
pick = st.integers(min_value=0, max_value=1 << 16)


class AnyOrder(RuleBasedStateMachine):
    """Jobs are what workers believe they have; leases what prefill workers believe they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.world = ScriptedDeployment(2, 2, limits=SMALL, max_queued_requests=6, ready_max=4, losses_max=3)
        self.submitted: list[str] = []
        self.jobs: dict[tuple[str, str, int], tuple[Prefill | Decode, int]] = {}  # … and the next index
        self.leases: set[tuple[str, str, int]] = set()
        self.past: list[tuple[str, Message]] = []
        self.incarnations = 0

    def react(self) -> None:
        """Workers hear what was sent to them."""
        for effect in self.world.news():
            if not isinstance(effect, Send):
                continue
            assert effect.peer in self.world.core.fleet.workers, "sent to a worker that is gone"
            match effect.message:
                case Prefill(rid, attempt) | Decode(rid, attempt):
                    key = (effect.peer, rid, attempt)
                    assert key not in self.jobs
                    self.jobs[key] = (
                        effect.message,
                        len(effect.message.token_ids) - effect.message.prompt_len,
                    )
                case Cancel(rid, attempt) | Release(rid, attempt):
                    self.jobs.pop((effect.peer, rid, attempt), None)
                    self.leases.discard((effect.peer, rid, attempt))
                case _:
                    pass

    def say(self, peer: str, message: Message) -> None:
        self.past.append((peer, message))
        self.world.say(peer, message)
        self.react()

    def job(self, number: int, kind: type) -> tuple[str, str, int] | None:
        keys = [key for key, (command, _) in self.jobs.items() if isinstance(command, kind)]
        return keys[number % len(keys)] if keys else None

    @rule(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4), priority=st.integers(0, 1))
    def submit(self, lengths: list[int], priority: int) -> None:
        for length in lengths:
            rid = f"r{len(self.submitted)}"
            self.submitted.append(rid)
            self.world.submit(request(rid, (7,) * length, LENGTH, priority=priority))
            self.react()

    @rule(number=pick)
    def prefill_answers(self, number: int) -> None:
        key = self.job(number, Prefill)
        if key is not None:
            peer, rid, attempt = key
            _, index = self.jobs.pop(key)
            last = index == LENGTH - 1
            if not last:
                self.leases.add(key)
            pages = None if last else self.world.baton(peer, rid, attempt, index + 1)
            self.say(peer, Prefilled(rid, attempt, index, (index,), pages, "length" if last else None))

    @rule(number=pick)
    def decode_joins(self, number: int) -> None:
        key = self.job(number, Decode)
        if key is not None:
            self.say(key[0], Joined(key[1], key[2], 64, 0, 0.0))

    @rule(number=pick, count=st.integers(1, 3))
    def decode_steps(self, number: int, count: int) -> None:
        key = self.job(number, Decode)
        if key is not None:
            peer, rid, attempt = key
            command, index = self.jobs[key]
            tokens = tuple(range(index, min(index + count, LENGTH)))
            self.jobs[key] = (command, index + len(tokens))
            self.say(peer, Generated((Row(rid, attempt, index, tokens),)))
            if index + len(tokens) == LENGTH:
                self.jobs.pop(key, None)
                self.say(peer, Finished(rid, attempt, LENGTH, "length"))

    @rule(steps=st.integers(1, 3))
    def all_workers_work(self, steps: int) -> None:
        """Without this nearly every request would meet a fault before its end."""
        for _ in range(steps):
            self.prefill_answers(0)
            self.prefill_answers(1)
            self.decode_joins(1)
            self.decode_steps(0, 1)
            self.decode_steps(1, 2)

    @rule(number=pick, kind=st.sampled_from([Prefill, Decode]), reason=st.sampled_from(REASONS))
    def worker_refuses(self, number: int, kind: type, reason: RefusalReason) -> None:
        key = self.job(number, kind)
        if key is not None:
            del self.jobs[key]
            self.say(key[0], Refused(key[1], key[2], reason))

    @rule(number=pick)
    def decode_skips_a_token(self, number: int) -> None:
        key = self.job(number, Decode)
        if key is not None:
            self.say(key[0], Generated((Row(key[1], key[2], LENGTH + 1, (99,)),)))

    @precondition(lambda self: self.past)
    @rule(number=pick)
    def a_message_comes_again(self, number: int) -> None:
        peer, message = self.past[number % len(self.past)]
        if not isinstance(message, Refused):  # after a refusal the same attempt may lawfully come back
            self.world.say(peer, message)
            self.react()

    @precondition(lambda self: len(self.past) % 4 == 1)
    @rule(number=pick, again=st.booleans())
    def worker_dies(self, number: int, again: bool) -> None:
        peers = list(self.world.core.fleet.workers)
        peer = peers[number % len(peers)]
        role = self.world.core.fleet.workers[peer].hello.role
        self.jobs = {key: job for key, job in self.jobs.items() if key[0] != peer}
        self.leases = {key for key in self.leases if key[0] != peer}
        self.world.down(peer)
        self.react()
        self.incarnations += 1
        self.world.up(role, peer if again else f"{role}{self.incarnations}", limits=SMALL)
        self.react()

    @rule(number=pick, slots=st.integers(0, 2), pages=st.integers(0, 12))
    def worker_tells_its_load(self, number: int, slots: int, pages: int) -> None:
        peers = list(self.world.core.fleet.workers)
        self.world.loaded(peers[number % len(peers)], slots_free=slots, free_pages=pages)
        self.react()

    @precondition(lambda self: len(self.submitted) % 3 == 2)
    @rule(number=pick, stop=st.booleans())
    def client_leaves_or_has_enough(self, number: int, stop: bool) -> None:
        rid = self.submitted[number % len(self.submitted)]
        (self.world.stop if stop else self.world.cancel)(rid)
        self.react()

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)
        self.react()

    @invariant()
    def tokens_come_once_and_in_order(self) -> None:
        for rid in self.submitted:
            output = self.world.output(rid)
            assert output == list(range(len(output)))
            outcome = self.world.outcome(rid)
            if isinstance(outcome, RequestCompleted) and outcome.reason == "length":
                assert len(output) == LENGTH

    @invariant()
    def nobody_waits_for_a_worker_that_is_gone(self) -> None:
        for worker in self.world.core.fleet.workers.values():
            assert worker.up
        shown = [self.world.core.debug(rid) for rid in self.submitted if self.world.outcome(rid) is None]
        ready = sum(debug is not None and debug["state"] == "ready" for debug in shown)
        assert ready <= len(self.leases), "a ready request has no pages"

    @invariant()
    def the_router_counts_for_each_worker_what_the_worker_has(self) -> None:
        fleet = self.world.core.fleet.workers
        assigned = {(peer, rid) for peer, worker in fleet.items() for rid in worker.assigned}
        assert assigned == {(peer, rid) for peer, rid, _ in self.jobs}
        leased = {(peer, rid) for peer, worker in fleet.items() for rid in worker.leases}
        assert leased == {(peer, rid) for peer, rid, _ in self.leases}

    def a_late_request_is_served(self) -> None:
        """A router that places nothing would keep all else that is asserted here."""
        for peer in list(self.world.core.fleet.workers):
            self.world.loaded(peer, slots_free=SMALL.slots, free_pages=SMALL.pages)
        self.submit([3], 0)
        self.all_workers_work(2 * LENGTH)
        assert self.world.outcome(self.submitted[-1]) == RequestCompleted("length", Usage(3, LENGTH, 0))

    def teardown(self) -> None:
        self.world.wait(1000.0)
        self.react()
        for rid in self.submitted:
            if self.world.outcome(rid) is None:  # nobody has set a limit: the client goes
                begun = bool(self.world.output(rid))  # it waits for room as long as it takes
                assert begun or self.world.state(rid) in ("prefilling", "decoding")
                self.world.cancel(rid)
                self.react()
            assert self.world.outcome(rid) is not None
        self.world.assert_nothing_left()
        assert not self.jobs
        assert not self.leases
        self.a_late_request_is_served()
        assert self.world.core.next_deadline() is None or not self.submitted


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
