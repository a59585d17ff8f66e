"""The four things of a step that no library does, and the layout of a slot's state that they share.

Implemented by `reference` in torch and by `kernels` with `step_kernels.cu`, equal bit for bit but for the last of a
logprob. Nothing here looks at a value on the host.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from torch import Tensor

from shared.wire.sampled import TOP_LOGPROBS_MAX


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

    def choose_tokens(self, logits: Tensor, slots: Tensor, state: Tensor, tokens: Tensor) -> None:
        """Choose a token for each row into tokens int32 [rows], and into LAST_TOKEN of its slot.

        logits float32 [rows, vocab], slots int32 [rows]. Temperature 0: the highest, the lowest id among equals. Else
        argmax((logit - highest) / temperature + gumbel(seed, KV_LEN - PROMPT_LEN, token)). A row's result depends on
        nothing but the row; -inf is never chosen.
        """

    def logprobs(
        self, logits: Tensor, rows: Tensor, token_ids: Tensor, tops: Tensor, reports: Tensor
    ) -> None:
        """How likely a token of some rows is among all, into reports int32 [n, REPORT_WORDS].

        logits float32 [rows, vocab]; rows, token_ids and tops int32 [n]: which row, which token, and how many of the
        likeliest to report as well, at most `TOP_LOGPROBS_MAX` and the vocabulary. The report of a row depends on
        nothing but the row. Words beyond `tops` are undefined.
        """
