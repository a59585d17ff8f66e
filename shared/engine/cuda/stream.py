"""A stream: an ordered queue of work that the device does while the host goes on.

`CudaStream` is torch's. `host_stream` does the same work on a thread of the CPU, and tests do it as late as a mark
demands. Whatever a piece of work reads must stay as it is until a mark behind it has passed: that is the whole contract
of the engine, and why it reads staging buffers and state on the device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], None]


class Mark(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Block until the stream has come here. Raises what work before it raised."""

    def passed(self) -> bool:
        """Whether the stream has come here, or failed before: then `wait` raises. From any thread."""

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds of the device between two marks that have passed."""


class Stream(Protocol):
    """All calls come from one thread."""

    def buffer(self, words: int) -> Tensor:
        """Zeroed int32 [words] in host memory that the device copies from and to by itself."""

    def run(self, work: Work) -> None:
        """Do the work after everything before it; on CUDA: launch its kernels."""

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy from a `buffer` to the device, when its turn comes."""

    def download(self, target: Tensor, source: Tensor) -> None:
        """Copy from the device to a `buffer`, when its turn comes."""

    def record(self) -> Mark:
        """A mark behind everything so far."""

    def wait_for(self, mark: Mark) -> None:
        """What comes later begins after this mark of another stream."""

    def on_host(self) -> AbstractContextManager[None]:
        """For work of the host that itself sends something to this stream, such as a plan of FlashInfer's."""

    def capture(self, work: Work) -> Work:
        """Do the work once to record its operations and their memory; the result repeats just these when it is run.

        A value that the host computed meanwhile is frozen in it. To repeat it, give it to `run`.
        """

    def synchronize(self) -> None:
        """Block until everything is done, of the whole device: on CUDA also copies that a transfer left behind."""

    def close(self) -> None:
        """Finish, and give up threads."""


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
        """See `Stream`. The work must have run once before: libraries allocate and choose kernels at first use."""
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._graphs, stream=self._stream):
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
