"""The five kernels around a step's layers that are Segue's own, and the layout of a slot's state that they share.

Implemented in torch below and by `CudaKernels` with `step_kernels.cu`, equal bit for bit but for the last of a logprob
and of the sums by which top_p ends: there a nucleus may end one value earlier or later.
No kernel looks at a value on the host; what they report is read here.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.cuda.kernels.compiled_kernels import Launch, compiled, prepare_kernel, run_kernel
from shared.engine.sampling.sampler import gumbel_noise, nucleus_floor, row_keys
from shared.engine.streams import Stream, Work
from shared.wire.sampled import TOP_LOGPROBS_MAX, TokenLogprobs, bounded_logprobs


class SlotWord(IntEnum):
    """Where a value lies in the state of a slot, int32 words. Floats are float32 by their bits."""

    KV_LEN = 0  # tokens in the cache
    LAST_TOKEN = 1  # the FutureMap: the input of the next DECODE step
    PROMPT_LEN = 2
    TEMPERATURE = 3  # float; 0 is greedy
    SEED = 4  # int64, in two words, the lower one first


STATE_WORDS = 8  # of a slot, 32 bytes


class ReportWord(IntEnum):
    """Where a value lies in the report of a token, int32 words. Floats are float64 by their bits."""

    LOGPROB = 0  # float, in two words
    RANK = 2
    TOP_IDS = 4  # of the likeliest tokens, `TOP_LOGPROBS_MAX`
    TOP_LOGPROBS = 24  # floats, in two words each


REPORT_WORDS = 64  # of a token
assert ReportWord.TOP_LOGPROBS + 2 * TOP_LOGPROBS_MAX == REPORT_WORDS


class StepKernels(Protocol):
    """Kernels around the layers. Slot `slots`, the last one, is padding: it stays empty."""

    def write_words(self, entries: Tensor, words: Tensor) -> None:
        """words[place] = word for entries int32 [n, 2] of (place, word); words is flat int32, no place comes twice."""

    def prepare_decode(
        self,
        slots: Tensor,  # int32 [rows]; padding rows name the padding slot
        kv_indptr: Tensor,  # int32 [rows + 1] where each row's pages begin in kv_indices
        page_tables: Tensor,  # int32 [slots + 1, width]
        state: Tensor,  # int32 [slots + 1, STATE_WORDS]
        page_size: int,
        token_ids: Tensor,  # int32 [rows], out: LAST_TOKEN
        positions: Tensor,  # int32 [rows], out: KV_LEN as it was; 0 for padding
        kv_last_page_len: Tensor,  # int32 [rows], out: position % page_size + 1
        kv_indices: Tensor,  # int32 [entries], out: kv_indptr[i + 1] - kv_indptr[i] pages of each row's table
    ) -> None:
        """Lay out a DECODE step and lengthen each slot, but the padding one, by one token."""

    def filter_rows(self, logits: Tensor, rows: Tensor, top_k: Tensor, factors: Tensor) -> None:
        """Set to -inf what top_k, top_p and min_p exclude from some rows of logits float32 [rows, vocab].

        rows and top_k int32 [n], top_k of the vocabulary for all tokens; factors float32 [3, n]: temperature above 0,
        top_p, and the logarithm of min_p. The shares are those of softmax(logits / temperature); top_p is of what top_k
        leaves, and equals of the last token stay. A row's result depends on nothing but the row; NaN counts as -inf.
        """

    def chooser(self, logits: Tensor, slots: Tensor, state: Tensor, tokens: Tensor) -> Work:
        """What chooses a token for each row, whenever it runs, into tokens int32 [rows] and LAST_TOKEN of its slot.

        logits float32 [rows, vocab], slots int32 [rows]. Temperature 0: the highest, the lowest id among equals. Else
        argmax((logit - highest) / temperature + gumbel(seed, KV_LEN - PROMPT_LEN, token)). A row's result depends on
        nothing but the row; -inf is never chosen. All choosers run on one stream.
        """

    def logprobs(
        self, logits: Tensor, rows: Tensor, token_ids: Tensor, tops: Tensor, reports: Tensor
    ) -> None:
        """How likely a token of some rows is among all, into reports int32 [n, REPORT_WORDS].

        logits float32 [rows, vocab]; rows, token_ids and tops int32 [n]: which row, which token, and how many of the
        likeliest to report as well, at most `TOP_LOGPROBS_MAX` and the vocabulary. The report of a row depends on
        nothing but the row. Words beyond `tops` are undefined.
        """


# ---- the kernels in plain torch, on any device -----------------------------------------------------------------------
# Shapes depend on no value, so a graph may capture it. A row that is drawn costs a hash for each token of the
# vocabulary in int64, several times over: right for tests and rehearsals, too slow to serve with.


class ReferenceKernels:
    """See `StepKernels`."""

    def write_words(self, entries: Tensor, words: Tensor) -> None:
        """See `StepKernels`."""
        words.index_copy_(0, entries[:, 0].long(), entries[:, 1])

    def prepare_decode(
        self,
        slots: Tensor,
        kv_indptr: Tensor,
        page_tables: Tensor,
        state: Tensor,
        page_size: int,
        token_ids: Tensor,
        positions: Tensor,
        kv_last_page_len: Tensor,
        kv_indices: Tensor,
    ) -> None:
        """See `StepKernels`. Entries of `kv_indices` behind the last row's stay as they are."""
        at = slots.long()
        real = slots != len(state) - 1
        kv_lens = state[at, SlotWord.KV_LEN]
        token_ids.copy_(state[at, SlotWord.LAST_TOKEN])
        positions.copy_(kv_lens * real)
        kv_last_page_len.copy_(positions % page_size + 1)
        state[:, SlotWord.KV_LEN].index_copy_(0, at, kv_lens + real.int())
        entries = torch.arange(len(kv_indices), dtype=torch.int32, device=kv_indices.device)
        rows = torch.searchsorted(kv_indptr[1:], entries, right=True).clamp_(max=len(slots) - 1)
        places = (entries - kv_indptr[rows]).clamp_(max=page_tables.shape[1] - 1)
        pages = page_tables[at[rows], places.long()]
        kv_indices.copy_(torch.where(entries < kv_indptr[-1], pages, kv_indices))

    def filter_rows(self, logits: Tensor, rows: Tensor, top_k: Tensor, factors: Tensor) -> None:
        """See `StepKernels`."""
        temperature, top_p, log_min_p = factors
        found = logits.index_select(0, rows)
        found = torch.where(found.isnan(), -torch.inf, found)
        scaled = (found - found.amax(-1, keepdim=True)) / temperature.unsqueeze(1)
        ranked = scaled.sort(dim=-1, descending=True).values
        kth = ranked.gather(1, top_k.long().unsqueeze(1) - 1)
        shared = nucleus_floor(ranked.masked_fill_(ranked < kth, -torch.inf), top_p)
        floor = torch.maximum(torch.maximum(log_min_p, kth[:, 0]), shared)
        logits.index_copy_(0, rows.long(), found.masked_fill_(scaled < floor.unsqueeze(1), -torch.inf))

    def chooser(self, logits: Tensor, slots: Tensor, state: Tensor, tokens: Tensor) -> Work:
        """See `StepKernels`."""
        return partial(self._choose_tokens, logits, slots, state, tokens)

    def _choose_tokens(self, logits: Tensor, slots: Tensor, state: Tensor, tokens: Tensor) -> None:
        at = slots.long()
        own = state[at]  # [rows, STATE_WORDS]
        logits = torch.where(logits.isnan(), -torch.inf, logits)
        temperature = own[:, SlotWord.TEMPERATURE].view(torch.float32).unsqueeze(1)
        # Read as unsigned, the lower word is added to the upper one; the sum of both is the seed.
        seeds = (own[:, SlotWord.SEED].long() & 0xFFFFFFFF) + (own[:, SlotWord.SEED + 1].long() << 32)
        keys = row_keys(seeds, (own[:, SlotWord.KV_LEN] - own[:, SlotWord.PROMPT_LEN]).long())
        noise = gumbel_noise(keys.unsqueeze(1), torch.arange(logits.shape[1], device=logits.device))
        drawn = (logits - logits.amax(-1, keepdim=True)) / temperature + noise
        drawn = torch.where(drawn.isnan(), -torch.inf, drawn)
        tokens.copy_(torch.where(temperature > 0, drawn, logits).argmax(-1))
        real = slots != len(state) - 1
        state[:, SlotWord.LAST_TOKEN].index_copy_(
            0, at, torch.where(real, tokens, own[:, SlotWord.LAST_TOKEN])
        )

    def logprobs(
        self, logits: Tensor, rows: Tensor, token_ids: Tensor, tops: Tensor, reports: Tensor
    ) -> None:
        """See `StepKernels`. One by one, because torch adds up a row of many in another order."""
        del tops  # all are reported
        for at in range(len(rows)):
            found = logits.index_select(0, rows[at : at + 1])[0].double()
            found = torch.where(found.isnan(), -torch.inf, found)
            chosen = found.index_select(0, token_ids[at : at + 1])
            total = found.amax() + (found - found.amax()).exp().sum().log()
            values, ids = found.sort(descending=True, stable=True)
            count = min(TOP_LOGPROBS_MAX, len(ids))
            own = reports[at]
            own[ReportWord.LOGPROB : ReportWord.RANK].copy_((chosen - total).view(torch.int32))
            own[ReportWord.RANK : ReportWord.RANK + 1].copy_((found > chosen).sum() + 1)
            own[ReportWord.TOP_IDS : ReportWord.TOP_IDS + count].copy_(ids[:count])
            top = own[ReportWord.TOP_LOGPROBS : ReportWord.TOP_LOGPROBS + 2 * count]
            top.copy_((values[:count] - total).view(torch.int32))


