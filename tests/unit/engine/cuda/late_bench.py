"""A `CudaDevice` on late streams, driven by random schedules, and what its tokens should be.

A schedule is drawn from a seed: prompts in chunks, alone or beside rows that decode, some on pages of another one's
prefix, batches that change by the step, up to nine steps launched ahead, requests that go to host pages and come back,
move to other pages, or end while others run; some have a grammar, masks, or ask for logprobs. The tokens of each
request, and what is reported of them and of its prompt, are compared with what it got alone on the CPU engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shared.batch.schedule_batch import ExtendRow, ForwardMode, PageGrant, ScheduleBatch, SlotJoin
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.platform import host_platform_on
from shared.wire.sampled import TokenLogprobs
from tests.doubles.late_stream import LateStream
from tests.doubles.strict_engine import DistinctPlaces, PlannedOnHost
from tests.unit.engine.late_requests import (
    CONTEXT_PAGES,
    EOS,
    PAGE_SIZE,
    LateModel,
    ReluctantBudget,
    ToyMatchers,
    Wanted,
    assert_alike,
)
from tests.unit.engine.tiny_models import VOCAB_SIZE

SLOTS = 5  # buckets 1, 2, 4, 5
PAGES = 40
HOST_PAGES = 12
AHEAD_MAX = 9
STAGING_BUFFERS = 4  # so few that steps launched ahead come round to them
SCORES_A_RUN = 5  # so that most prompts take several
LOOKS_MAX = 10_000  # for the end of a step or a copy; each may move the streams on


@dataclass
class LateRequest:
    """A request on the device."""

    wanted: Wanted
    slot: int
    pages: list[int]
    kv_len: int = 0  # launched
    tokens: list[int] = field(default_factory=list)  # known
    launched: int = 0  # tokens that launched steps will sample
    last_step: int = 0

    @property
    def done(self) -> bool:
        return self.launched == len(self.wanted.tokens)


def _streams(drawn: random.Random) -> tuple[LateStream, LateStream]:
    beside: list[LateStream] = []
    return LateStream(drawn, beside), LateStream(drawn, beside)


class LateBench:
    """One device and one random schedule over it."""

    def __init__(self, model: LateModel, seed: int) -> None:
        self._random = drawn = random.Random(seed)
        forward, copies = _streams(drawn)
        self.stream = forward
        platform = host_platform_on(forward, copies)
        self.cache = KVCache(
            model.config,
            PageCounts(PAGES, HOST_PAGES, known=1, padding=1),
            page_size=PAGE_SIZE,
            layout=KVLayout.KEYS_BY_TOKEN,
        )
        self.cache.store[:-1] = torch.nan  # what is read before it was written shows
        parts = EngineParts(
            forward,
            copies,
            model.decoder,
            PlannedOnHost(
                platform.attention(model.config, self.cache, SLOTS, self.cache.store.dtype), forward
            ),
            DistinctPlaces(),
            platform.ops,
            self.cache,
        )
        capacity = Capacity(
            SLOTS,
            CONTEXT_PAGES,
            64,
            VOCAB_SIZE,
            scores_a_run=SCORES_A_RUN,
            graph_tokens=(16, 32)[seed % 2],
            staging_buffers=STAGING_BUFFERS,
        )
        self.device = CudaDevice(parts, capacity, EOS, matchers=ToyMatchers())
        self.device._sampling._masks._budget = ReluctantBudget(drawn, drawn.choice((0.0, 0.2, 0.6)))
        free = [request for request in model.requests if not request.follows_output]
        # one that follows its output holds up all steps launched ahead
        drawn_from = drawn.choice((model.requests, free))
        self._waiting = [drawn.choice(drawn_from) for _ in range(drawn.randint(6, 14))]
        self._running: list[LateRequest] = []
        self._free_slots = list(range(SLOTS))
        self._free_pages = list(range(PAGES))
        self._pending: dict[int, list[LateRequest]] = {}  # rows that sample, by step that was not waited for
        self._scoring: dict[int, dict[int, tuple[TokenLogprobs, ...]]] = {}  # scores to come, by step and row
        self._step = 0
        self._copy_id = 0
        self._ahead = drawn.randint(0, AHEAD_MAX)
        self.moves = self.retractions = self.reused = self.told = self.scored = self.opened = self.sat_out = (
            self.mixed
        ) = 0

    def run(self) -> None:
        """Run the schedule to its end; an AssertionError for any wrong token."""
        while self._waiting or self._running:
            self._turn()
        while self._pending:
            self._wait()
        assert sorted(self._free_pages) == list(range(PAGES))

    def _turn(self) -> None:
        joins: list[SlotJoin] = []
        if self._random.random() < 0.25 and self._running:
            joins = self._relocate(self._random.choice(self._running))
        if self._waiting and self._free_slots and self._random.random() < 0.5:
            self._extend(joins)
        else:
            self._decode(joins)
        while len(self._pending) > self._ahead:
            self._wait()
        for request in [request for request in self._running if request.done]:
            self._end(request)

    # ---- steps

    def _extend(self, joins: list[SlotJoin]) -> None:
        """One or two prompts, each with a chunk or whole; the rest of a chunk follows at once."""
        started: list[tuple[LateRequest, int]] = []
        for _ in range(self._random.randint(1, 2)):
            if self._waiting and self._free_slots and len(self._free_pages) >= 16:
                request, cached = self._admit(self._waiting.pop())
                started.append((request, cached))
        if not started:
            return self._decode(joins)
        joins += [self._join(request, kv_len=cached) for request, cached in started]
        while unfinished := [request for request, _ in started if not request.launched]:
            decoding, grants = self._rows_to_decode() if self._random.random() < 0.5 else ([], ())
            rows: list[ExtendRow] = []
            scores: dict[int, tuple[TokenLogprobs, ...]] = {}
            for request in unfinished:
                prompt = request.wanted.prompt
                size = self._random.choice((len(prompt), self._random.randint(1, len(prompt))))
                part = prompt[request.kv_len : request.kv_len + size]
                samples = request.kv_len + len(part) == len(prompt)
                scored = request.wanted.scores(request.kv_len, len(part))
                if scored:
                    scores[len(rows)] = request.wanted.scored[request.kv_len : request.kv_len + len(scored)]
                rows.append(ExtendRow(request.slot, part, request.kv_len, samples, scored))
                request.kv_len += len(part)
                request.launched += samples
            sampling = [request for request in unfinished if request.launched]
            self._scoring[self._step + 1] = scores
            self._launch(
                ForwardMode.MIXED if decoding else ForwardMode.EXTEND,
                [*decoding, *sampling],
                [*decoding, *unfinished],
                joins,
                grants=grants,
                extend=tuple(rows),
                decode_slots=tuple(request.slot for request in decoding),
            )
            self.mixed += bool(decoding)
            joins = []
        return None

    def _decode(self, joins: list[SlotJoin]) -> None:
        rows, grants = self._rows_to_decode()
        if not rows:
            if joins:
                self._launch(ForwardMode.PREBUILT, [], [], joins)
            return
        slots = tuple(request.slot for request in rows)
        self._launch(ForwardMode.DECODE, rows, rows, joins, grants=grants, decode_slots=slots)

    def _rows_to_decode(self) -> tuple[list[LateRequest], tuple[PageGrant, ...]]:
        """Some of the requests whose prompts are launched, and the pages that they need for a token more."""
        ready = [request for request in self._running if request.launched and not request.done]
        rows = self._random.sample(ready, self._random.randint(min(1, len(ready)), len(ready)))
        grants = []
        for request in rows:
            request.kv_len += 1
            request.launched += 1
            if request.kv_len > len(request.pages) * PAGE_SIZE:
                new = self._take(1)
                request.pages += new
                grants.append(PageGrant(request.slot, tuple(new)))
        return rows, tuple(grants)

    def _launch(
        self,
        mode: ForwardMode,
        sampling: list[LateRequest],
        rows: list[LateRequest],
        joins: list[SlotJoin],
        **batch: object,
    ) -> None:
        self._step += 1
        self.device.launch(ScheduleBatch(self._step, mode, tuple(joins), **batch))  # type: ignore[arg-type]
        self.opened += self.device._open is not None
        self._pending[self._step] = list(sampling)
        for request in rows:
            request.last_step = self._step

    def _wait(self) -> None:
        step = min(self._pending)
        sampled = self.device.wait(step)
        assert not sampled.failed
        asked = 0
        for row, (request, token) in enumerate(zip(self._pending.pop(step), sampled.token_ids, strict=True)):
            if row in sampled.sat_out:
                request.kv_len -= 1
                request.launched -= 1
                self.sat_out += 1
                continue
            place = len(request.tokens)
            assert token == request.wanted.tokens[place], f"step {step}, {request}"
            if request.wanted.told:
                assert_alike([sampled.logprobs[row]], request.wanted.told[place : place + 1])
                asked += 1
            request.tokens.append(token)
        assert len(sampled.logprobs) == asked
        scores = self._scoring.pop(step, {})
        assert sampled.scored.keys() == scores.keys()
        for row, expected in scores.items():
            assert_alike(sampled.scored[row], expected)
        self.told += asked
        self.scored += len(scores)

    # ---- requests

    def _admit(self, wanted: Wanted) -> tuple[LateRequest, int]:
        """Onto fresh pages, but for whole pages of a prefix that another running request has computed."""
        needed = -(-len(wanted.prompt) // PAGE_SIZE)
        request = LateRequest(wanted, self._free_slots.pop(), [])
        cached = 0
        for other in self._running:
            same = _same(other.wanted.prompt, wanted.prompt[:-1]) // PAGE_SIZE
            if same and other.launched:
                # A copy of its pages, as a fetch would make: after the last step that wrote them.
                self._settle(other)
                request.pages = self._copied(other.pages[:same])
                cached = same * PAGE_SIZE
                self.reused += 1
                break
        request.pages += self._take(needed - len(request.pages))
        request.kv_len = cached
        self._running.append(request)
        return request, cached

    def _relocate(self, request: LateRequest) -> list[SlotJoin]:
        """Bring a request to other pages and perhaps another slot, by host pages or as a fetch does."""
        if not request.launched or request.done or len(self._free_pages) < len(request.pages) + 10:
            return []
        self._settle(request)
        if self._random.random() < 0.5 and len(request.pages) <= HOST_PAGES:
            new = self._by_host(request.pages)
            self.retractions += 1
        else:
            new = self._copied(request.pages)
            self.moves += 1
        self._give_back(request)
        request.pages = new
        request.slot = self._free_slots.pop(0)
        return [self._join(request, kv_len=request.kv_len)]

    def _by_host(self, pages: Sequence[int]) -> list[int]:
        host = self._random.sample(range(HOST_PAGES), len(pages))
        self._copy(lambda copy_id: self.device.start_backup(copy_id, list(pages), host))
        self.cache.store[list(pages)] = torch.nan  # the pages belong to nobody meanwhile
        new = self._take(len(pages))
        self._copy(lambda copy_id: self.device.start_restore(copy_id, host, new))
        return new

    def _copy(self, start: object) -> None:
        self._copy_id += 1
        start(self._copy_id)  # type: ignore[operator]
        for _ in range(LOOKS_MAX):
            if done := self.device.copies_done():
                break
        assert done == [self._copy_id]

    def _copied(self, pages: Sequence[int]) -> list[int]:
        """New pages with these bytes, at once: a peer's read does not wait for the device's stream."""
        new = self._take(len(pages))
        self._complete(self._step)  # a target of a fetch was left by all steps
        self.cache.store[new] = self.cache.store[list(pages)]
        return new

    def _settle(self, request: LateRequest) -> None:
        """Until the request's tokens are known and its pages are written."""
        self._complete(request.last_step)
        while len(request.tokens) < request.launched:
            self._wait()

    def _complete(self, step: int) -> None:
        for _ in range(LOOKS_MAX):
            if self.device.completed() >= step:
                return
            if self._random.random() < 0.3 and self._pending:
                self._wait()
        raise AssertionError(f"step {step} is never completed")

    def _join(self, request: LateRequest, kv_len: int) -> SlotJoin:
        wanted = request.wanted
        token_ids = (*wanted.prompt, *request.tokens)
        return SlotJoin(
            request.slot,
            tuple(request.pages),
            kv_len,
            wanted.params,
            len(wanted.prompt),
            token_ids if wanted.params.needs_history else (),
            request.tokens[-1] if request.tokens else None,
        )

    def _take(self, count: int) -> list[int]:
        taken = self._random.sample(self._free_pages, count)
        self._free_pages = [page for page in self._free_pages if page not in taken]
        return taken

    def _give_back(self, request: LateRequest) -> None:
        self._free_pages += request.pages
        self._free_slots.append(request.slot)

    def _end(self, request: LateRequest) -> None:
        self._running.remove(request)
        self._give_back(request)


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        count += 1
    return count
