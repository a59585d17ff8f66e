"""What decision 48 says of a state beside keys and values, shown on one layer that is transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tests.unit.engine.gated_delta import DeltaShape, DeltaState, GatedDelta

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=12, kernel=4)
HIDDEN, TOKENS = 40, 37


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch.manual_seed(3)
    config: Any = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=SHAPE.key_heads,
        linear_num_value_heads=SHAPE.value_heads,
        linear_key_head_dim=SHAPE.key_dim,
        linear_value_head_dim=SHAPE.value_dim,
        linear_conv_kernel_dim=SHAPE.kernel,
        num_hidden_layers=1,
    )
    layer: Any = Qwen3NextGatedDeltaNet(config, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.fixture(scope="module")
def ours(theirs: Any) -> GatedDelta:
    return GatedDelta(SHAPE, theirs.state_dict(), theirs.layer_norm_epsilon)


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))


def whole(layer: GatedDelta, x: Tensor) -> tuple[Tensor, DeltaState]:
    return layer(x, DeltaState.empty(SHAPE))


def test_it_is_the_layer_of_transformers(theirs: Any, ours: GatedDelta, x: Tensor) -> None:
    with torch.inference_mode():
        torch.testing.assert_close(whole(ours, x)[0], theirs(x.unsqueeze(0))[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1,) * TOKENS, (1, 36), (2, 3, 32), (16, 16, 5), (36, 1)])
def test_a_state_may_be_handed_over_behind_any_token(
    ours: GatedDelta, x: Tensor, sizes: tuple[int, ...]
) -> None:
    """So a chunk, a fetch, a retraction and a migration need one copy of it, and nothing of the tokens before."""
    expected, last = whole(ours, x)
    state, found = DeltaState.empty(SHAPE), []
    for part in torch.split(x, list(sizes)):
        y, state = ours(part, DeltaState(state.conv.clone(), state.memory.clone()))
        found.append(y)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.memory, last.memory, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.conv, last.conv)


def test_a_prefix_is_of_use_only_where_its_state_was_kept(ours: GatedDelta, x: Tensor) -> None:
    """The state behind 32 tokens is not to be had of that behind 37, nor of that behind 16 without their tokens."""
    _, behind = whole(ours, x)
    _, before = whole(ours, x[:32])
    assert float((behind.memory - before.memory).abs().max()) > 0.01


def test_a_token_computed_twice_is_not_as_if_it_had_been_once(ours: GatedDelta, x: Tensor) -> None:
    """A row that sits out a step writes the cell of its keys and values again; a state it must not touch."""
    _, once = whole(ours, x)
    _, twice = ours(x[-1:], once)
    assert float((once.memory - twice.memory).abs().max()) > 0.01


def test_a_state_of_qwen3_next_is_as_large_as_three_thousand_tokens() -> None:
    """Qwen3-Next-80B-A3B: 36 of 48 layers keep one, 12 have keys and values of two heads of 256."""
    shape = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
    state, token = 36 * shape.state_bytes(), 12 * 2 * 2 * 256 * 2
    assert (state, token) == (77_266_944, 24_576)
    assert 3_100 < state / token < 3_200
