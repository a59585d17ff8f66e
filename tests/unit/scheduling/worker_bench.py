"""A worker's core on the bench: the real event loop and links in memory around it, a device and a fetcher that obey.

The device samples what a request's seed says (`answers[seed][i]` is output token i, else `ORDINARY`), completes a step
when it is waited for and a copy when the test says so. The fetcher lands what the test tells it to land. Neither
holds a single byte of KV: whether pages hold the right bytes is the simulation's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shared.batch.effects import Note
from shared.batch.schedule_batch import ForwardMode, ScheduleBatch, SlotJoin
from shared.kv.page_pool import pages_for_tokens
from shared.links.events import Received
from shared.scheduling.event_loop import EventLoop, Scheduler
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, FetchStale, KvLink
from shared.wire.baton import Baton, Holder, agent_name
from shared.wire.messages import UNDERSTOOD, Decode, Hello, Message, Prefill, Role
from shared.wire.sampled import Sampled
from shared.wire.sampling_params import SamplingParams
from tests.doubles.memory_links import MemoryLinks

PAGE_SIZE = 4
EOS = 0
ORDINARY = 9
UNREAD = 99_999  # the token of a row that has none
VOCAB_SIZE = 100_000
KV_FORMAT = "bench"
HOLDER = Holder("prefill-0", 7, agent_name("prefill-0", 7), b"", 0, 64, 0)
LINK = KvLink("tcp/eth0", 1e9)
MessageKind = TypeVar("MessageKind", bound=Message)


@dataclass(slots=True)
class ScriptedDevice:
    """Implements `Device`."""

    answers: dict[int, Sequence[int]] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)  # seed → index of the token that cannot be sampled
    sits_out: Callable[[int, int], bool] = lambda _seed, _index: (
        False
    )  # a row of DECODE, by that token's index
    seconds: Callable[[ScheduleBatch], float] = lambda _batch: 0.0  # that a step takes; 0.0: not known
    batches: list[ScheduleBatch] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)  # "launch 1", "settle 1", …
    copies: list[int] = field(default_factory=list)  # started, not done
    on_wait: Callable[[], None] = lambda: None  # what happens while a step is waited for
    _done: list[int] = field(default_factory=list)
    _completed: int = 0
    _slots: dict[int, SlotJoin] = field(default_factory=dict)
    _kv_len: dict[int, int] = field(default_factory=dict)
    _results: dict[int, Sampled] = field(default_factory=dict)

    def launch(self, batch: ScheduleBatch) -> None:
        assert batch.step == len(self.batches) + 1
        self.batches.append(batch)
        self.trace.append(f"launch {batch.step}")
        for join in batch.joins:
            self._slots[join.slot], self._kv_len[join.slot] = join, join.kv_len
        slots = list[int]()
        for slot in batch.decode_slots:
            self._kv_len[slot] += 1
            slots.append(slot)
        for row in batch.extend:
            assert row.start == self._kv_len[row.slot]
            self._kv_len[row.slot] += len(row.token_ids)
            if row.samples:
                slots.append(row.slot)
        sat_out = {
            at
            for at, slot in enumerate(slots)
            if at < len(batch.decode_slots)
            and self.sits_out(self._slots[slot].params.seed, self._index(slot))
        }
        sampled = [UNREAD if at in sat_out else self._sample(slot) for at, slot in enumerate(slots)]
        failed = {at: "scripted" for at, slot in enumerate(slots) if self._fails(slot) and at not in sat_out}
        for at in sat_out:
            self._kv_len[slots[at]] -= 1
        self._results[batch.step] = Sampled(
            sampled, failed=failed, sat_out=sat_out, seconds=self.seconds(batch)
        )

    def wait(self, step: int) -> Sampled:
        self.trace.append(f"settle {step}")
        self.on_wait()
        self._completed = step
        return self._results.pop(step)

    def completed(self) -> int:
        return self._completed

    def start_backup(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        assert len(pages) == len(host_pages)
        self.copies.append(copy_id)

    def start_restore(self, copy_id: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        assert len(pages) == len(host_pages)
        self.copies.append(copy_id)

    def copies_done(self) -> list[int]:
        done, self._done = self._done, []
        return done

    def finish_copies(self) -> None:
        """All copies that were started are done."""
        self._done, self.copies = self._done + self.copies, []

    def steps(self, mode: ForwardMode) -> list[ScheduleBatch]:
        """The steps of one mode so far."""
        return [batch for batch in self.batches if batch.mode is mode]

    def _index(self, slot: int) -> int:
        return self._kv_len[slot] - self._slots[slot].prompt_len

    def _fails(self, slot: int) -> bool:
        return self.failures.get(self._slots[slot].params.seed) == self._index(slot)

    def _sample(self, slot: int) -> int:
        answer, index = self.answers.get(self._slots[slot].params.seed, ()), self._index(slot)
        return answer[index] if index < len(answer) else ORDINARY


@dataclass(slots=True)
class ScriptedFetcher:
    """Implements `Fetcher`."""

    started: dict[int, tuple[Baton, int, tuple[int, ...]]] = field(default_factory=dict)
    under_way: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    events: list[FetchEvent] = field(default_factory=list)

    @property
    def holder(self) -> Holder:
        return HOLDER

    def start(self, fetch_id: int, baton: Baton, start_page: int, into: Sequence[int]) -> None:
        self.started[fetch_id] = baton, start_page, tuple(into)
        self.under_way.append(fetch_id)

    def abandon(self, fetch_id: int) -> None:
        self.under_way.remove(fetch_id)
        self.abandoned.append(fetch_id)

    def poll(self) -> list[FetchEvent]:
        events, self.events = self.events, []
        return events

    def land(self, fetch_id: int) -> None:
        self._tell(FetchLanded(fetch_id, 64 * len(self.started[fetch_id][2]), 0.5, LINK))

    def land_all(self) -> None:
        for fetch_id in list(self.under_way):
            self.land(fetch_id)

    def find_stale(self, fetch_id: int) -> None:
        self._tell(FetchStale(fetch_id))

    def fail(self, fetch_id: int, *, ended: bool) -> None:
        self._tell(FetchFailed(fetch_id, "scripted", ended))

    def end(self, fetch_id: int) -> None:
        self.events.append(FetchEnded(fetch_id))

    def _tell(self, event: FetchLanded | FetchStale | FetchFailed) -> None:
        self.under_way.remove(event.fetch_id)
        self.events.append(event)


@dataclass(slots=True)
class PlainWords:
    """Implements `LeaseWords`."""

    values: list[int]
    opened: int = 0

    def open(self, lease: int, pages: Sequence[int]) -> int:
        del pages
        assert self.values[lease] == 0, "a word in use is cleared first"
        self.opened += 1
        self.values[lease] = self.opened
        return self.opened

    def clear(self, lease: int) -> None:
        self.values[lease] = 0

    def __len__(self) -> int:
        return len(self.values)


class WorkerBench:
    """One scheduler, turned by hand."""

    def __init__(
        self,
        role: Role,
        scheduler: Scheduler,
        *,
        overlap: bool = True,
        routers: int = 1,
        understands: tuple[str, ...] = UNDERSTOOD["router"],
    ):
        self.now = 100.0
        self.device = ScriptedDevice()
        self.fetcher = ScriptedFetcher()
        self.scheduler = scheduler
        self.links = MemoryLinks(
            Hello(session=1, role=role, uid="worker", epoch=1, understands=UNDERSTOOD[role])
        )
        self.routers = [
            MemoryLinks(
                Hello(session=1, role="router", uid=f"router-{number}", epoch=1, understands=understands)
            )
            for number in range(routers)
        ]
        for router in self.routers:
            router.link(self.links)
        self.notes: list[Note] = []
        self.loop = EventLoop(
            scheduler,
            self.device,
            self.fetcher,
            self.links,
            lambda: self.now,
            self.notes.append,
            overlap=overlap,
        )
        self.heard: list[Message] = []

    def send(self, *messages: Message, router: int = 0) -> None:
        """Let a router say something; the worker hears it in its next turn."""
        for message in messages:
            self.routers[router].send(self.links.name, message)

    def turn(self, count: int = 1) -> None:
        """Turn the loop; all books must be right after every turn."""
        for _ in range(count):
            self.loop.turn()
            self.scheduler.check()
            self._listen()

    def run(self, turns_max: int = 500) -> None:
        """Turn until the loop would block, landing fetches and ending copies as they come."""
        for _ in range(turns_max):
            self.turn()
            self.fetcher.land_all()
            copied = bool(self.device.copies)
            self.device.finish_copies()
            if not copied and not self.fetcher.events and self.loop.patience_seconds() > 0:
                return
        raise AssertionError(f"still busy after {turns_max} turns")

    def run_until(self, reached: Callable[[], bool], turns_max: int = 500) -> None:
        """Turn, landing fetches but ending no copies, until something is so."""
        for _ in range(turns_max):
            if reached():
                return
            self.turn()
            self.fetcher.land_all()
        raise AssertionError(f"not reached in {turns_max} turns")

    def said(self, kind: type[MessageKind]) -> list[MessageKind]:
        """What the routers have heard of one kind, in order."""
        return [message for message in self.heard if isinstance(message, kind)]

    def _listen(self) -> None:
        for router in self.routers:
            for event in router.receive(0.0):
                if isinstance(event, Received):
                    self.heard.append(event.message)


def params(max_new_tokens: int, seed: int = 1) -> SamplingParams:
    """Sampling parameters that matter here."""
    return SamplingParams(max_new_tokens=max_new_tokens, seed=seed)


def prompt(length: int, family: int = 1) -> tuple[int, ...]:
    """A prompt that shares no page with one of another family."""
    return tuple(1000 * family + position for position in range(length))


def prefill(
    rid: str, token_ids: Sequence[int], max_new_tokens: int = 8, attempt: int = 1, seed: int = 1
) -> Prefill:
    """A `Prefill`, of the first attempt by default."""
    return Prefill(rid, attempt, tuple(token_ids), len(token_ids), params(max_new_tokens, seed))


def decode(
    rid: str, token_ids: Sequence[int], max_new_tokens: int = 8, attempt: int = 1, seed: int = 1
) -> Decode:
    """A `Decode` of a prompt and the first token that a prefill worker sampled."""
    kv_len = len(token_ids)
    baton = Baton(
        rid=rid,
        attempt=attempt,
        holder=HOLDER,
        kv_format=KV_FORMAT,
        lease=0,
        nonce=1,
        kv_len=kv_len,
        prompt_len=kv_len,
        pages=tuple(range(pages_for_tokens(kv_len, PAGE_SIZE))),
    )
    return Decode(rid, attempt, (*token_ids, ORDINARY), kv_len, params(max_new_tokens, seed), baton)
