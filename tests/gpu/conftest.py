"""The GPU that these tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shared.engine.cuda.platform import Platform, cuda_platform, host_platform


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The first GPU; the test skips with the reason where torch finds none."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    built = torch.version.cuda
    reason = (
        f"torch is built for CUDA {built}, and finds no device" if built else "torch is built without CUDA"
    )
    pytest.skip(f"torch finds no GPU: {reason}")


@pytest.fixture(params=["cpu", "cuda"])
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    """What a device is built on: plain torch, which rehearses the test everywhere, and FlashInfer on the GPU."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    made = cuda_platform(deterministic=False) if request.param == "cuda" else host_platform(threads=1)
    yield made
    made.forward.close()
    made.copies.close()
