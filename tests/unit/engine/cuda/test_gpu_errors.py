"""What a user of a GPU meets is a sentence: no driver, a GPU too old, a model too large, a second worker on the GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.attention.flashinfer_package import (
    ARCHS_FILE,
    check_compiled_for,
    missing_kernels_named,
    runs_on,
)
from shared.engine.attention.flashinfer_workspace import Processors, float_workspace_bytes, workspace_bytes
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.dtypes import Dtypes
from shared.engine.checkpoint.model_config import parse_model_config
from shared.engine.config import Budget, EngineConfig
from shared.engine.cuda import platform
from shared.engine.cuda.kernels.step_kernels import ReferenceKernels
from shared.engine.cuda.memory import DeviceMemory, room_for
from shared.engine.model.torch_ops import TorchOps
from shared.primitives.errors import ConfigError, ModelError, StartError
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.engine.driver import Driver
from tests.unit.engine.tiny_models import tiny_model

GIB = 2**30
BIG = parse_model_config(PUBLISHED["Qwen3-14B"].config)
BF16 = Dtypes(torch.bfloat16, torch.bfloat16)
CONFIG = EngineConfig(None, 16, 256, host_fraction=0.25, budget=Budget(64 * GIB, "a test"))
H200 = DeviceMemory(total=140 * GIB, free=139 * GIB, workspace=lambda _config, _slots: GIB // 2)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plays a machine: this code asks torch alone."""

    def play(cuda: str | None, capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Quadro")
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")

    return play


def test_torch_without_cuda_is_named(found: Callable[..., None]) -> None:
    found(None, None)
    with pytest.raises(
        StartError, match=r"needs torch's build for CUDA, found .*: install segue-llm\[cuda\]"
    ):
        platform.find_gpu()


def test_a_missing_driver_is_named(found: Callable[..., None]) -> None:
    found("13.0", None)
    with pytest.raises(StartError, match=r"finds no GPU .* driver of 580 or newer"):
        platform.find_gpu()


def test_an_old_gpu_is_named(found: Callable[..., None]) -> None:
    found("13.0", (7, 0))
    with pytest.raises(ConfigError, match=r"need compute capability 7\.5, Quadro has 7\.0: use device cpu"):
        platform.find_gpu()
    found("13.0", (9, 0))
    assert platform.find_gpu() == (9, 0)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    "settings", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments : True"]
)
def test_memory_that_peers_cannot_read_is_refused(
    variable: str, settings: str, found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found("13.0", (9, 0))
    monkeypatch.setenv(variable, "expandable_segments:False")
    platform.find_gpu()
    monkeypatch.setenv(variable, settings)
    with pytest.raises(ConfigError, match=f"{variable} has expandable_segments"):
        platform.find_gpu()


def test_an_allocator_whose_memory_peers_cannot_read_is_refused(
    found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found("13.0", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(
        ConfigError, match=r"allocates by cudaMallocAsync.*leave backend out of PYTORCH_ALLOC_CONF"
    ):
        platform.find_gpu()


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((7, 5), False),
        ((8, 0), True),
        ((8, 6), True),
        ((9, 0), True),
        ((10, 3), True),
        ((11, 0), False),
        ((12, 1), True),
    ],
)
def test_a_gpu_that_the_image_has_no_code_for_is_named(
    tmp_path: Path, capability: tuple[int, int], runs: bool
) -> None:
    containerfile = (Path(__file__).parents[4] / "images/worker.Containerfile").read_text()
    [archs] = re.findall(r'^ARG CUDA_ARCHS="(.*)"$', containerfile, re.MULTILINE)
    check_compiled_for(capability, tmp_path)  # a folder that says nothing
    (tmp_path / ARCHS_FILE).write_text(archs)
    named = "{}.{}".format(*capability)
    expected = (
        nullcontext()
        if runs
        else pytest.raises(StartError, match=f"this GPU has compute capability {named}: build")
    )
    with expected:
        check_compiled_for(capability, tmp_path)


def test_code_for_one_gpu_alone_runs_on_that_one() -> None:
    assert runs_on("9.0a", (9, 0))
    assert not runs_on("10.0a", (10, 3))
    assert not runs_on("8.9", (8, 6))


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-14B"])
def test_attentions_workspace_is_what_its_plans_may_take(name: str) -> None:
    """Expected: the allocations of FlashInfer's DecodePlan and PrefillPlan, written out for an H200."""
    config = parse_model_config(PUBLISHED[name].config)
    group, h200 = config.heads // config.kv_heads, Processors(132, 9)
    places = 2 * 132 // config.kv_heads
    extend = config.heads * places * 128 * (128 + 1) * 4
    assert extend <= float_workspace_bytes(config, 1, h200) < extend + 2**24
    rows = 4096
    decode = config.heads * (-(-rows * group // 16) + rows - 1) * 16 * (128 + 1) * 4 if group > 3 else 0
    assert float_workspace_bytes(config, rows, h200) >= max(extend, decode)
    assert workspace_bytes(config, rows, h200) > float_workspace_bytes(config, rows, h200)


def test_memory_for_attention_grows_with_slots_and_is_reckoned() -> None:
    wide = replace(BIG, heads=64, kv_heads=8)
    memory = replace(H200, workspace=lambda config, slots: workspace_bytes(config, slots, Processors(132, 9)))
    reserved = [
        room_for(wide, BF16, replace(CONFIG, slots=slots), memory).memory["workspace"]
        for slots in (256, 1024)
    ]
    assert reserved[0] < 512 * 2**20 < reserved[1]


def test_pages_get_what_a_model_leaves_and_the_figures_are_told() -> None:
    room = room_for(BIG, BF16, CONFIG, H200)
    page = 40 * 2 * 8 * 16 * 128 * 2
    assert room.pages * page < 0.9 * 140 * GIB - GIB - 2 * BIG.parameters
    assert room.host_pages * page <= 32 * GIB
    for words in (
        "90% of the GPU's 140.00 GiB, less 1.00 GiB in use",
        "27.51 GiB of weights",
        "workspace",
        "logits",
    ):
        assert words in room.words


def test_a_second_worker_on_the_gpu_is_suspected() -> None:
    with pytest.raises(ModelError, match=r"is another worker on it\? Give each device_memory_share 0\.45"):
        room_for(BIG, BF16, CONFIG, replace(H200, free=20 * GIB))


def test_a_model_too_large_is_told_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"too little memory: 21\.00 GiB \(90% of .* 27\.51 GiB of weights"):
        room_for(BIG, BF16, CONFIG, DeviceMemory(24 * GIB, int(23.4 * GIB), H200.workspace))


def test_on_cpu_the_context_is_bounded_unless_it_is_asked_for() -> None:
    small = parse_model_config(PUBLISHED["Qwen3-0.6B"].config)
    sizes = replace(CONFIG, slots=2, budget=Budget(16 * GIB, "a test"))
    assert room_for(small, BF16, sizes, None).context_len == 512
    assert room_for(small, BF16, replace(sizes, context_len=700), None).context_len == 700


def test_kernels_that_are_not_in_the_image_are_named() -> None:
    class MissingJITCacheError(RuntimeError):
        """As FlashInfer's."""

    with (
        pytest.raises(
            StartError, match=r"not in the image \(no batch_decode\): build it with this architecture"
        ),
        missing_kernels_named(),
    ):
        raise MissingJITCacheError("no batch_decode\nand more")
    with pytest.raises(RuntimeError, match="another"), missing_kernels_named():
        raise RuntimeError("another")


def test_every_kernel_is_called_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first request with top_p would find out that a kernel is missing."""
    called: list[str] = []

    def watch(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any) -> Any:
            called.append(name)
            return real(*args)

        monkeypatch.setattr(owner, name, call)

    watched = [
        (ReferenceAttention, "plan_extend"),
        (ReferenceAttention, "for_decode"),
        (ReferenceKernels, "_choose_tokens"),
        (ReferenceKernels, "filter_rows"),
        *((TorchOps, name) for name in ("add_rms_norm", "silu_and_mul")),
    ]
    for owner, name in watched:
        watch(owner, name)
    tiny_model("mistral", tmp_path)
    Driver(tmp_path, device="cuda-on-cpu", slots=1).close()
    assert {name for _, name in watched} == set(called)
