"""What a user of a GPU meets is a sentence: no driver, a GPU too old, a model too large, a second worker on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.attention.reference import ReferenceAttention
from shared.engine.cuda import gpu
from shared.engine.cuda.memory import DeviceMemory, room_for
from shared.engine.cuda.reference import ReferenceKernels
from shared.engine.dtypes import Dtypes
from shared.engine.flashinfer_package import missing_kernels_named
from shared.engine.memory_plan import Budget
from shared.engine.model_config import parse_model_config
from shared.engine.parts import Sizes
from shared.engine.torch_ops import TorchOps
from shared.errors import ConfigError, ModelError, StartError
from tests.unit.engine.driver import Driver
from tests.unit.engine.published_models import PUBLISHED
from tests.unit.engine.tiny_models import tiny_model

GIB = 2**30
BIG = parse_model_config(PUBLISHED["Qwen3-14B"].config)
BF16 = Dtypes(torch.bfloat16, torch.bfloat16)
SIZES = Sizes(None, 16, 256, host_fraction=0.25, budget=Budget(64 * GIB, "a test"))
H200 = DeviceMemory(total=140 * GIB, free=139 * GIB, workspace=GIB // 2)


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
    with pytest.raises(StartError, match=r"needs torch's build for CUDA, found .*: install segue\[cuda\]"):
        gpu.find_gpu()


def test_a_missing_driver_is_named(found: Callable[..., None]) -> None:
    found("13.0", None)
    with pytest.raises(StartError, match=r"finds no GPU .* driver of 580 or newer"):
        gpu.find_gpu()


def test_an_old_gpu_is_named(found: Callable[..., None]) -> None:
    found("13.0", (7, 0))
    with pytest.raises(ConfigError, match=r"need compute capability 7\.5, Quadro has 7\.0: use device cpu"):
        gpu.find_gpu()
    found("13.0", (9, 0))
    assert gpu.find_gpu() == (9, 0)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    "settings", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments : True"]
)
def test_memory_that_peers_cannot_read_is_refused(
    variable: str, settings: str, found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found("13.0", (9, 0))
    monkeypatch.setenv(variable, "expandable_segments:False")
    gpu.find_gpu()
    monkeypatch.setenv(variable, settings)
    with pytest.raises(ConfigError, match=f"{variable} has expandable_segments"):
        gpu.find_gpu()


def test_an_allocator_whose_memory_peers_cannot_read_is_refused(
    found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found("13.0", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(
        ConfigError, match=r"allocates by cudaMallocAsync.*leave backend out of PYTORCH_ALLOC_CONF"
    ):
        gpu.find_gpu()


def test_pages_get_what_a_model_leaves_and_the_figures_are_told() -> None:
    room = room_for(BIG, BF16, SIZES, H200)
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
        room_for(BIG, BF16, SIZES, replace(H200, free=20 * GIB))


def test_a_model_too_large_is_told_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"too little memory: 21\.00 GiB \(90% of .* 27\.51 GiB of weights"):
        room_for(BIG, BF16, SIZES, DeviceMemory(24 * GIB, int(23.4 * GIB), GIB // 2))


def test_on_cpu_the_context_is_bounded_unless_it_is_asked_for() -> None:
    small = parse_model_config(PUBLISHED["Qwen3-0.6B"].config)
    sizes = replace(SIZES, slots=2, budget=Budget(16 * GIB, "a test"))
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
        (ReferenceKernels, "choose_tokens"),
        *(
            (TorchOps, name)
            for name in ("top_k_floor", "top_p_floor", "add_rms_norm", "rotate", "silu_and_mul")
        ),
    ]
    for owner, name in watched:
        watch(owner, name)
    tiny_model("mistral", tmp_path)
    Driver(tmp_path, device="cuda-on-cpu", slots=1).close()
    assert {name for _, name in watched} == set(called)
