"""EXTEND as graphs: one for each bucket of tokens, captured at start, so that short prompts do not wait for launches.

A step of n tokens runs in the smallest bucket that holds them. Its first request is padding, and so are the requests
and the tokens behind those that are asked for: they read and write the padding page. What differs between steps lies
in attention's plan and in one static array, which one copy fills before the graph is replayed. A graph ends with what
the sampled tokens' logits are computed of; the logits follow eagerly, into the rows where they belong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.attention.protocol import ExtendAttention, PagedBatch
from shared.engine.cuda.counters import EAGER, DeviceCounters
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.staging import Staging, place_of
from shared.engine.parallel.orders import Operation
from shared.engine.streams import Work

REQUESTS = 16  # of a step, at most
# Keys of a request that a graph takes beside twice its tokens. It leaves them whole, and few tokens behind many keys
# would keep few processors busy.
KEYS_MAX = 2048
_SIZES = (16, 32, *range(64, 1024, 64), *range(1024, 2049, 128))
_SLOTS = REQUESTS + 1  # requests of a graph, the first one is padding


def token_buckets(most: int) -> list[int]:
    """Numbers of tokens to capture, none above `most`."""
    return [size for size in _SIZES if size <= most]


def static_words(tokens: int, pages: int) -> int:
    """Words of a step's array, for so many tokens and pages."""
    return 3 * tokens + REQUESTS + 2 * (_SLOTS + 1) + _SLOTS + pages


class _Views:
    """The parts of a step's array, int32."""

    def __init__(self, words: Tensor, tokens: int) -> None:
        sizes = [tokens, tokens, tokens, REQUESTS, _SLOTS + 1, _SLOTS + 1, _SLOTS]
        head, self.kv_indices = torch.split(words, [sum(sizes), len(words) - sum(sizes)])
        self.token_ids, self.batch_indices, self.positions, self.sampled, *rest = torch.split(head, sizes)
        self.qo_indptr, self.kv_indptr, self.kv_last_page_len = rest

    def batch(self, page_size: int) -> PagedBatch:
        """Name the arrays as attention takes them."""
        return PagedBatch(
            page_size=page_size,
            qo_indptr=self.qo_indptr,
            kv_indptr=self.kv_indptr,
            kv_indices=self.kv_indices,
            kv_last_page_len=self.kv_last_page_len,
            batch_indices=self.batch_indices,
            positions=self.positions,
        )


@dataclass(slots=True)
class _TokenBucket:
    tokens: int
    attention: ExtendAttention
    replay: Work
    found: tuple[Tensor, Tensor]  # of the last capture: hidden states and their stream, [REQUESTS, hidden]


