"""Experts that are computed one by one are read one by one: what is packed is never wide as a whole."""

from __future__ import annotations

import torch

from shared.engine.gguf.packing import narrowest_kind, pack_float
from shared.engine.model.ops import PackedBank
from shared.engine.model.torch_ops import TorchOps
from tests.doubles.live_bytes import LiveBytes
from tests.unit.engine.experts.packed_banks import mxfp4_matrices

EXPERTS, INNER, HIDDEN = 32, 256, 512


def test_a_packed_layer_is_unpacked_for_one_expert_at_a_time() -> None:
    gate_up, down = mxfp4_matrices(EXPERTS, 2 * INNER, HIDDEN), mxfp4_matrices(EXPERTS, HIDDEN, INNER)
    kept = []

    def linear(weight: torch.Tensor, _bias: torch.Tensor | None) -> torch.nn.Identity:
        kept.append(pack_float(weight, narrowest_kind(weight)))
        return torch.nn.Identity()

    with LiveBytes() as live:
        TorchOps(linear).experts(PackedBank(gate_up, down, torch.float32), TorchOps().silu_and_mul)
    assert {each.dtype for each in kept} == {torch.bfloat16}
    nbytes = sum(each.nbytes for each in kept)
    assert nbytes == 2 * 3 * EXPERTS * INNER * HIDDEN
    assert nbytes < live.most < 1.5 * nbytes  # of 32 experts one is wide, with what it is made of
