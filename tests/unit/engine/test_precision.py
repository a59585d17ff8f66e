"""In narrow types every family stays as near to float32 as transformers does, and in float32 it is the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.engine.model.torch_ops import TorchOps
from tests.unit.engine.driver import tokens_of
from tests.unit.engine.precision import errors, logits_of
from tests.unit.engine.tiny_models import FAMILIES, GPU_FAMILIES, VOCAB_SIZE, tiny_model

TOKENS = tokens_of(7, 200, VOCAB_SIZE)  # more than any window
STEPS = (50, 1, 33, 107, 1, 1, 7)  # chunks and single tokens
RELATIVE_GAP_MAX = 1e-5  # measured: 2e-6
NARROW = [(family, torch.bfloat16) for family in FAMILIES | GPU_FAMILIES] + [
    (family, torch.float16) for family in GPU_FAMILIES
]


@pytest.mark.parametrize(("family", "dtype"), NARROW, ids=str)
def test_the_error_is_that_of_transformers_in_the_same_type(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_model(family, tmp_path)
    found = logits_of(tmp_path, TOKENS, STEPS, TorchOps(), dtype=dtype)
    ours, theirs = errors(tmp_path, TOKENS, found, dtype)
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_in_float32_it_is_the_model_of_transformers(family: str, tmp_path: Path) -> None:
    tiny_model(family, tmp_path)
    found = logits_of(tmp_path, TOKENS, STEPS, TorchOps(), dtype=torch.float32)
    gap, none = errors(tmp_path, TOKENS, found, torch.float32)
    assert gap <= RELATIVE_GAP_MAX * float(found.square().mean().sqrt())
    assert none == 0
