"""Reports of kernels about tokens, on their way to the host: `step_kernels.ReportWord`, read as `TokenLogprobs`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.cuda.step_kernels import REPORT_WORDS, ReportWord
from shared.engine.streams import Stream
from shared.wire.sampled import TOP_LOGPROBS_MAX, TokenLogprobs, bounded_logprobs


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
