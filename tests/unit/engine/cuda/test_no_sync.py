"""A forward pass never waits for its device: shown on the meta device, which has shapes and no values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform
from shared.engine.checkpoint.model_config import parse_model_config
from shared.engine.cuda.kernels.step_kernels import ReferenceKernels
from shared.engine.cuda.platform import FlashInferOps
from shared.engine.model.loading import load_decoder
from shared.engine.model.torch_ops import TorchOps
from shared.engine.quantized.linears import NarrowProducts
from tests.doubles.no_sync import HostSyncError, no_sync
from tests.unit.engine.checkpoint.popular_models import POPULAR
from tests.unit.engine.checkpoint.published_models import PUBLISHED, MetaWeights
from tests.unit.engine.experts.test_expert_operations import Launches

VALUES = torch.arange(6.0)
WAITS: dict[str, Callable[[], object]] = {
    "item": lambda: VALUES.sum().item(),
    "bool": lambda: bool((VALUES > 2).any()),
    "int": lambda: int(VALUES[3]),
    "tolist": VALUES.tolist,
    "cpu": VALUES.cpu,
    "numpy": VALUES.numpy,
    "nonzero": VALUES.nonzero,
    "where with one argument": lambda: torch.where(VALUES > 2),
    "unique": VALUES.unique,
    "equal": lambda: torch.equal(VALUES, VALUES + 1),
    "allclose": lambda: torch.allclose(VALUES, VALUES),
    "masked_select": lambda: VALUES.masked_select(VALUES > 2),
    "index by a mask": lambda: VALUES[VALUES > 2],
    "write by a mask": lambda: VALUES.clone().__setitem__(VALUES > 2, VALUES[:3]),
    "bincount": lambda: torch.bincount(VALUES.long()),
    "repeat_interleave": lambda: torch.repeat_interleave(VALUES, VALUES.long()),
    "tensor of host values": lambda: torch.tensor([1, 2]),
}
DOES_NOT_WAIT: dict[str, Callable[[], object]] = {
    "index by integers": lambda: VALUES[VALUES.long()],
    "where": lambda: torch.where(VALUES > 2, VALUES, 0.0),
    "masked_fill": lambda: VALUES.masked_fill(VALUES > 2, 0.0),
    "repeat_interleave of known size": lambda: torch.repeat_interleave(VALUES, VALUES.long(), output_size=15),
    "shapes": lambda: VALUES.view(len(VALUES) // 2, 2).sort(dim=-1),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_what_waits_for_a_device_is_found(wait: Callable[[], object], inference: bool) -> None:
    """In inference mode operators come whole that else come in parts."""
    with torch.inference_mode(inference), no_sync(), pytest.raises(HostSyncError):
        wait()
    wait()


@pytest.mark.parametrize("work", DOES_NOT_WAIT.values(), ids=DOES_NOT_WAIT)
def test_what_does_not_wait_is_let_through(work: Callable[[], object]) -> None:
    with no_sync():
        work()


class NoAttention:
    """`PlannedAttention` that keeps what it is given: shapes and types by layer."""

    def __init__(self) -> None:
        self.given: list[tuple[torch.Size, torch.Size, torch.dtype]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform) -> Tensor:
        """See `PlannedAttention`."""
        q, k = transform(q, k, torch.empty(len(q), dtype=torch.int32, device=q.device))
        assert layer == len(self.given)
        assert k.shape == v.shape
        assert q.dtype == k.dtype == v.dtype
        self.given.append((q.shape, k.shape, q.dtype))
        return torch.empty_like(q)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("sampled", [None, 0, 3])
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-14B",
        "Llama-3.1-8B",
        "Qwen2.5-7B",
        "SmolLM2-135M",
        "Qwen3-30B-A3B",
        "GLM-4.5-Air",
        "gpt-oss-20b",
    ],
)
def test_a_forward_pass_never_waits(name: str, sampled: int | None, integers: torch.dtype) -> None:
    config = parse_model_config(PUBLISHED[name].config)
    model = load_decoder(config, MetaWeights(), TorchOps(), context_len=4096, dtype=torch.bfloat16)
    tokens, attention = 7, NoAttention()

    def ints(count: int) -> Tensor:
        return torch.empty(count, dtype=integers, device="meta")

    with no_sync(), torch.inference_mode():
        rows = None if sampled is None else ints(sampled)
        logits = model.run(ints(tokens), attention, rows)
    assert logits.shape == (tokens if sampled is None else sampled, config.vocab_size)
    assert (logits.dtype, logits.device.type) == (torch.float32, "meta")
    q, k = (torch.Size((tokens, heads, config.head_dim)) for heads in (config.heads, config.kv_heads))
    assert attention.given == [(q, k, torch.bfloat16)] * config.layers


class GpuOps(FlashInferOps):
    """As on a GPU of Hopper's kind, but for FlashInfer's functions, which have tests of their own."""

    def __init__(self) -> None:
        plain, narrow = TorchOps(), NarrowProducts.on_gpu((9, 0), deterministic=False)

        def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
            x.copy_(plain.rms_norm(x + residual, weight, epsilon))

        functions = {"rmsnorm": plain.rms_norm, "silu_and_mul": plain.silu_and_mul}
        super().__init__(SimpleNamespace(**functions, fused_add_rmsnorm=fused_add_rmsnorm), narrow=narrow)


LARGE = {  # and the products of torch that they need
    "Qwen/Qwen3-235B-A22B": {"mm", "_grouped_mm"},
    "openai/gpt-oss-120b": {"mm", "_grouped_mm"},
    "meta-llama/Llama-3.3-70B-Instruct": {"mm"},
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": {"mm", "_scaled_mm"},
    "Qwen/Qwen3-32B-FP8": {"mm", "_scaled_mm_v2"},
}


@pytest.mark.parametrize(("name", "products"), LARGE.items(), ids=LARGE)
def test_a_forward_pass_of_a_large_model_never_waits(name: str, products: set[str]) -> None:
    """Also of those that fit on no card (docs/models.md); experts of MXFP4 as they are computed, in 16 bits.

    All calls bind to torch, whose version is that of a GPU.
    """
    config = parse_model_config(
        POPULAR[name] | {"quantization_config": None} if "oss" in name else POPULAR[name]
    )
    model = load_decoder(config, MetaWeights(), GpuOps(), context_len=4096, dtype=torch.bfloat16)
    tokens, attention = torch.empty(7, dtype=torch.int32, device="meta"), NoAttention()
    with torch.inference_mode(), no_sync(), Launches() as launches:
        logits = model.run(tokens, attention, tokens[:3])
    assert (logits.shape, logits.dtype) == ((3, config.vocab_size), torch.float32)
    q, k = (torch.Size((7, heads, config.head_dim)) for heads in (config.heads, config.kv_heads))
    assert attention.given == [(q, k, torch.bfloat16)] * config.layers
    assert products == {each for each in launches.names if each.removesuffix("_v2").endswith("mm")}


def test_torch_is_that_of_the_image_with_cuda() -> None:
    lock = Path("images/worker-cuda.lock").read_text(encoding="utf-8")
    assert f"\ntorch=={torch.__version__.partition('+')[0]} " in lock


def test_filters_never_wait() -> None:
    logits, rows = torch.empty(3, 500, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    with no_sync():
        ReferenceKernels().filter_rows(logits, rows, rows, torch.empty(3, 3, device="meta"))
    assert logits.shape == (3, 500)
