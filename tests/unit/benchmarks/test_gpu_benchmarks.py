"""The benchmarks for GPUs run on CPU, so that minutes on a GPU go into measuring; and they skip without one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

TINY = ("--model", "tiny", "--device", "cuda-on-cpu", "--sequences", "3", "--longest", "20", "--pages", "100")


def run(module: str, *flags: str) -> str:
    """What it prints."""
    return subprocess.run(
        [sys.executable, "-m", module, *flags], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_sequences_are_served_by_hand_and_disaggregated() -> None:
    printed = run("tests.benchmarks.offline", *TINY)
    assert "3 sequences, 60 tokens in, 60 out" in printed
    assert len(re.findall(r"^(device alone|disaggregated): 60 tokens in", printed, re.MULTILINE)) == 4
    assert "decode step, batch 1" in printed


def test_attention_is_compared_by_layout() -> None:
    assert re.search(r"batch 2, .* ms .*, ratio \d", run("tests.benchmarks.attention", "--rehearse"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("module", ["tests.benchmarks.offline", "tests.benchmarks.attention"])
def test_without_a_gpu_they_say_so(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr == "skipped: torch finds no GPU\n"