class ExtendGraphs:
    """The graphs of one device, and the static array that they read."""

    def __init__(
        self, parts: EngineParts, staging: Staging, capacity: Capacity, counters: DeviceCounters
    ) -> None:
        """Capture them."""
        self._parts = parts
        self._stream = parts.forward
        self._staging = staging
        self._page_size = parts.cache.page_size
        self._padding_page = len(parts.cache.store) - 1
        self._counters = counters
        self._width = capacity.pages_per_slot
        self._sizes = token_buckets(min(capacity.graph_tokens, capacity.extend_tokens))
        self._buckets: dict[int, _TokenBucket] = {}
        if not self._sizes:
            return
        with self._stream.on_host():  # on its stream: it is used there at once
            words = static_words(self._sizes[-1], self._pages_max)
            self._words = torch.zeros(words, dtype=torch.int32, device=parts.cache.store.device)
        for size in reversed(self._sizes):
            if (bucket := self._capture(size)) is not None:
                self._buckets[size] = bucket
        self._sizes = sorted(self._buckets)

    @property
    def _pages_max(self) -> int:
        return REQUESTS * self._width + _SLOTS

    def stage(
        self,
        token_ids: Sequence[Sequence[int]],
        kv_lens: NDArray[np.int64],
        pages: Sequence[NDArray[np.int32]],
        at: NDArray[np.int32],
        logits: Tensor,
    ) -> Work | None:
        """Stage and plan a step as `Extends.stage_tokens` does; None if no graph holds it, with nothing staged."""
        query_lens = np.array([len(each) for each in token_ids], dtype=np.int64)
        total = int(query_lens.sum())
        if not self._holds(total, query_lens, kv_lens, len(at)):
            if self._sizes:
                self._counters.extend_graph_steps[EAGER] += 1
            return None
        size = self._sizes[bisect_left(self._sizes, total)]
        words = self._laid_out(size, token_ids, query_lens, kv_lens, pages, at)
        return self._staged(size, words, logits)

    def _holds(
        self, total: int, query_lens: NDArray[np.int64], kv_lens: NDArray[np.int64], sampled: int
    ) -> bool:
        return (
            bool(self._sizes)
            and total <= self._sizes[-1]
            and len(query_lens) <= REQUESTS
            and sampled <= REQUESTS
            and bool((kv_lens <= np.maximum(2 * query_lens, KEYS_MAX)).all())
        )

    def _laid_out(
        self,
        size: int,
        token_ids: Sequence[Sequence[int]],
        query_lens: NDArray[np.int64],
        kv_lens: NDArray[np.int64],
        pages: Sequence[NDArray[np.int32]],
        at: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """The array of a step, with its padding."""
        count, total = len(query_lens), int(query_lens.sum())
        counts = np.ones(_SLOTS, dtype=np.int64)
        counts[1 : count + 1] = [len(each) for each in pages]
        words = np.zeros(static_words(size, int(counts.sum())), dtype=np.int32)
        views = _Views(torch.from_numpy(words), size)
        part = {name: view.numpy() for name, view in vars(views).items()}
        part["token_ids"][:total] = np.fromiter(
            (token for each in token_ids for token in each), np.int32, total
        )
        part["batch_indices"][:total] = np.repeat(np.arange(1, count + 1), query_lens)
        ends = np.cumsum(query_lens)
        part["positions"][:total] = np.arange(total) - np.repeat(ends - kv_lens, query_lens)
        part["sampled"][: len(at)] = at
        part["qo_indptr"][2 : count + 2] = ends
        part["qo_indptr"][count + 2 :] = total
        part["kv_indptr"][1:] = np.cumsum(counts)
        part["kv_last_page_len"][:] = 1
        part["kv_last_page_len"][1 : count + 1] = (kv_lens - 1) % self._page_size + 1
        part["kv_indices"][:] = self._padding_page
        first, last = part["kv_indptr"][1], part["kv_indptr"][count + 1]
        part["kv_indices"][first:last] = np.concatenate(pages)
        return words

    def _staged(self, size: int, words: NDArray[np.int32], logits: Tensor) -> Work:
        _, staged = self._staging.put(words)
        first = place_of(logits) // logits.shape[1]
        self._staging.note(Operation.EXTEND_GRAPH, size, staged, len(words), len(logits), first)
        return self.planned(size, place_of(staged), len(words), logits)

    def planned(self, tokens: int, place: int, words: int, logits: Tensor) -> Work:
        """Plan a bucket whose array is staged at this place; returns what computes these rows of logits."""
        bucket, (on_host, staged) = self._buckets[tokens], self._staging.at(place, words)
        with self._stream.on_host():
            bucket.attention.plan(_Views(on_host, bucket.tokens).batch(self._page_size))
        self._counters.extend_graph_steps[str(bucket.tokens)] += 1
        return partial(self._run, bucket, staged, logits)

    def _run(self, bucket: _TokenBucket, staged: Tensor, logits: Tensor) -> None:
        """The device's part of a step."""
        self._fill(staged)
        bucket.replay()
        (x, residual), sampled = bucket.found, len(logits)
        self._parts.model.head(x[:sampled], residual[:sampled], logits)

    def _capture(self, size: int) -> _TokenBucket | None:
        """Run the bucket once with requests that share all tokens, in the padding page, then capture it.

        None: so few requests cannot have so many tokens, or attention has no graph.
        """
        lens = np.full(REQUESTS, size // REQUESTS, dtype=np.int64)
        lens[: size % REQUESTS] += 1
        # as many tokens as a context has whose last page may hold one alone: angles are known of no more
        if lens[0] > (self._width - 1) * self._page_size + 1:
            return None
        pages = [
            np.full(-(-int(each) // self._page_size), self._padding_page, dtype=np.int32) for each in lens
        ]
        none = np.zeros(0, dtype=np.int32)
        words = self._laid_out(size, [[0] * int(each) for each in lens], lens, lens, pages, none)
        views = _Views(self._words[: static_words(size, self._pages_max)], size)
        with self._stream.on_host():
            attention = self._parts.attention.for_extend(
                views.batch(self._page_size), self._width * self._page_size
            )
        if attention is None:
            return None
        bucket = _TokenBucket(size, attention, _nothing, (self._words, self._words))

        def work() -> None:
            bucket.found = self._parts.model.hidden(views.token_ids, attention, views.sampled)

        self._staging.begin()
        on_host, staged = self._staging.put(words)
        with self._stream.on_host():
            attention.plan(_Views(on_host, size).batch(self._page_size))
        self._staging.upload()
        self._stream.run(partial(self._fill, staged))
        self._stream.run(work)
        self._staging.end(self._stream.record())
        bucket.replay = self._stream.capture(work)
        return bucket

    def _fill(self, staged: Tensor) -> None:
        self._words[: len(staged)].copy_(staged)


def _nothing() -> None:
    return
