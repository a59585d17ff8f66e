"""The CUDA worker's image cannot compile: whatever our code calls of FlashInfer was compiled ahead of time.

FlashInfer itself says which module a call needs: each is made as in a step, on CPU, up to the loading of the module.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.cuda import aot

ROOT = Path(__file__).parents[4]
ROWS, HEADS, KV_HEADS, PAGE_SIZE = 4, 8, 2, 16
CALLERS = ("shared/engine/attention", "shared/engine/cuda")
KEPT_AS = {"flashinfer", "library"}
LOADS_NOTHING = {"fast_decode_plan"}  # it plans for a wrapper that has its module


class NeedsModuleError(Exception):
    """FlashInfer was about to load the module of this name."""


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """FlashInfer that knows one architecture, and names a module instead of loading it."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "1")
    package = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    core = importlib.import_module("flashinfer.jit.core")
    monkeypatch.setattr(core.jit_env, "FLASHINFER_GEN_SRC_DIR", tmp_path)
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(9, "0a")})

    def name(spec: Any) -> None:
        raise NeedsModuleError(spec.name)

    monkeypatch.setattr(core.JitSpec, "build_and_load", name)
    empty = torch.empty  # a machine without a GPU has no pinned memory
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: empty(*size, **options | {"pin_memory": False})
    )
    return package


def indices(*values: int) -> torch.Tensor:
    """int32 on CPU."""
    return torch.tensor(values, dtype=torch.int32)


def _norm(flashinfer: Any) -> None:
    flashinfer.rmsnorm(torch.zeros(ROWS, 128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16))


def _add_norm(flashinfer: Any) -> None:
    x = torch.zeros(ROWS, 128, dtype=torch.bfloat16)
    flashinfer.fused_add_rmsnorm(x, x.clone(), torch.ones(128, dtype=torch.bfloat16))


def _activation(flashinfer: Any) -> None:
    flashinfer.silu_and_mul(torch.zeros(ROWS, 128, dtype=torch.bfloat16))


def _prefill(flashinfer: Any, dtype: torch.dtype, head_dim: int, window_left: int, kept: torch.dtype) -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "HND", backend="fa2")
    plan(wrapper, (dtype, kept), head_dim, window_left, indices(0, 1), causal=True)


def _decode(flashinfer: Any, dtype: torch.dtype, head_dim: int, window_left: int, kept: torch.dtype) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "HND", backend="fa2")
    plan(wrapper, (dtype, kept), head_dim, window_left)


def _decode_on_tensor_cores(
    flashinfer: Any, dtype: torch.dtype, head_dim: int, window_left: int, kept: torch.dtype
) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "HND", backend="fa2", use_tensor_cores=True
    )
    plan(wrapper, (dtype, kept), head_dim, window_left)


def workspace() -> torch.Tensor:
    """Too small to plan with: it never comes to that."""
    return torch.zeros(1024, dtype=torch.uint8)


def plan(
    wrapper: Any,
    types: tuple[torch.dtype, torch.dtype],
    head_dim: int,
    window_left: int,
    *qo: Any,
    **options: Any,
) -> None:
    """Plan one row of one page; types of queries and of pages."""
    options |= {"q_data_type": types[0], "kv_data_type": types[1], "window_left": window_left}
    pages = (indices(0, 1), indices(0), indices(1))
    wrapper.plan(*qo, *pages, HEADS, KV_HEADS, head_dim, PAGE_SIZE, **options)


CALLS: dict[str, Callable[[Any], None]] = {
    "rmsnorm": _norm,
    "fused_add_rmsnorm": _add_norm,
    "silu_and_mul": _activation,
}
ATTENTION: dict[str, list[Callable[[Any, torch.dtype, int, int, torch.dtype], None]]] = {
    "BatchPrefillWithPagedKVCacheWrapper": [_prefill],
    "BatchDecodeWithPagedKVCacheWrapper": [_decode, _decode_on_tensor_cores],
}


