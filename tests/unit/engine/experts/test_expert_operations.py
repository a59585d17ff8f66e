"""How many operations experts take on a GPU, where each that computes is a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.engine.checkpoint.experts_config import ExpertsConfig
from shared.engine.checkpoint.model_config import parse_model_config
from shared.engine.cuda.kernels.expert_routing import GpuRouting
from shared.engine.cuda.kernels.packed_experts import GpuExperts, PackedKernels
from shared.engine.model.expert_banks import read_bank
from shared.engine.model.experts import GroupedExperts
from shared.engine.model.names import DecoderWeights
from shared.engine.model.ops import ExpertBank
from shared.engine.model.routing import Router
from shared.engine.model.torch_ops import TorchOps
from tests.doubles.no_sync import no_sync
from tests.unit.engine.checkpoint.popular_shapes import MXFP4
from tests.unit.engine.checkpoint.published_models import PUBLISHED, MetaWeights

TOKENS = 7
VIEWS = ("view", "slice", "select", "unsqueeze", "expand", "transpose", "split", "reshape", "detach")


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of operations that compute; views do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func).split(".")[1]
        if name not in VIEWS and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def experts_of(name: str) -> tuple[ExpertsConfig, int]:
    config = parse_model_config(PUBLISHED[name].config)
    found = config.experts[-1]
    assert found is not None
    return found, config.hidden_size


@pytest.mark.parametrize(
    ("name", "most"), [("Qwen3-30B-A3B", 8), ("Mixtral-8x7B-v0.1", 8), ("GLM-4.5-Air", 16)]
)
def test_routing_takes_few_launches_and_waits_for_none(name: str, most: int) -> None:
    routing = experts_of(name)[0].routing
    logits = torch.empty(TOKENS, routing.experts, device="meta")
    correction = torch.empty(routing.experts, device="meta") if routing.corrected else None
    router = Router(routing, correction, logits.device)
    with no_sync(), Launches() as launches:
        chosen, weights = router(logits)
    assert chosen.shape == weights.shape == (TOKENS, routing.chosen)
    assert len(launches.names) <= most, launches.names


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Mixtral-8x7B-v0.1", "GLM-4.5-Air", "gpt-oss-120b"])
def test_routing_is_one_launch_on_a_gpu(name: str) -> None:
    kernels: list[str] = []
    routing = experts_of(name)[0].routing
    logits = torch.empty(TOKENS, routing.experts, device="meta")
    correction = torch.empty(routing.experts, device="meta") if routing.corrected else None
    made = GpuRouting(lambda: lambda name, _blocks, _threads, _arguments: kernels.append(name))
    router = made(routing, correction, logits.device)
    with no_sync(), Launches() as launches:
        chosen, weights = router(logits)
    assert chosen.shape == weights.shape == (TOKENS, routing.chosen)
    assert kernels == ["route_experts_4"] or routing.experts <= 32
    assert (len(kernels), launches.names) == (1, [])


@pytest.mark.parametrize(("name", "most"), [("Qwen3-30B-A3B", 17), ("gpt-oss-20b", 21)])
def test_all_experts_are_two_products(name: str, most: int) -> None:
    experts, hidden = experts_of(name)
    count, inner = experts.routing.experts, experts.inner

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(count, *shape, dtype=torch.bfloat16, device="meta")

    biases = (weight(2 * inner), weight(hidden)) if experts.biased else (None, None)
    products = GroupedExperts(
        ExpertBank(weight(2 * inner, hidden), weight(hidden, inner), *biases), TorchOps().silu_and_mul
    )
    x = torch.empty(TOKENS, hidden, dtype=torch.bfloat16, device="meta")
    chosen = torch.empty(TOKENS, experts.routing.chosen, dtype=torch.int64, device="meta")
    with no_sync(), Launches() as launches:
        found = products(x, chosen, torch.empty(chosen.shape, device="meta"))
    assert (found.shape, found.dtype) == (x.shape, torch.bfloat16)
    assert launches.names.count("_grouped_mm") == 2
    assert len(launches.names) <= most, launches.names


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_packed_experts_of_few_rows_take_few_launches(name: str) -> None:
    """Sorting, two products, a gate and the sums of weighed results."""
    kernels: list[str] = []
    shape = parse_model_config(PUBLISHED[name].config | {"quantization_config": MXFP4})
    experts, weights = shape.experts[0], DecoderWeights(shape, MetaWeights())
    assert experts is not None
    bank = read_bank(weights, "model.layers.0.mlp.experts", experts, shape.hidden_size, torch.bfloat16)
    launch = PackedKernels(*[lambda name, _blocks, _threads, _arguments: kernels.append(name)] * 2)
    products = GpuExperts(lambda: launch, (9, 0))(bank, lambda gate_up: gate_up.chunk(2, dim=-1)[0].neg())
    x = torch.empty(TOKENS, shape.hidden_size, dtype=torch.bfloat16, device="meta")
    chosen = torch.empty(TOKENS, experts.routing.chosen, dtype=torch.int64, device="meta")
    with no_sync(), Launches() as launches:
        found = products(x, chosen, torch.empty(chosen.shape, device="meta"))
    assert (found.shape, found.dtype) == (x.shape, torch.bfloat16)
    assert kernels == ["plan_experts", "multiply_mxfp4_8", "multiply_mxfp4_8", "weigh_rows"]
    assert launches.names == ["neg"]
