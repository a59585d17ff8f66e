"""Neither part of a launch looks at a value of the device.

The device's part runs at once under a mode that forbids it. The host's part runs with all of the device's memory on
torch's meta device, which has shapes and no values, so there is nothing to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode, PageGrant, ScheduleBatch, SlotJoin
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts
from shared.engine.checkpoint.model_config import read_model_config
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.kernels.step_kernels import ReferenceKernels
from shared.engine.model.loading import load_decoder
from shared.engine.model.torch_ops import TorchOps
from shared.engine.model.weights import Weights
from shared.engine.quantized.weight_source import Part
from shared.engine.streams import Mark, Work
from shared.wire.sampling_params import SamplingParams
from tests.doubles.no_sync import HostSyncError, no_sync
from tests.unit.engine.driver import tokens_of
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

SLOTS, PAGE_SIZE, WIDTH = 3, 4, 16
EVERYTHING = SamplingParams(
    max_new_tokens=64,
    seed=1,
    top_p=0.8,
    top_k=20,
    min_p=0.05,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    presence_penalty=0.5,
    logit_bias={5: 3.0},
    min_new_tokens=4,
    logprobs=5,
    prompt_logprobs=2,
    allowed_token_ids=tuple(range(40)),
)


class PassedMark:
    """`Mark` of a stream that is never late."""

    def wait(self) -> None:
        """See `Mark`."""

    def passed(self) -> bool:
        """See `Mark`."""
        return True

    def seconds_since(self, _earlier: Mark) -> float:
        """See `Mark`."""
        return 0.0


class InlineStream:
    """`Stream` that works at once, as the launches of a GPU look to the host."""

    def __init__(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._around = around

    def buffer(self, words: int) -> Tensor:
        """See `Stream`."""
        return torch.zeros(words, dtype=torch.int32)

    def run(self, work: Work) -> None:
        """See `Stream`."""
        with torch.inference_mode(), self._around():
            work()

    def upload(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        target.copy_(source)

    def download(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`. Nothing comes from a device without values."""
        if not source.is_meta:
            target.copy_(source)

    def record(self) -> PassedMark:
        """See `Stream`."""
        return PassedMark()

    def wait_for(self, mark: Mark) -> None:
        """See `Stream`."""

    def on_host(self) -> AbstractContextManager[None]:
        """See `Stream`."""
        return nullcontext()

    def capture(self, work: Work) -> Work:
        """See `Stream`."""
        self.run(work)
        return work

    def synchronize(self) -> None:
        """See `Stream`."""

    def close(self) -> None:
        """See `Stream`."""


def device_on(where: str, folder: Path, stream: InlineStream) -> CudaDevice:
    config = read_model_config(folder)
    cache = KVCache(
        config,
        PageCounts(64, padding=1),
        page_size=PAGE_SIZE,
        layout=KVLayout.KEYS_BY_TOKEN,
        device=where,
    )
    ops = TorchOps()
    with Weights(folder) as weights, torch.inference_mode():
        model = load_decoder(
            config,
            _Moved(weights, where),
            ops,
            context_len=WIDTH * PAGE_SIZE,
            dtype=torch.float32,
        )
    attention = ReferenceAttention(config, cache, stream, SLOTS)
    parts = EngineParts(stream, stream, model, attention, ReferenceKernels(), ops, cache)
    return CudaDevice(parts, Capacity(SLOTS, WIDTH, 64, VOCAB_SIZE, graph_tokens=32), frozenset({3}))


class _Moved:
    """`WeightSource`: the shapes of a folder's weights on another device."""

    def __init__(self, weights: Weights, where: str) -> None:
        self._weights = weights
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """See `WeightSource`."""
        return self._weights.take(name, shape, dtype, part).to(self._where)


def serve_a_little(device: CudaDevice) -> None:
    """Prompts in chunks, joins beside others, grants, copies, and rows that ask for all there is."""
    prompts = [tokens_of(slot, 9, VOCAB_SIZE) for slot in range(SLOTS)]
    joins = tuple(
        SlotJoin(slot, tuple(range(8 * slot, 8 * slot + 3)), 0, EVERYTHING, 9, prompts[slot])
        for slot in range(SLOTS)
    )
    chunks = tuple(ExtendRow(slot, prompts[slot][:5], 0, False, prompts[slot][1:6]) for slot in range(SLOTS))
    rests = tuple(ExtendRow(slot, prompts[slot][5:], 5, True, prompts[slot][6:]) for slot in range(SLOTS))
    batches = [
        ScheduleBatch(1, ForwardMode.EXTEND, joins, extend=chunks),
        ScheduleBatch(2, ForwardMode.EXTEND, extend=rests),
    ]
    grants = tuple(PageGrant(slot, (8 * slot + 3,)) for slot in range(SLOTS))
    for step in range(3, 8):
        given = grants if step == 5 else ()
        batches.append(
            ScheduleBatch(step, ForwardMode.DECODE, grants=given, decode_slots=range(1 + step % SLOTS))
        )
    joined = SlotJoin(2, (16, 17, 18), 0, EVERYTHING, 9, prompts[2])
    batches += [
        ScheduleBatch(8, ForwardMode.MIXED, (joined,), extend=chunks[2:], decode_slots=(0, 1)),
        ScheduleBatch(9, ForwardMode.MIXED, extend=rests[2:], decode_slots=(0,)),
    ]
    for batch in batches:
        device.launch(batch)
    assert device.completed() == len(batches)
    for batch in batches:
        assert len(device.wait(batch.step).token_ids) == sum(row.samples for row in batch.extend) + len(
            batch.decode_slots
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen3, qk-norm, head_dim 40", tmp_path)
    return tmp_path


def test_the_device_s_part_looks_at_no_value(folder: Path) -> None:
    serve_a_little(device_on("cpu", folder, InlineStream(no_sync)))


def test_the_host_s_part_looks_at_no_value_of_the_device(folder: Path) -> None:
    serve_a_little(device_on("meta", folder, InlineStream(nullcontext)))


@pytest.mark.parametrize(("where", "around"), [("cpu", no_sync), ("meta", nullcontext)])
def test_a_look_is_seen(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    around: Callable[[], AbstractContextManager[None]],
) -> None:
    real = ReferenceKernels.write_words

    def look(self: ReferenceKernels, entries: Tensor, words: Tensor) -> None:
        assert int(entries[0, 0]) >= 0
        real(self, entries, words)

    monkeypatch.setattr(ReferenceKernels, "write_words", look)
    device = device_on(where, folder, InlineStream(around))
    with pytest.raises(AssertionError):
        serve_a_little(device)
    with pytest.raises((HostSyncError, RuntimeError), match=r"item"):
        device.copies_done()