def called() -> set[str]:
    """What the engine's files name of FlashInfer: `flashinfer.NAME`, or of whatever they keep the package as."""
    names: set[str] = set()
    for path in (path for folder in CALLERS for path in (ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id=kept) | ast.Attribute(attr=kept), attr=name):
                    if kept.lstrip("_") in KEPT_AS and not name.startswith("__"):
                        names.add(name)
    return names


def compiled(*, fp8_kv: bool = False) -> set[str]:
    """The names of all modules that are compiled ahead of time."""
    return {module.spec().name for module in aot.modules(fp8_kv=fp8_kv)}


def needed(call: Callable[..., None], *arguments: Any) -> str:
    """The module that a call is about to load."""
    with pytest.raises(NeedsModuleError) as caught:
        call(*arguments)
    return str(caught.value)


def attention_needs(
    flashinfer: Any, dtype: torch.dtype, head_dim: int, window_left: int, kept: torch.dtype | None = None
) -> set[str]:
    """The modules of all attention over one kind of pages."""
    return {
        needed(call, flashinfer, dtype, head_dim, window_left, kept or dtype)
        for calls in ATTENTION.values()
        for call in calls
    }


@pytest.mark.usefixtures("flashinfer")
def test_every_function_that_is_called_is_known_here() -> None:
    assert called() == CALLS.keys() | ATTENTION.keys() | LOADS_NOTHING


@pytest.mark.parametrize("name", CALLS)
def test_a_function_finds_its_module(flashinfer: Any, name: str) -> None:
    assert needed(CALLS[name], flashinfer) in compiled()


@pytest.mark.parametrize("window_left", [-1, 0, 4095])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_finds_its_modules(
    flashinfer: Any, dtype: torch.dtype, head_dim: int, window_left: int
) -> None:
    needs = attention_needs(flashinfer, dtype, head_dim, window_left)
    assert len(needs) == 2  # decode on tensor cores is prefill's kernel
    assert needs <= compiled()


def test_nothing_is_compiled_for_nobody(flashinfer: Any) -> None:
    """Modules for pages of 8 bits are others, and compiled where they are asked for."""
    needs = {needed(call, flashinfer) for call in CALLS.values()}
    of_eight_bits: set[str] = set()
    for dtype, head_dim, window_left in product(aot.DTYPES, aot.HEAD_DIMS, (-1, 0)):
        needs |= attention_needs(flashinfer, dtype, head_dim, window_left)
        of_eight_bits |= attention_needs(flashinfer, dtype, head_dim, window_left, torch.float8_e4m3fn)
    assert compiled() == needs
    assert not of_eight_bits & needs
    assert compiled(fp8_kv=True) == needs | of_eight_bits


@pytest.mark.usefixtures("flashinfer")
def test_only_what_a_folder_lacks_is_compiled_and_all_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jit = importlib.import_module("flashinfer.jit")
    monkeypatch.setattr(jit.env, "FLASHINFER_JIT_DIR", tmp_path / "objects")
    built, loaded = [], []

    def build(specs: list[Any], **_: Any) -> None:  # in place of ninja and nvcc
        for spec in specs:
            built.append(spec.name)
            spec.build_dir.mkdir(parents=True)
            spec.jit_library_path.write_bytes(b"a library")

    monkeypatch.setattr(jit, "build_jit_specs", build)
    monkeypatch.setattr(jit.core.JitSpec, "load", lambda _, path: loaded.append(path))
    first = aot.compile_modules(aot.modules()[:2], tmp_path / "aot")
    names = [module.spec().name for module in aot.modules()[:3]]
    assert built == names[:2]
    assert first == loaded == [tmp_path / "aot" / name / f"{name}.so" for name in built]
    second = aot.compile_modules(aot.modules()[:3], tmp_path / "aot")
    assert built == names
    assert loaded == first + second
    assert [path.read_bytes() for path in second] == [b"a library"] * 3
