"""What torch makes outside the streams of a device is made on a stream of its own, for which they do not wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shared.engine.cuda.host_stream import record_graph
from shared.engine.streams import Work
from tests.doubles.late_stream import LateStream
from tests.unit.engine.cuda import late_bench
from tests.unit.engine.cuda.late_bench import LateBench
from tests.unit.engine.late_requests import LateModel

FACTORIES: tuple[Callable[..., Tensor], ...] = (torch.zeros, torch.ones, torch.full, torch.arange)


def _rubbish(dtype: torch.dtype) -> int:
    return 251 if dtype is torch.uint8 else 2**30


class LateDefaultStream(TorchFunctionMode):
    """Tensors that are made outside `streams` hold rubbish until one of those is synchronized."""

    def __init__(self, streams: Iterable[LateStream]) -> None:
        super().__init__()
        self.streams = tuple(streams)
        self.late: list[tuple[Tensor, Tensor]] = []
        self.filled = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        inside = any(stream.planning or stream._busy for stream in self.streams)
        if func in FACTORIES and not inside:
            self.late.append((made, made.clone()))
            made.fill_(_rubbish(made.dtype))
        return made

    def catch_up(self) -> None:
        """All of it has run; what was written since stays."""
        with torch._C.DisableTorchFunction():
            for made, content in self.late:
                made.copy_(torch.where(made == _rubbish(made.dtype), content, made))
        self.filled += len(self.late)
        self.late.clear()


class WaitingStream(LateStream):
    """A late stream that waits for the default stream when it is synchronized, and never else."""

    default: LateDefaultStream

    def buffer(self, words: int) -> Tensor:
        with torch._C.DisableTorchFunction():  # on the host
            return super().buffer(words)

    def capture(self, work: Work) -> Work:
        self.advance(len(self._work))
        with self.on_host():
            return record_graph(work)

    def synchronize(self) -> None:
        self.default.catch_up()
        super().synchronize()


@pytest.mark.parametrize("seed", range(3))
def test_a_device_waits_for_all_that_it_did_not_make_on_its_stream(
    seed: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LateModel(tmp_path_factory.mktemp("model"))
    beside: list[LateStream] = []
    streams = [WaitingStream(random.Random(seed), beside) for _ in range(2)]
    default = LateDefaultStream(streams)
    for stream in streams:
        stream.default = default
    monkeypatch.setattr(late_bench, "_streams", lambda _: streams)
    with default:
        bench = LateBench(model, seed)
    assert default.filled > 3
    assert not default.late, "nobody waits for what was made last"
    bench.run()
