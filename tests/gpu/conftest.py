"""The GPU that these tests need."""

from __future__ import annotations

import pytest
import torch


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
