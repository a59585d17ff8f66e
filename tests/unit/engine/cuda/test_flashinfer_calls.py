"""Every call of FlashInfer binds to the installed package, and means what its documentation says."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.attention.flashinfer_package import flashinfer_package
from shared.engine.cuda.platform import FlashInferOps
from shared.engine.model.torch_ops import TorchOps
from shared.primitives.errors import StartError
from tests.doubles.fake_flashinfer import FakeFlashInfer
from tests.unit.engine.cuda.test_flashinfer_attention import Steps


@pytest.fixture(scope="module")
def package() -> Iterator[Any]:
    """FlashInfer; imported as on a GPU, but for what it warns of where there is none."""
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    before = dict(os.environ)
    yield flashinfer_package()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_attention_calls_bind(package: Any, deterministic: bool) -> None:
    steps = Steps(3, deterministic=deterministic, package=package)
    steps.run(10)
    bound = set(steps.library.calls)
    decode, prefill = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    assert bound == {
        "fast_decode_plan",
        *(decode + end for end in ("", ".plan", ".reset_workspace_buffer", ".run")),
        *(prefill + end for end in ("", ".plan", ".run")),
        *([] if deterministic else [prefill + ".reset_workspace_buffer"]),  # of graphs
    }


def test_the_double_refuses_what_the_package_does_not_take(package: Any) -> None:
    library = FakeFlashInfer(Steps(0).stream, package)
    with pytest.raises(TypeError, match="disable_split"):
        library.bind("fast_decode_plan", *range(8), disable_split=True)


def test_ops_calls_bind_and_compute_what_torch_ops_do(package: Any) -> None:
    """The functions themselves are torch here; they are called through FlashInfer's signatures."""
    torch.manual_seed(0)
    ours, wanted = FlashInferOps(_bound(package)), TorchOps()
    x, residual, weight = torch.randn(5, 8), torch.randn(5, 8), torch.rand(8) + 0.5
    torch.testing.assert_close(ours.rms_norm(x, weight, 1e-5), wanted.rms_norm(x, weight, 1e-5))
    expected = wanted.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(ours.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected)
    torch.testing.assert_close(ours.silu_and_mul(x), wanted.silu_and_mul(x))
    torch.testing.assert_close(ours.gelu_and_mul(x), wanted.gelu_and_mul(x))
    matrix, bias = torch.randn(3, 8), torch.randn(3)
    torch.testing.assert_close(ours.linear(matrix, bias)(x), wanted.linear(matrix, bias)(x))


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delenv("FLASHINFER_USE_CUDA_NORM", raising=False)
    with pytest.raises(StartError, match=r"FlashInfer cannot be imported .*use device cpu"):
        flashinfer_package()


def test_norms_are_compiled_from_cuda_and_the_import_needs_no_gpu(package: Any) -> None:
    assert package.norm._USE_CUDA_NORM
    module = "shared.engine.attention.flashinfer_package"
    script = f"from {module} import flashinfer_package; print(flashinfer_package().__version__)"
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == package.__version__


def _bound(package: Any) -> Any:
    """Functions of FlashInfer's signatures in torch, as its documentation describes them."""
    plain = TorchOps()

    def rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: A002
        return plain.rms_norm(input, weight, eps)

    def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:  # noqa: A002
        residual += input
        input.copy_(plain.rms_norm(residual, weight, eps))

    def silu_and_mul(input: Tensor) -> Tensor:  # noqa: A002
        return plain.silu_and_mul(input)

    functions = (
        rmsnorm,
        fused_add_rmsnorm,
        silu_and_mul,
    )
    return SimpleNamespace(**{each.__name__: _binding(package, each) for each in functions})


def _binding(package: Any, function: Any) -> Any:
    signature = inspect.signature(getattr(package, function.__name__))

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**signature.bind(*args, **kwargs).arguments)

    return call