# ---- reports of tokens, on their way to the host ---------------------------------------------------------------------
class ReportBuffers:
    """Words of up to `tokens` tokens on the device, and buffers on the host. Allocated when needed first."""

    def __init__(self, stream: Stream, tokens: int, device: torch.device):
        self._stream = stream
        self._tokens = tokens
        self._device = device
        self._words: Tensor | None = None
        self._free: list[Tensor] = []

    def on_device(self, count: int, first: int = 0) -> Tensor:
        """Where kernels write of `count` tokens, int32 [count, REPORT_WORDS]. Steps follow each other there."""
        if self._words is None:
            with self._stream.on_host():  # on its stream: it is used there at once
                self._words = torch.zeros(self._tokens, REPORT_WORDS, dtype=torch.int32, device=self._device)
        return self._words[first : first + count]

    def download(self, count: int) -> Tensor:
        """Bring the first `count` to a buffer of the host, which is the caller's until it is given back."""
        buffer = self._free.pop() if self._free else self._stream.buffer(self._tokens * REPORT_WORDS)
        words = self.on_device(count)
        self._stream.download(buffer[: words.numel()].view(words.shape), words)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """A buffer that has been read."""
        self._free.append(buffer)


def read_reports(buffer: Tensor, tops: list[int], vocab_size: int) -> list[TokenLogprobs]:
    """What was reported of the first tokens in a buffer; `tops`: of each, how many of the likeliest were asked for."""
    words: NDArray[np.int32] = buffer.view(-1)[: len(tops) * REPORT_WORDS].numpy().reshape(-1, REPORT_WORDS)
    return [_read_one(own, min(top, vocab_size)) for own, top in zip(words, tops, strict=True)]


