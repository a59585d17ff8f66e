"""Streams that are late on purpose: work runs only when somebody waits for a mark, in an order drawn from a seed.

What may be read late is thereby read late: a staging buffer, a plan or a result that is used again too early changes
tokens. Graphs are recorded operation by operation, so what the host knew at capture is frozen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.cuda.host_stream import record_graph
from shared.engine.streams import Mark, Work


@dataclass(frozen=True, slots=True)
class LateMark:
    """`Mark` behind the first `behind` pieces of work."""

    stream: LateStream
    behind: int

    def wait(self) -> None:
        """See `Mark`."""
        self.stream.advance(self.behind)

    def passed(self) -> bool:
        """See `Mark`. Sometimes the stream goes on a little."""
        self.stream.stir()
        return self.stream.done >= self.behind

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark`: a second for each piece of work."""
        assert isinstance(earlier, LateMark)
        return float(self.behind - earlier.behind)


class LateStream:
    """`Stream` that the test's own thread carries out. Streams with the same `random` work beside each other."""

    def __init__(self, drawn: random.Random, beside: list[LateStream]) -> None:
        """`beside`: all streams of one device; this one adds itself."""
        self._random = drawn
        self._work: list[Work] = []
        self._beside = beside
        self._busy = False
        self._error: BaseException | None = None
        self.done = 0
        self.planning = False  # within `on_host`
        beside.append(self)

    def buffer(self, words: int) -> Tensor:
        """See `Stream`."""
        return torch.zeros(words, dtype=torch.int32)

    def run(self, work: Work) -> None:
        """See `Stream`."""
        self._work.append(work)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        self.run(lambda: _copy(target, source))

    def download(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        self.run(lambda: _copy(target, source))

    def record(self) -> LateMark:
        """See `Stream`."""
        return LateMark(self, len(self._work))

    def wait_for(self, mark: Mark) -> None:
        """See `Stream`."""
        self.run(mark.wait)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """See `Stream`."""
        before, self.planning = self.planning, True
        yield
        self.planning = before

    def capture(self, work: Work) -> Work:
        """See `Stream`."""
        self.synchronize()
        return record_graph(work)

    def synchronize(self) -> None:
        """See `Stream`."""
        self.advance(len(self._work))

    def close(self) -> None:
        """See `Stream`."""
        self.synchronize()

    def advance(self, behind: int) -> None:
        """Work until so many pieces are done; the streams beside may work as well."""
        while self.done < behind:
            for other in self._beside:
                if other is not self and self._random.random() < 0.1:
                    other.step()
            if self.done < behind:  # another stream may have waited for this one
                self.step()
        if self._error is not None:
            raise self._error

    def stir(self) -> None:
        """Do a few pieces of work, or none."""
        for _ in range(self._random.choice((0, 0, 1, 3, 30))):
            self.step()

    def step(self) -> None:
        """Do the next piece of work, if there is one and none is being done: one may wait for another stream."""
        if self.done < len(self._work) and not self._busy:
            work, self._work[self.done] = self._work[self.done], _nothing
            self._busy = True
            try:
                if self._error is None:
                    with torch.inference_mode():
                        work()
            except BaseException as error:  # as on a GPU: from now on every mark raises it
                self._error = error
            self._busy = False
            self.done += 1


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _nothing() -> None:
    return
