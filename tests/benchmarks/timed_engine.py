"""The CUDA engine's device over a stream that computes nothing: what a step costs the host, and how long a GPU idles.

`CudaDevice` is the real one: mirror, staging, plans, graphs, marks, counters, and the arguments of its kernels. All of
the device's memory is on torch's meta device, which has shapes and no values. A replayed graph takes a fixed time, any
other piece of work none; as on CUDA, the thread that launches pays for putting it into the queue. This knows nothing of
what the driver and FlashInfer's plans cost the host: both count as 0.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from ctypes import Array, c_void_p
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform
from shared.engine.attention.protocol import PagedBatch
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.kernels.step_kernels import CudaKernels
from shared.engine.model.torch_ops import TorchOps
from shared.engine.streams import Mark, Work

VOCAB_SIZE = 10**9  # of the requests' words: logits on the meta device take no memory
TOKEN = 9  # what every row samples
_MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=64,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=64,
    context_len=2**20,
    rms_norm_eps=1e-6,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    windows=(None,),
    ropes=(None,),
    experts=(None,),
    attention_scale=0.125,
)


class HostClock(Protocol):
    """The host's."""

    def now(self) -> float:
        """Seconds."""

    def wait_until(self, when: float) -> None:
        """The host does nothing until then."""

    def pass_until(self, when: float) -> None:
        """The same on the stream's own thread."""


@dataclass(slots=True)
class TimedMark:
    """`Mark` that the stream's thread sets; its time is the stream's own, not that at which the thread woke."""

    clock: HostClock
    at: float
    ahead: threading.Lock  # held until the thread has come here: the cheapest thing to wait for

    def wait(self) -> None:
        """See `Mark`."""
        with self.ahead:
            pass
        self.clock.wait_until(self.at)

    def passed(self) -> bool:
        """See `Mark`."""
        return self.clock.now() >= self.at

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark`."""
        assert isinstance(earlier, TimedMark)
        return self.at - earlier.at


class TimedStream:
    """`Stream` on a thread of its own. Work that is queued begins as soon as what is before it ends, as on a GPU."""

    def __init__(self, clock: HostClock, graph_seconds: float) -> None:
        self.graphs = 0  # replayed
        self.idle_seconds = 0.0  # between two graphs
        self.free_at = clock.now()  # when the last graph ends
        self._clock = clock
        self._graph_seconds = graph_seconds
        self._queue: SimpleQueue[TimedMark | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="timed stream", daemon=True)
        self._thread.start()

    def buffer(self, words: int) -> Tensor:
        """See `Stream`."""
        return torch.zeros(words, dtype=torch.int32)

    def run(self, work: Work) -> None:
        """See `Stream`."""
        with torch.inference_mode():
            work()

    def upload(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        with torch.inference_mode():
            target.copy_(source)

    def download(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`. Nothing comes from a device without values."""
        assert source.is_meta
        target.fill_(TOKEN)

    def record(self) -> TimedMark:
        """See `Stream`."""
        mark = TimedMark(self._clock, max(self.free_at, self._clock.now()), threading.Lock())
        mark.ahead.acquire()
        self._queue.put(mark)
        return mark

    def wait_for(self, mark: Mark) -> None:
        """See `Stream`."""
        assert isinstance(mark, TimedMark)
        self.free_at = max(self.free_at, mark.at)

    def on_host(self) -> AbstractContextManager[None]:
        """See `Stream`."""
        return nullcontext()

    def capture(self, work: Work) -> Work:
        """See `Stream`."""
        self.run(work)
        return self._replay

    def synchronize(self) -> None:
        """See `Stream`."""
        self.record().wait()

    def close(self) -> None:
        """See `Stream`."""
        self._queue.put(None)
        self._thread.join()

    def _replay(self) -> None:
        begin = max(self.free_at, self._clock.now())
        self.graphs += 1
        self.idle_seconds += begin - self.free_at
        self.free_at = begin + self._graph_seconds

    def _work(self) -> None:
        while (mark := self._queue.get()) is not None:
            self._clock.pass_until(mark.at)
            mark.ahead.release()


class _NoAttention:
    """`StreamAttention` and `DecodeAttention`: plans nothing."""

    def plan_extend(self, host: PagedBatch, device: PagedBatch) -> _NoAttention:
        assert len(host.positions) == len(device.positions) == 1, (
            "a decode worker extends nothing but to warm up"
        )
        return self

    def for_extend(self, *_: object) -> None:
        return None

    def for_decode(self, device: PagedBatch) -> _NoAttention:
        del device
        return self

    def plan(self, kv_indptr: Tensor, kv_last_page_len: Tensor) -> bool:
        assert len(kv_indptr) == len(kv_last_page_len) + 1
        return True

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform) -> Tensor:
        del layer, k, v, transform
        return q


@dataclass(frozen=True)
class _NoModel:
    """`StreamModel`: computes nothing."""

    logits: Tensor

    def run(self, token_ids: Tensor, *_: object) -> Tensor:
        return self.logits[: len(token_ids)]

    def hidden(self, *_: object) -> tuple[Tensor, Tensor]:
        raise AssertionError("no graph of prompts is captured")

    def head(self, *_: object) -> Tensor:
        raise AssertionError("no graph of prompts is captured")


def timed_engine(
    clock: HostClock, rows: int, pages: int, page_size: int, context_len: int, step_seconds: float
) -> tuple[CudaDevice, TimedStream]:
    """A device of `rows` slots whose DECODE steps take a fixed time, and its stream of steps."""
    forward, copies = TimedStream(clock, step_seconds), TimedStream(clock, 0.0)
    cache = KVCache(
        _MODEL,
        PageCounts(pages, padding=1),
        page_size=page_size,
        layout=KVLayout.KEYS_BY_TOKEN,
        device="meta",
    )
    logits = torch.zeros(rows, VOCAB_SIZE, device="meta")

    parts = EngineParts(
        forward, copies, _NoModel(logits), _NoAttention(), CudaKernels(_launch), TorchOps(), cache
    )
    capacity = Capacity(rows, -(-context_len // page_size), 1, VOCAB_SIZE)
    return CudaDevice(parts, capacity, frozenset({0})), forward


def _launch(name: str, blocks: int, threads: int, arguments: Array[c_void_p]) -> None:
    """`Launch` of a kernel."""
    del name, blocks, threads, arguments
