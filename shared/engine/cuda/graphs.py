"""DECODE as graphs: one for each bucket of batch sizes, captured at start, planned and replayed by step.

A step of n requests runs in the smallest bucket that holds them; the rows behind are padding: they belong to the
padding slot and read and write the padding page. What differs between steps lies in static arrays, which are filled
before the graph is replayed; attention is planned outside.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.attention.protocol import DecodeAttention, PagedBatch, StreamAttention
from shared.engine.cuda.counters import EAGER, DeviceCounters
from shared.engine.cuda.engine_parts import EngineParts
from shared.engine.cuda.slots import DeviceWords
from shared.engine.cuda.staging import Staging
from shared.engine.parallel.orders import Operation
from shared.engine.streams import Work

_SIZES = (1, 2, 4, *range(8, 33, 4), *range(40, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
_STEP_ABOVE = 128  # rows between larger buckets


def buckets_for(slots: int) -> list[int]:
    """Batch sizes to capture: all of them up to the last, which is `slots`."""
    sizes = [*_SIZES, *range(_SIZES[-1] + _STEP_ABOVE, slots, _STEP_ABOVE)]
    return [size for size in sizes if size < slots] + [slots]


@dataclass(frozen=True, slots=True)
class _Bucket:
    rows: int
    name: str  # in metrics
    attention: DecodeAttention
    work: Work  # run eagerly, or captured
    replay: Work


class DecodeGraphs:
    """The graphs of one device, and the static arrays that they read and write.

    The first words of staging are theirs: slots of the rows, then where each row's pages begin.
    """

    def __init__(
        self,
        parts: EngineParts,
        words: DeviceWords,
        staging: Staging,
        logits: Tensor,  # float32 [slots, vocab], out
        counters: DeviceCounters,
    ) -> None:
        self._stream = stream = parts.forward
        self._kernels = parts.kernels
        self._model = parts.model
        self._words = words
        self._staging = staging
        self._logits = logits
        self._page_size = parts.cache.page_size
        self._slots = self._padding_slot = len(logits)
        device, width = logits.device, words.page_tables.shape[1]
        with stream.on_host():  # on its stream: they are used there at once
            self._token_ids, self._positions, self._last_page_len = (
                torch.zeros(self._slots, dtype=torch.int32, device=device) for _ in range(3)
            )
            self._indices = torch.zeros(self._slots * width, dtype=torch.int32, device=device)
            self._request = torch.arange(self._slots + 1, dtype=torch.int32, device=device)
        self._sizes = buckets_for(self._slots)
        self._planned: tuple[int, bytes] | None = None
        self._fits = False
        self.counters = counters
        self._buckets = {size: self._capture(size, parts.attention) for size in reversed(self._sizes)}

    @staticmethod
    def fixed_words(slots: int) -> int:
        """Words of staging that every step has at the same place."""
        return 2 * slots + 1

    def forget_plan(self) -> None:
        """Another step was planned: all plans share one workspace."""
        self._planned = None

    def stage(
        self, slots: NDArray[np.int64], kv_lens: NDArray[np.int64], page_counts: NDArray[np.int64]
    ) -> Work:
        """Stage the rows and plan them; returns what computes their logits once staging is uploaded."""
        rows = len(slots)
        bucket = self._buckets[self._sizes[bisect_left(self._sizes, rows)]]
        padded, starts = self._fixed_words(bucket.rows)
        padded[:rows] = slots
        starts[0] = 0
        page_counts.cumsum(out=starts[1 : rows + 1])
        last_page_len = kv_lens - (page_counts - 1) * self._page_size
        if padding := bucket.rows - rows:  # a page with a token for each row
            padded[rows:] = self._padding_slot
            starts[rows + 1 :] = starts[rows] + np.arange(1, padding + 1)
            last_page_len = np.append(last_page_len, np.ones(padding, dtype=np.int64))
        self._staging.note(Operation.DECODE, bucket.rows, last_page_len)
        return self.planned(bucket.rows, last_page_len)

    def planned(self, rows: int, last_page_len: NDArray[np.signedinteger]) -> Work:
        """Plan a bucket whose words are staged; returns what computes its logits once staging is uploaded."""
        bucket, (_, starts) = self._buckets[rows], self._fixed_words(rows)
        if (plan := (rows, starts.tobytes())) != self._planned:
            self._fits = self._plan(bucket.attention, rows, last_page_len)
            self._planned = plan
        self.counters.graph_steps[bucket.name if self._fits else EAGER] += 1
        return bucket.replay if self._fits else bucket.work

    def _fixed_words(self, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Slots of the rows, and where the pages of each begin."""
        return self._staging.fixed(0, rows), self._staging.fixed(self._slots, rows + 1)

    def _plan(self, attention: DecodeAttention, rows: int, last_page_len: NDArray[np.signedinteger]) -> bool:
        """Plan what is staged."""
        starts, _ = self._staging.at(self._slots, rows + 1)
        with self._stream.on_host():
            return attention.plan(starts, torch.from_numpy(last_page_len.astype(np.int32)))

    def _capture(self, rows: int, attention: StreamAttention) -> _Bucket:
        """Run the bucket once with padding alone, then capture it."""
        batch = PagedBatch(
            page_size=self._page_size,
            qo_indptr=self._request[: rows + 1],
            kv_indptr=self._staging.device[self._slots : self._slots + rows + 1],
            kv_indices=self._indices,
            kv_last_page_len=self._last_page_len[:rows],
            batch_indices=self._request[:rows],
            positions=self._positions[:rows],
        )
        self._staging.begin()
        padded, starts = self._fixed_words(rows)
        padded[:], starts[:] = self._padding_slot, np.arange(rows + 1)
        with self._stream.on_host():
            planned = attention.for_decode(batch)
        self._plan(planned, rows, np.ones(rows, dtype=np.int32))
        work = partial(self._compute, batch, planned)
        self._staging.upload()
        self._stream.run(work)
        self._staging.end(self._stream.record())
        return _Bucket(rows, str(rows), planned, work, self._stream.capture(work))

    def _compute(self, batch: PagedBatch, attention: DecodeAttention) -> None:
        """The device's part of a step, up to the logits. Reads static arrays alone."""
        rows = len(batch.positions)
        token_ids = self._token_ids[:rows]
        self._kernels.prepare_decode(
            self._staging.device[:rows],
            batch.kv_indptr,
            self._words.page_tables,
            self._words.state,
            self._page_size,
            token_ids,
            batch.positions,
            batch.kv_last_page_len,
            batch.kv_indices,
        )
        self._model.run(token_ids, attention, None, self._logits[:rows])
