"""The benchmarks for GPUs run on CPU, so that minutes on a GPU go into measuring; and they skip without one."""

from __future__ import annotations

import re
import subprocess
import sys
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.engine.config import EngineConfig
from shared.engine.cuda.loading import DecoderSource
from shared.engine.cuda.memory import DeviceMemory, FittedPool, room_for
from shared.engine.cuda.platform import Platform, host_platform
from tests.benchmarks.gpu import offline

TINY = ("--model", "tiny", "--device", "cuda-on-cpu", "--sequences", "3", "--longest", "20", "--pages", "100")


def run(module: str, *flags: str) -> str:
    """What it prints."""
    return subprocess.run(
        [sys.executable, "-m", module, *flags], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_sequences_are_served_by_hand_and_disaggregated() -> None:
    printed = run("tests.benchmarks.gpu.offline", *TINY)
    assert "3 sequences, 60 tokens in, 60 out" in printed
    lines = re.findall(r"^(device alone|device alone, .*|disaggregated): 60 tokens in", printed, re.MULTILINE)
    filtered = "device alone, top_k 20, top_p 0.95"
    assert lines == ["device alone"] * 2 + [filtered] * 2 + ["disaggregated"] * 2
    assert "decode step, batch 1" in printed


def test_attention_is_compared_by_layout() -> None:
    assert re.search(
        r"batch 2, .* ms .*, ratio \d.*; heads apart .* times",
        run("tests.benchmarks.gpu.attention", "--rehearse"),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("module", ["tests.benchmarks.gpu.offline", "tests.benchmarks.gpu.attention"])
def test_without_a_gpu_they_say_so(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr == "skipped: torch finds no GPU\n"


class SmallGpu:
    """140.4 GiB, of which whatever is loaded takes what it said it would."""

    total = int(140.4 * 2**30)

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.used = 0
        patch.setattr(offline, "assemble", self._assemble)
        patch.setattr(offline, "RandomWeights", lambda _device: None)
        patch.setattr(offline, "TwoWorkers", lambda *_: Idle())

    def platform(self) -> Platform:
        """As it is found now."""
        memory = DeviceMemory(self.total, self.total - self.used, lambda _config, _slots: 2**30)
        return replace(host_platform(1), capability=(9, 0), memory=memory)

    def _assemble(
        self, platform: Platform, source: DecoderSource, config: EngineConfig
    ) -> tuple[Any, Any, FittedPool]:
        room = room_for(source.shape, source.dtypes, config, platform.memory)
        assert room.pages * config.page_size > 100_000
        self.used += sum(size for kind, size in room.memory.items() if kind != "host_kv")
        return None, None, room


class Idle:
    """`TwoWorkers` without any work."""

    def measure(self, *_: object) -> str:
        return "nothing"

    def close(self) -> None:
        pass


@pytest.mark.parametrize("model", ["0.6B", "14B"])
def test_two_devices_fit_one_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SmallGpu(monkeypatch)
    config = offline.model_named(model)
    setting = offline.Setting(config, offline.workload(256, 1024, config.vocab_size), 4096, 0, 1)
    offline.on_two_devices(setting, gpu.platform)
    assert 0.8 * gpu.total < gpu.used < gpu.total


def test_what_one_part_has_loaded_is_gone_before_the_next_part(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[Any]] = []
    real = offline.load

    def load(*arguments: Any) -> offline.Loaded:
        made = real(*arguments)
        loaded.append(weakref.ref(made.cache.store))
        return made

    monkeypatch.setattr(offline, "load", load)
    config = offline.model_named("tiny")
    setting = offline.Setting(config, offline.workload(3, 20, config.vocab_size), 80, 100, 1)
    offline.on_one_device(setting, lambda: host_platform(1), {"alone"})
    offline.release(on_gpu=False)
    offline.on_two_devices(setting, lambda: host_platform(1))
    offline.release(on_gpu=False)
    assert [store() for store in loaded] == [None] * 3
