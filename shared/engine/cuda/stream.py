"""Torch's streams and events as `Stream` and `Mark`, and CUDA graphs. Has not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shared.engine.streams import Mark, Work


class CudaMark:
    """`Mark` by an event that lets the waiting thread sleep: a spinning one would take a core from the routers."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        """See `Mark`."""
        self.event.synchronize()

    def passed(self) -> bool:
        """See `Mark`."""
        try:
            return bool(self.event.query())
        except RuntimeError:  # a kernel failed
            return True

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark`."""
        assert isinstance(earlier, CudaMark)
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaStream:
    """`Stream` on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: Any = None  # the memory pool that captured graphs share

    def buffer(self, words: int) -> Tensor:
        """See `Stream`."""
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def run(self, work: Work) -> None:
        """See `Stream`."""
        with self.on_host():
            work()

    def upload(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        self.run(lambda: _copy(target, source))

    def download(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        self.run(lambda: _copy(target, source))

    def record(self) -> CudaMark:
        """See `Stream`."""
        return CudaMark(self._stream)

    def wait_for(self, mark: Mark) -> None:
        """See `Stream`."""
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """See `Stream`."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield

    def capture(self, work: Work) -> Work:
        """See `Stream`. The work must have run once before: libraries allocate and choose kernels at first use.

        Other threads may use the GPU meanwhile, such as those of a transfer.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            torch.inference_mode(),
            torch.cuda.graph(
                graph, pool=self._graphs, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            work()
        self._graphs = graph.pool()
        return graph.replay

    def synchronize(self) -> None:
        """See `Stream`."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """See `Stream`."""
        self._stream.synchronize()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
