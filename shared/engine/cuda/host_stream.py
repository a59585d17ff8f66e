"""A stream on a thread of the CPU, and graphs as CUDA has them: the engine's whole path without a GPU.

For tests and rehearsals (`device: cuda-on-cpu`). Slow, but what it computes went through the same staging, state,
plans and graphs as on a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shared.engine.streams import Mark, Work


class HostMark:
    """`Mark` that the thread sets in passing."""

    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._reached = threading.Event()
        self._at = 0.0

    def reach(self) -> None:
        """The thread has come here."""
        self._at = time.monotonic()
        self._reached.set()

    def wait(self) -> None:
        """See `Mark`."""
        self._reached.wait()
        self._stream.raise_error()

    def passed(self) -> bool:
        """See `Mark`."""
        return self._reached.is_set()

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark`."""
        assert isinstance(earlier, HostMark)
        return self._at - earlier._at


class HostStream:
    """`Stream` on one thread. After an error nothing runs any more, and every mark raises it."""

    def __init__(self, threads: int) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(threads,), name="forward", daemon=True)
        self._thread.start()

    def buffer(self, words: int) -> Tensor:
        """See `Stream`."""
        return torch.zeros(words, dtype=torch.int32)

    def run(self, work: Work) -> None:
        """See `Stream`."""
        self._queue.put(lambda: self._do(work))

    def upload(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        self.run(lambda: _copy(target, source))

    def download(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        self.run(lambda: _copy(target, source))

    def record(self) -> HostMark:
        """See `Stream`."""
        mark = HostMark(self)
        self._queue.put(mark.reach)  # also after an error: whoever waits must wake
        return mark

    def wait_for(self, mark: Mark) -> None:
        """See `Stream`."""
        self.run(mark.wait)

    def on_host(self) -> AbstractContextManager[None]:
        """See `Stream`."""
        return nullcontext()

    def capture(self, work: Work) -> Work:
        """See `Stream`."""
        self.synchronize()
        return record_graph(work)

    def synchronize(self) -> None:
        """See `Stream`."""
        self.record().wait()

    def close(self) -> None:
        """See `Stream`."""
        self._queue.put(None)
        self._thread.join()

    def raise_error(self) -> None:
        """Raise what ended the work, if anything did."""
        if self._error is not None:
            raise self._error

    def _do(self, work: Work) -> None:
        if self._error is None:
            try:
                work()
            except BaseException as error:  # whatever it is, marks must raise it rather than hang
                self._error = error

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # OpenMP keeps this number per calling thread
        with torch.inference_mode():
            while (work := self._queue.get()) is not None:
                work()


def record_graph(work: Work) -> Work:
    """Do the work once and return what repeats its operations on the same memory, as a CUDA graph would.

    What the host looked at is frozen: a number stays what it was, a tensor stays the same memory.
    """
    recorder = _Recorder()
    with torch.inference_mode(), recorder:
        work()
    operations = recorder.operations

    def replay() -> None:
        for repeat in operations:
            repeat()

    return replay


def _refill(results: Sequence[Tensor], operation: Callable[[], Any]) -> None:
    """Do the operation once more; what it finds goes to the memory of its first results."""
    for result, again in zip(results, _tensors((operation(),)), strict=True):
        result.copy_(again)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every operation that computes; views need no repeating, since their memory is that of their base."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Callable[[], Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to skip it torch would import its compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS or _indexes_by_bool(func, args):
            raise RuntimeError(f"{func} looks at a value while a graph is captured")
        if func.namespace in _BACKGROUND:
            raise RuntimeError(f"{func} ends in the background, for which no graph waits")
        found, operation = func(*args, **kwargs), partial(func, *args, **kwargs)
        given = {_place(each) for each in _tensors((*args, *kwargs.values()))}
        every = list(_tensors((found,)))
        results = [each for each in every if _place(each) not in given]
        writes = any(alias is not None and alias.is_write for alias in _aliases(func))
        if (writes and results) or (not writes and not every):
            raise RuntimeError(
                f"{func} cannot be repeated: it should write what it is given, or return new tensors"
            )
        if writes:
            self.operations.append(operation)
        elif results:
            assert len(results) == len(every), f"{func} returns views beside results"
            self.operations.append(partial(_refill, results, operation))
        return found


# Operations of torch.distributed: what waits for them is no operation.
_BACKGROUND = {"c10d", "_c10d_functional"}
_LOOKS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
}


def _aliases(func: Any) -> list[Any]:
    """What arguments and results are views of: an operation that returns nothing may write its arguments."""
    return [each.alias_info for each in (*func._schema.arguments, *func._schema.returns)]


def _place(tensor: Tensor) -> int:
    """Where its memory is: a view has that of its base. The schema does not tell which results are views.

    `reshape` gives one only where it can.
    """
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _indexes_by_bool(func: Any, args: tuple[Any, ...]) -> bool:
    """The number of results would depend on values."""
    if func.overloadpacket not in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        return False
    return any(index is not None and index.dtype is torch.bool for index in args[1])


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