def _read_one(own: NDArray[np.int32], top: int) -> TokenLogprobs:
    (logprob,) = own[ReportWord.LOGPROB : ReportWord.RANK].view(np.float64).tolist()
    ids = own[ReportWord.TOP_IDS : ReportWord.TOP_IDS + TOP_LOGPROBS_MAX].tolist()
    logprobs = own[ReportWord.TOP_LOGPROBS :].view(np.float64).tolist()
    return bounded_logprobs(logprob, int(own[ReportWord.RANK]), zip(ids[:top], logprobs[:top], strict=True))


# ---- `StepKernels` by `step_kernels.cu` ----------------------------------------------------------------------------
SOURCE = Path(__file__).with_name("step_kernels.cu")
_ROW_THREADS = 1024  # a row of logits is long
_PARTS_MAX = 32  # blocks of a row
_BEST_WORDS = 2  # a logit and its token
_CHOOSE_THREADS = 32
_PREPARE_THREADS = 128
_WRITE_THREADS = 256


class CudaKernels:
    """See `StepKernels`. All tensors are contiguous, but rows of `logits` and `page_tables` may lie apart."""

    def __init__(self, launch: Launch, row_blocks: int = 1) -> None:
        """`row_blocks`: blocks of `_ROW_THREADS` that the GPU runs at a time; few rows are divided among so many."""
        self._launch = launch
        self._row_blocks = row_blocks
        self._best: Tensor | None = None

    @classmethod
    def compiled(cls, device: torch.device) -> CudaKernels:
        """Compiled for this GPU. Raises `StartError` if they cannot be."""
        gpu = torch.cuda.get_device_properties(device)
        blocks = gpu.max_threads_per_multi_processor // _ROW_THREADS * gpu.multi_processor_count
        return cls(compiled(SOURCE, device), blocks)

    def write_words(self, entries: Tensor, words: Tensor) -> None:
        """See `StepKernels`."""
        count = len(entries)
        if count == 0:  # CUDA refuses a launch of no blocks
            return
        blocks = (count - 1) // _WRITE_THREADS + 1
        run_kernel(self._launch, "write_words", blocks, _WRITE_THREADS, entries, ctypes.c_int(count), words)

    def prepare_decode(
        self,
        slots: Tensor,
        kv_indptr: Tensor,
        page_tables: Tensor,
        state: Tensor,
        page_size: int,
        token_ids: Tensor,
        positions: Tensor,
        kv_last_page_len: Tensor,
        kv_indices: Tensor,
    ) -> None:
        """See `StepKernels`."""
        run_kernel(
            self._launch,
            "prepare_decode",
            len(slots),
            _PREPARE_THREADS,
            slots,
            kv_indptr,
            page_tables,
            ctypes.c_longlong(page_tables.stride(0)),
            state,
            ctypes.c_int(len(state) - 1),
            ctypes.c_int(page_size),
            token_ids,
            positions,
            kv_last_page_len,
            kv_indices,
        )

    def filter_rows(self, logits: Tensor, rows: Tensor, top_k: Tensor, factors: Tensor) -> None:
        """See `StepKernels`."""
        assert logits.dtype == factors.dtype == torch.float32
        assert logits.stride(1) == 1
        temperature, top_p, log_min_p = factors
        of_rows = (logits, ctypes.c_longlong(logits.stride(0)), ctypes.c_int(logits.shape[1]))
        asked = (rows, top_k, temperature, top_p, log_min_p)
        run_kernel(self._launch, "filter_rows", len(rows), _ROW_THREADS, *of_rows, *asked)

    def chooser(self, logits: Tensor, slots: Tensor, state: Tensor, tokens: Tensor) -> Work:
        """See `StepKernels`."""
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        assert state.shape[1] == STATE_WORDS
        rows, vocab_size = logits.shape[0], logits.shape[1]
        parts = max(1, min(self._row_blocks // max(rows, 1), _PARTS_MAX))
        of_rows = (logits, ctypes.c_longlong(logits.stride(0)), ctypes.c_int(vocab_size), ctypes.c_int(parts))
        highest, drawn = self._best_of_parts(max(rows, len(state)), logits.device)
        find_highest = prepare_kernel(
            self._launch, "highest_of_parts", rows * parts, _ROW_THREADS, *of_rows, highest
        )
        draw = prepare_kernel(
            self._launch, "draw_of_parts", rows * parts, _ROW_THREADS, *of_rows, slots, state, highest, drawn
        )
        choose = prepare_kernel(
            self._launch,
            "choose_tokens",
            (rows - 1) // _CHOOSE_THREADS + 1,
            _CHOOSE_THREADS,
            ctypes.c_int(rows),
            ctypes.c_int(parts),
            highest,
            drawn,
            slots,
            ctypes.c_int(len(state) - 1),
            state,
            tokens,
        )
        return partial(_in_turn, find_highest, draw, choose)

    def _best_of_parts(self, rows: int, device: torch.device) -> Tensor:
        """What parts of rows found, for all choosers, int32 [2, parts, _BEST_WORDS]: one runs behind the other."""
        parts = max(rows, self._row_blocks)
        if self._best is None or self._best.shape[1] < parts:
            self._best = torch.empty(2, parts, _BEST_WORDS, dtype=torch.int32, device=device)
        return self._best

    def logprobs(
        self, logits: Tensor, rows: Tensor, token_ids: Tensor, tops: Tensor, reports: Tensor
    ) -> None:
        """See `StepKernels`."""
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        assert reports.shape[1] == REPORT_WORDS
        run_kernel(
            self._launch,
            "logprobs",
            len(rows),
            _ROW_THREADS,
            logits,
            ctypes.c_longlong(logits.stride(0)),
            ctypes.c_int(logits.shape[1]),
            rows,
            token_ids,
            tops,
            reports,
        )


def _in_turn(*launches: Work) -> None:
    for launch in launches:
        launch()
