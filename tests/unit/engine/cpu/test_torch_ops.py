"""Each operation of `TorchOps` is its formula, and in narrow types as near to it as they allow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform
from shared.engine.model.ops import Ops
from shared.engine.model.torch_ops import TorchOps

OPS: Ops = TorchOps()
EPSILON = 1e-5
VOCAB = 61
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_rounded(found: Tensor, exact: Tensor, dtype: torch.dtype, roundings: int) -> None:
    """`found` is `exact` [float64] but for so many roundings to `dtype`, and those of float32 on the way."""
    assert found.dtype == dtype
    relative = roundings * torch.finfo(dtype).eps / 2 + 1e-6
    torch.testing.assert_close(found.double(), exact, rtol=relative, atol=1e-7)


@every_dtype
def test_norms_are_computed_in_float32(dtype: torch.dtype) -> None:
    x, residual, weight = (drawn(*shape).to(dtype) for shape in ((5, 72), (5, 72), (72,)))
    x[2] *= 3e-4  # its squares vanish in float16
    total = x + residual

    def exact(of: Tensor) -> Tensor:
        wide = of.double()
        return weight.double() * wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt()

    assert_rounded(OPS.rms_norm(x, weight, EPSILON), exact(x), dtype, 2)
    normed, stream = OPS.add_rms_norm(x.clone(), residual.clone(), weight, EPSILON)
    assert torch.equal(stream, total)
    assert_rounded(normed, exact(total), dtype, 2)


@every_dtype
def test_silu_rounds_once(dtype: torch.dtype) -> None:
    gate_up = (6 * drawn(4, 2 * 130)).to(dtype)
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -17.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounded(OPS.silu_and_mul(gate_up), gate * gate.sigmoid() * up, dtype, 1)


@every_dtype
def test_gelu_is_the_approximation_by_tanh(dtype: torch.dtype) -> None:
    gate_up = (4 * drawn(4, 2 * 130)).to(dtype)
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -3.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    found = OPS.gelu_and_mul(gate_up)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@every_dtype
def test_rotation_turns_pairs_of_halves_by_the_angles_of_a_position(dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = 6, 2, 24
    angles = torch.outer(torch.arange(50.0), 0.7 ** torch.arange(12.0))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    packed = drawn(3, heads + 2 * kv_heads, head_dim).to(dtype)
    q, k, _ = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)
    positions = torch.tensor([49, 0, 7], dtype=torch.int32)
    turns = torch.polar(torch.ones(3, 1, 12, dtype=torch.float64), angles[positions].double().unsqueeze(1))
    expected = []
    for each in (q, k):
        turned = torch.complex(*each.double().chunk(2, dim=-1)) * turns
        expected.append(torch.cat((turned.real, turned.imag), dim=-1))
    for found, exact in zip(HeadTransform(cos_sin=cos_sin)(q, k, positions), expected, strict=True):
        assert_rounded(found, exact, dtype, 1)


@every_dtype
def test_the_head_keeps_logits_apart_that_a_narrow_type_would_round_to_one(dtype: torch.dtype) -> None:
    weight = torch.tensor([[1.0, 1.0], [1.0, 0.5], [1.0, 0.0]]).to(dtype)
    logits = OPS.head(weight)(torch.tensor([[1.0, 2.0**-12]]).to(dtype), torch.zeros(1, 3))
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[1 + 2.0**-12, 1 + 2.0**-13, 1.0]]
