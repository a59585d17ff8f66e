"""How many launches a step takes on a GPU, where each waits for a few microseconds of its host or of a graph.

A device is built of what runs there: the kernels of `step_kernels.cu` (compiled for this CPU), FlashInfer's functions
and attention as one launch each, and torch's operations, each of which is one. Views are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch, SlotJoin
from shared.engine.attention import reference
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts
from shared.engine.checkpoint.model_config import read_model_config
from shared.engine.cuda.counters import EAGER
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.kernels.step_kernels import SOURCE, CudaKernels
from shared.engine.cuda.platform import FlashInferOps
from shared.engine.model.loading import load_decoder
from shared.engine.model.ops import Head
from shared.engine.model.torch_ops import TorchOps
from shared.engine.model.weights import Weights
from shared.engine.streams import Work
from shared.wire.sampling_params import SamplingParams
from tests.unit.engine.cuda.kernels.host_kernels import HostLaunch, compile_for_host
from tests.unit.engine.cuda.test_launch_never_waits import InlineStream
from tests.unit.engine.driver import tokens_of
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES
from tests.unit.engine.experts.test_expert_operations import Launches
from tests.unit.engine.tiny_models import FAMILIES, VOCAB_SIZE, save_model

SLOTS, PAGE_SIZE, WIDTH, BUCKET = 3, 4, 32, 32
PLAIN = SamplingParams(max_new_tokens=64, seed=1, temperature=0.6)
FILTERED = SamplingParams(max_new_tokens=64, seed=1, temperature=0.6, top_k=20, top_p=0.95)
TOLD = SamplingParams(max_new_tokens=64, seed=1, temperature=0.6, logprobs=5)
PLAIN_TORCH = TorchOps()
LAYER = [
    "rmsnorm",
    "linear",
    "write_heads",
    "attention",
    "linear",
    "rmsnorm",
    "linear",
    "silu_and_mul",
    "linear",
]
CHOICE = ["highest_of_parts", "draw_of_parts", "choose_tokens"]
VIEWS = ("split_with_sizes", "unbind", "flatten")


class StepLaunches(Launches):  # type: ignore[no-untyped-call]
    """Also those of kernels that torch does not know, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._within = False
        self.copies: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._within:
            return func(*args, **(kwargs or {}))
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if self.names and self.names[-1] in VIEWS:
            self.names.pop()
        return found

    @contextmanager
    def as_one(self, *names: str) -> Iterator[None]:
        """What is computed within counts as these."""
        self.names += names
        outer, self._within = self._within, True
        yield
        self._within = outer


