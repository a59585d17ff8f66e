"""A stream: an ordered queue of work that the device does while the host goes on.

`shared.engine.cuda.platform` is torch's. `host_stream` does the same work on a thread of the CPU, and tests do it as
late as a mark demands. Whatever a piece of work reads must stay as it is until a mark behind it has passed: that is the
whole contract of the engine, and why it reads staging buffers and state on the device alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

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
