"""Parts of the CUDA engine in plain torch that also refuse what only a GPU would not forgive."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.engine.attention.protocol import (
    DecodeAttention,
    ExtendAttention,
    PagedBatch,
    PlannedAttention,
    StreamAttention,
)
from shared.engine.cuda.kernels.step_kernels import ReferenceKernels
from tests.doubles.late_stream import LateStream


class DistinctPlaces(ReferenceKernels):
    """`StepKernels` that writes no place twice: on a GPU nobody knows which of two words stays."""

    def write_words(self, entries: Tensor, words: Tensor) -> None:
        """See `StepKernels`."""
        places = entries[:, 0].tolist()
        assert len(set(places)) == len(places), "a place is written twice"
        super().write_words(entries, words)


@dataclass(frozen=True)
class PlannedOnHost:
    """`StreamAttention` that is only planned within `on_host`: a GPU's would send its plan to another stream."""

    attention: StreamAttention
    stream: LateStream

    def plan_extend(self, host: PagedBatch, device: PagedBatch) -> PlannedAttention:
        """See `StreamAttention`."""
        assert self.stream.planning
        return self.attention.plan_extend(host, device)

    def for_extend(self, device: PagedBatch, tokens: int) -> ExtendAttention | None:
        """See `StreamAttention`."""
        assert self.stream.planning
        extend = self.attention.for_extend(device, tokens)
        assert extend is not None
        real = extend.plan

        def plan(host: PagedBatch) -> None:
            assert self.stream.planning
            real(host)

        extend.plan = plan  # type: ignore[method-assign]
        return extend

    def for_decode(self, device: PagedBatch) -> DecodeAttention:
        """See `StreamAttention`."""
        assert self.stream.planning
        decode = self.attention.for_decode(device)
        real = decode.plan

        def plan(kv_indptr: Tensor, kv_last_page_len: Tensor) -> bool:
            assert self.stream.planning
            return real(kv_indptr, kv_last_page_len)

        decode.plan = plan  # type: ignore[method-assign]
        return decode
