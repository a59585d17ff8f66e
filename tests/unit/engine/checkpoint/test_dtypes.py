"""The types of weights and KV: what is chosen where nobody said, and what is refused before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.checkpoint.dtypes import Dtypes, dtype_name, dtypes_on_cpu, dtypes_on_cuda
from shared.engine.config import EngineConfig
from shared.engine.engine import load
from shared.engine.model.weights import Weights, stored_dtype
from shared.primitives.errors import ConfigError, ModelError
from tests.unit.engine.tiny_models import tiny_model

FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
HOPPER, TURING, PLAIN_TORCH = (9, 0), (7, 5), None


@pytest.mark.parametrize(
    ("capability", "stored", "weights"),
    [
        (HOPPER, BRAIN, BRAIN),
        (HOPPER, HALF, HALF),
        (HOPPER, FULL, BRAIN),
        ((8, 0), BRAIN, BRAIN),
        (TURING, BRAIN, HALF),
        (TURING, FULL, HALF),
        (PLAIN_TORCH, FULL, FULL),
        (PLAIN_TORCH, BRAIN, BRAIN),
        (PLAIN_TORCH, torch.float64, FULL),
    ],
)
def test_auto_on_cuda_is_what_is_stored_as_far_as_the_device_has_it(
    capability: tuple[int, int] | None, stored: torch.dtype, weights: torch.dtype
) -> None:
    found = dtypes_on_cuda("auto", "auto", stored=stored, capability=capability)
    assert found == Dtypes(weights, weights)
    same = dtypes_on_cuda(dtype_name(weights), dtype_name(weights), stored=stored, capability=capability)
    assert same == found


def test_a_chosen_type_wins_over_the_stored_one() -> None:
    assert dtypes_on_cuda("float16", "auto", stored=BRAIN, capability=HOPPER) == Dtypes(HALF, HALF)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "capability", "sentence"),
    [
        (
            "float32",
            "auto",
            HOPPER,
            "unsupported dtype: float32; supported on cuda are auto, bfloat16 and float16",
        ),
        (
            "bfloat16",
            "auto",
            TURING,
            "unsupported dtype: bfloat16; supported on a GPU of compute capability 7.5 (bfloat16 needs 8.0) are auto "
            "and float16",
        ),
        (
            "auto",
            "float16",
            HOPPER,
            "unsupported kv_cache_dtype: float16; supported on cuda are auto, bfloat16 and fp8_e4m3: attention reads "
            "bfloat16, the type of the weights, or 8 bits",
        ),
        (
            "int4",
            "auto",
            PLAIN_TORCH,
            "unsupported dtype: int4; supported on cuda-on-cpu are auto, bfloat16,",
        ),
    ],
)
def test_what_a_gpu_has_not_is_refused_in_one_sentence(
    dtype: str, kv_cache_dtype: str, capability: tuple[int, int] | None, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        dtypes_on_cuda(dtype, kv_cache_dtype, stored=BRAIN, capability=capability)
    assert str(caught.value).startswith(sentence)


def test_kv_has_8_bits_where_that_is_asked_for() -> None:
    eight = torch.float8_e4m3fn
    assert dtypes_on_cuda("auto", "fp8_e4m3", stored=BRAIN, capability=HOPPER) == Dtypes(BRAIN, eight)
    assert dtypes_on_cuda("auto", "fp8_e4m3", stored=FULL, capability=PLAIN_TORCH) == Dtypes(FULL, eight)
    with pytest.raises(
        ConfigError, match="unsupported dtype: fp8_e4m3; supported on cuda are auto, bfloat16 and"
    ):
        dtypes_on_cuda("fp8_e4m3", "auto", stored=BRAIN, capability=HOPPER)
    with pytest.raises(ConfigError, match="unsupported kv_cache_dtype: fp8_e4m3; supported on cpu are"):
        dtypes_on_cpu("auto", "fp8_e4m3", blocks=False)


def test_auto_on_cpu_is_float32_and_halves_beside_blocks() -> None:
    assert dtypes_on_cpu("auto", "auto", blocks=False) == Dtypes(FULL, FULL)
    assert dtypes_on_cpu("auto", "auto", blocks=True) == Dtypes(FULL, HALF)
    assert dtypes_on_cpu("float32", "float16", blocks=False) == Dtypes(FULL, HALF)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"dtype": "bfloat16"},
            "unsupported dtype: bfloat16; supported on cpu are auto and float32, whose bits do not depend on the "
            "batch; other types need device cuda",
        ),
        (
            {"dtype": "float16", "kernels": "torch"},
            "unsupported dtype: float16; supported on cpu are auto and float32,",
        ),
        (
            {"kv_cache_dtype": "bfloat16"},
            "unsupported kv_cache_dtype: bfloat16; supported on cpu are auto, float16 and float32",
        ),
    ],
)
def test_what_a_cpu_has_not_is_refused_before_anything_loads(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, EngineConfig(pages=4, page_size=16, slots=4, **settings))  # an empty folder
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("dtype", [FULL, BRAIN, HALF], ids=str)
def test_the_stored_type_is_that_of_the_embedding(dtype: torch.dtype, tmp_path: Path) -> None:
    _store(tmp_path, dtype)
    assert stored_dtype(tmp_path) == dtype
    with Weights(tmp_path) as weights:
        assert weights.take("model.norm.weight", (72,), FULL).dtype == FULL


def test_weights_of_eight_bits_are_refused_and_not_read_without_their_scales(tmp_path: Path) -> None:
    _store(tmp_path, torch.float8_e4m3fn)
    with pytest.raises(ModelError, match="F8_E4M3; supported are unquantized floating-point weights"):
        stored_dtype(tmp_path)
    with Weights(tmp_path) as weights, pytest.raises(ModelError, match="supported are unquantized"):
        weights.take("model.norm.weight", (72,), FULL)


def _store(folder: Path, dtype: torch.dtype) -> None:
    tiny_model("mistral", folder)
    path = folder / "model.safetensors"
    save_file({name: weight.to(dtype) for name, weight in load_file(path).items()}, path)
