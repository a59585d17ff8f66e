"""A `CudaDevice` on late streams, driven by random schedules, and what its tokens should be.

A schedule is drawn from a seed: prompts in chunks, some on pages of another one's prefix, batches that change by the
step, up to nine steps launched ahead, requests that go to host pages and come back, move to other pages, or end while
others run. The tokens of each request are compared with those it got alone on the CPU engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shared.engine.cuda.device import Capacity, CudaDevice, EngineParts
from shared.engine.cuda.platform import host_platform_on
from shared.engine.dense.decoder import DecoderModel
from shared.engine.dense.weights import Weights
from shared.engine.kv_cache import KVCache, KVLayout
from shared.engine.model_config import ModelConfig, read_model_config
from shared.sampling_params import SamplingParams
from shared.schedule_batch import ExtendRow, ForwardMode, PageGrant, ScheduleBatch, SlotJoin
from tests.doubles.late_stream import LateStream
from tests.doubles.strict_engine import DistinctPlaces, PlannedOnHost
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

PAGE_SIZE = 4
SLOTS = 5  # buckets 1, 2, 4, 5
PAGES = 40
HOST_PAGES = 12
CONTEXT_PAGES = 12
AHEAD_MAX = 9
LOOKS_MAX = 10_000  # for the end of a step or a copy; each may move the streams on
EOS = frozenset({3})
FAMILY = "qwen3, qk-norm, head_dim 40"


@dataclass(frozen=True)
class Wanted:
    """A request, and the tokens it should get."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: tuple[int, ...]


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


class LateModel:
    """A tiny model on disk and in memory, and some requests with their tokens."""

    def __init__(self, folder: Path, family: str = FAMILY) -> None:
        tiny_model(family, folder)
        found = read_model_config(folder)
        self.config: ModelConfig = found.at_context(found.context_len)
        self.folder = folder
        ops = host_platform_on(*_streams(random.Random(0))).ops
        with Weights(folder) as weights, torch.inference_mode():
            self.decoder = DecoderModel(
                self.config,
                weights,
                ops,
                context_len=CONTEXT_PAGES * PAGE_SIZE,
                dtype=torch.float32,
                attention=None,
            )
        self.requests = self._requests(random.Random(5))

    def _requests(self, drawn: random.Random) -> list[Wanted]:
        driver = Driver(self.folder, kernels="torch", page_size=PAGE_SIZE, pages=32, slots=4)
        common = tokens_of(99, 2 * PAGE_SIZE, VOCAB_SIZE)
        found = []
        for number in range(24):
            prompt = tokens_of(number, drawn.randint(1, 20), VOCAB_SIZE)
            if number % 3 == 0:
                prompt = common + prompt[:12]
            params, count = _params(drawn), drawn.randint(2, 16)
            join = driver.join(
                0, range(CONTEXT_PAGES), prompt_len=len(prompt), params=params, token_ids=prompt
            )
            driver.run(ForwardMode.EXTEND, joins=[join], extend=[ExtendRow(0, prompt, 0, True)])
            driver.decode([0], count - 1)
            found.append(Wanted(tuple(prompt), params, tuple(driver.tokens[0])))
        driver.close()
        return found


def _params(drawn: random.Random) -> SamplingParams:
    if drawn.random() < 0.3:
        return SamplingParams(max_new_tokens=64, seed=0, temperature=0.0)

    def some(value: Any, neutral: Any) -> Any:
        return value if drawn.random() < 0.3 else neutral

    return SamplingParams(
        max_new_tokens=64,
        seed=drawn.getrandbits(64) - 2**63,
        temperature=drawn.uniform(0.3, 1.5),
        top_p=some(drawn.uniform(0.2, 0.95), 1.0),
        top_k=some(drawn.randint(1, 50), 0),
        min_p=some(drawn.uniform(0.01, 0.3), 0.0),
        repetition_penalty=some(1.5, 1.0),
        frequency_penalty=some(0.9, 0.0),
        presence_penalty=some(0.9, 0.0),
        logit_bias=some({5: 3.0, 17: -100.0, 40: 2.0}, {}),
        min_new_tokens=some(8, 0),
        stop_token_ids=some((7, 9), ()),
    )


def _streams(drawn: random.Random) -> tuple[LateStream, LateStream]:
    beside: list[LateStream] = []
    return LateStream(drawn, beside), LateStream(drawn, beside)


class LateBench:
    """One device and one random schedule over it."""

    def __init__(self, model: LateModel, seed: int) -> None:
        self._random = drawn = random.Random(seed)
        forward, copies = _streams(drawn)
        platform = host_platform_on(forward, copies)
        self.cache = KVCache(
            model.config,
            pages=PAGES,
            page_size=PAGE_SIZE,
            host_pages=HOST_PAGES,
            known_pages=1,
            padding_pages=1,
            layout=KVLayout.KEYS_BY_TOKEN,
        )
        self.cache.store[:-1] = torch.nan  # what is read before it was written shows
        parts = EngineParts(
            model.decoder.run,
            PlannedOnHost(platform.attention(model.config, self.cache, SLOTS), forward),
            DistinctPlaces(),
            platform.ops,
            self.cache,
        )
        self.device = CudaDevice(parts, Capacity(SLOTS, CONTEXT_PAGES, 64, VOCAB_SIZE), forward, copies, EOS)
        self._waiting = [drawn.choice(model.requests) for _ in range(drawn.randint(6, 14))]
        self._running: list[LateRequest] = []
        self._free_slots = list(range(SLOTS))
        self._free_pages = list(range(PAGES))
        self._pending: dict[int, list[LateRequest]] = {}  # rows that sample, by step that was not waited for
        self._step = 0
        self._copy_id = 0
        self._ahead = drawn.randint(0, AHEAD_MAX)
        self.moves = self.retractions = self.reused = 0

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
            rows = []
            for request in unfinished:
                prompt = request.wanted.prompt
                size = self._random.choice((len(prompt), self._random.randint(1, len(prompt))))
                part = prompt[request.kv_len : request.kv_len + size]
                samples = request.kv_len + len(part) == len(prompt)
                rows.append(ExtendRow(request.slot, part, request.kv_len, samples))
                request.kv_len += len(part)
                request.launched += samples
            sampling = [request for request in unfinished if request.launched]
            self._launch(ForwardMode.EXTEND, sampling, unfinished, joins, extend=tuple(rows))
            joins = []
        return None

    def _decode(self, joins: list[SlotJoin]) -> None:
        ready = [request for request in self._running if not request.done]
        rows = self._random.sample(ready, self._random.randint(min(1, len(ready)), len(ready)))
        if not rows:
            if joins:
                self._launch(ForwardMode.PREBUILT, [], [], joins)
            return
        grants = []
        for request in rows:
            request.kv_len += 1
            request.launched += 1
            if request.kv_len > len(request.pages) * PAGE_SIZE:
                new = self._take(1)
                request.pages += new
                grants.append(PageGrant(request.slot, tuple(new)))
        slots = tuple(request.slot for request in rows)
        self._launch(ForwardMode.DECODE, rows, rows, joins, grants=tuple(grants), decode_slots=slots)

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
        self._pending[self._step] = list(sampling)
        for request in rows:
            request.last_step = self._step

    def _wait(self) -> None:
        step = min(self._pending)
        tokens = self.device.wait(step).token_ids
        for request, token in zip(self._pending.pop(step), tokens, strict=True):
            assert token == request.wanted.tokens[len(request.tokens)], f"step {step}, {request}"
            request.tokens.append(token)

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