class CountedStream(InlineStream):
    """Counts what is copied and replayed as well."""

    def __init__(self, launches: StepLaunches) -> None:
        super().__init__(lambda: launches)
        self._launches = launches

    def upload(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        self._launches.copies.append("upload")
        super().upload(target, source)

    def download(self, target: Tensor, source: Tensor) -> None:
        """See `Stream`."""
        self._launches.copies.append("download")
        super().download(target, source)

    def capture(self, work: Work) -> Work:
        """See `Stream`."""
        captured = super().capture(work)

        def replay() -> None:
            self._launches.copies.append("replay")
            captured()

        return replay


class CountedOps(FlashInferOps):
    """Those of a GPU, FlashInfer's functions by torch; torch computes no products into float32 on a CPU."""

    def __init__(self, launches: StepLaunches) -> None:
        self._launches = launches

        def rmsnorm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
            with launches.as_one("rmsnorm"):
                return PLAIN_TORCH.rms_norm(x, weight, epsilon)

        def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
            with launches.as_one("rmsnorm"):
                residual += x
                x.copy_(PLAIN_TORCH.rms_norm(residual, weight, epsilon))

        def silu_and_mul(gate_up: Tensor) -> Tensor:
            with launches.as_one("silu_and_mul"):
                return PLAIN_TORCH.silu_and_mul(gate_up)

        functions = (rmsnorm, fused_add_rmsnorm, silu_and_mul)
        super().__init__(SimpleNamespace(**{each.__name__: each for each in functions}))

    def head(self, weight: Tensor) -> Head:
        """See `Ops`."""
        product = PLAIN_TORCH.head(weight)

        def counted(x: Tensor, logits: Tensor) -> Tensor:
            with self._launches.as_one("head"):
                return product(x, logits)

        return counted


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostLaunch:
    return HostLaunch(compile_for_host(SOURCE, tmp_path_factory.mktemp("kernels")))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> StepLaunches:
    """Heads are prepared and written by one launch (`head_kernels.cu`), and attention is another."""
    found = StepLaunches()
    attend = reference.ReferenceStep.attend

    def counted(*args: Any) -> Tensor:
        with found.as_one("write_heads", "attention"):
            return attend(*args)

    monkeypatch.setattr(reference.ReferenceStep, "attend", counted)
    return found


class Counting:
    """A device of three slots that have a prompt each."""

    def __init__(self, folder: Path, launch: HostLaunch, launches: StepLaunches) -> None:
        config, self.launches, self.step = read_model_config(folder), launches, 0

        def counted(name: str, blocks: int, threads: int, arguments: Any) -> None:
            launches.names.append(name)
            launch(name, blocks, threads, arguments)

        stream, ops = CountedStream(launches), CountedOps(launches)
        layout = KVLayout.KEYS_BY_TOKEN
        cache = KVCache(config, PageCounts(SLOTS * WIDTH, padding=1), page_size=PAGE_SIZE, layout=layout)
        with Weights(folder) as weights, torch.inference_mode():
            model = load_decoder(
                config.at_context(WIDTH * PAGE_SIZE),
                weights,
                ops,
                context_len=WIDTH * PAGE_SIZE,
                dtype=torch.float32,
            )
        attention = ReferenceAttention(config, cache, stream, SLOTS)
        parts = EngineParts(stream, stream, model, attention, CudaKernels(counted), ops, cache)
        capacity = Capacity(SLOTS, WIDTH, 3 * BUCKET, VOCAB_SIZE, graph_tokens=BUCKET)
        self.device, self.layers = CudaDevice(parts, capacity, frozenset({3})), config.layers

    def run(self, mode: ForwardMode, **batch: Any) -> list[str]:
        """Launch a step and wait for it; its launches."""
        self.step += 1
        self.launches.names, self.launches.copies = [], []
        self.device.launch(ScheduleBatch(self.step, mode, **batch))
        self.device.wait(self.step)
        return self.launches.names

    def extend(self, params: SamplingParams, tokens: int, slots: Sequence[int] = range(SLOTS)) -> list[str]:
        """So many tokens in each slot, as prompts."""
        pages = [tuple(range(slot * WIDTH, (slot + 1) * WIDTH)) for slot in range(SLOTS)]
        joins = tuple(SlotJoin(slot, pages[slot], 0, params, tokens) for slot in slots)
        rows = tuple(ExtendRow(slot, tokens_of(slot, tokens, VOCAB_SIZE), 0, True) for slot in slots)
        return self.run(ForwardMode.EXTEND, joins=joins, extend=rows)

    def decode(self, params: SamplingParams) -> list[str]:
        """A step that decodes in all slots, behind one that did."""
        self.extend(params, 9)
        self.run(ForwardMode.DECODE, decode_slots=range(SLOTS))
        return self.run(ForwardMode.DECODE, decode_slots=range(SLOTS))


@pytest.fixture
def dense(tmp_path: Path, kernels: HostLaunch, launches: StepLaunches) -> Counting:
    save_model(FAMILIES["qwen3, qk-norm, head_dim 40"], tmp_path)
    return Counting(tmp_path, kernels, launches)


def test_a_layer_takes_nine_launches_and_a_step_seven_more(dense: Counting) -> None:
    """But for what attention takes beside its kernel: FlashInfer adds one where it divides long contexts."""
    layers = LAYER * dense.layers
    assert dense.decode(PLAIN) == ["prepare_decode", "index_select", *layers, "rmsnorm", "head", *CHOICE]
    assert dense.launches.copies == ["upload", "replay", "download"]


def test_filters_add_one_launch_and_logprobs_two(dense: Counting) -> None:
    plain = dense.decode(PLAIN)
    assert dense.decode(FILTERED) == [*plain[:-3], "filter_rows", *CHOICE]
    assert dense.launches.copies == ["upload", "replay", "download"]
    assert dense.decode(TOLD) == [*plain, "index_select", "logprobs"]
    assert dense.launches.copies == ["upload", "replay", "download", "download"]


def test_a_layer_of_experts_takes_no_more_than_it_did(
    tmp_path: Path, kernels: HostLaunch, launches: StepLaunches
) -> None:
    """Routing and sorting are single operations of torch: a kernel for them would be the next thing to write."""
    save_model(EXPERT_FAMILIES["qwen3-moe, 3 of 9, normalized"], tmp_path)
    experts = Counting(tmp_path, kernels, launches)
    found = experts.decode(PLAIN)
    assert launches.copies == ["upload", "replay", "download"]
    assert found.count("_grouped_mm") == 2 * experts.layers
    assert len(found) <= 7 + 26 * experts.layers, found


def test_a_prompt_that_a_bucket_holds_is_a_graph(dense: Counting) -> None:
    fitting, above = BUCKET // SLOTS, BUCKET // SLOTS + 1
    dense.extend(PLAIN, fitting)
    assert dense.launches.copies == ["upload", "upload", "replay", "download"]
    assert dense.device.counters.extend_graph_steps == {str(BUCKET): 1, EAGER: 0}
    dense.extend(PLAIN, above)
    assert dense.launches.copies == ["upload", "upload", "download"]
    assert dense.device.counters.extend_graph_steps == {str(BUCKET): 1, EAGER: 1}
    few = dense.extend(PLAIN, 16, slots=[1])
    assert "replay" in dense.launches.copies
    assert dense.device.counters.extend_graph_steps["16"] == 1
    assert len(few) <= 12 + len(LAYER) * dense.layers
