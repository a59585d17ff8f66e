"""What a model asks of attention: plan once a step, attend once a layer; and the cap of scores that all apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from shared.engine.attention.paged import PagedBatch
from shared.engine.streams import Mark


class PlannedAttention(Protocol):
    """Attention of one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [rows, kv_heads, head_dim], then attend with q [rows, heads, head_dim]; shaped as q."""


class Attention(Protocol):
    """Attention of one model over one cache, in the memory that also plans: the CPU's."""

    def plan(self, batch: PagedBatch) -> PlannedAttention:
        """Everything about a step that all layers share."""


class DecodeAttention(PlannedAttention, Protocol):
    """Attention of DECODE steps of one batch size. `attend` is captured in a graph, `plan` is not."""

    def plan(self, kv_indptr: Tensor, kv_last_page_len: Tensor) -> bool:
        """Plan a step, on the host, before the graph is replayed: both int32 in pinned host memory, [rows + 1], [rows].

        They are copies of what the graph's own arrays will hold. False: the captured graph does not fit this plan, so
        the step must run eagerly.
        """


class StreamAttention(Protocol):
    """Attention that the host plans and a stream computes later. Nothing here waits for the stream.

    What a plan leaves in host memory is read later, so it may be rewritten only after the stream has copied it:
    whoever implements this guards its own buffers.
    """

    def plan_extend(self, host: PagedBatch, device: PagedBatch) -> PlannedAttention:
        """Plan an EXTEND step: the same arrays in pinned host memory, and where the stream will find them."""

    def for_decode(self, device: PagedBatch) -> DecodeAttention:
        """Attention over static arrays: one row a request; `kv_indices` is as long as it can ever be."""


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or x itself where there is no cap; float32 of any shape."""
    return x if cap is None else (x / cap).tanh() * cap


class PlanGuard:
    """`with guard:` around each plan: waits until the stream has copied the plan before. Mostly it long has.

    It guards host memory that a plan fills and a stream copies later: a plan for step N + 1 that is made while the copy
    for step N still waits in its stream would change what step N reads.
    """

    def __init__(self, record: Callable[[], Mark]) -> None:
        self._record = record
        self._copied: Mark | None = None

    def __enter__(self) -> None:
        if self._copied is not None:
            self._copied.wait()

    def __exit__(self, *_: object) -> None:
        self._copied = self._record()
