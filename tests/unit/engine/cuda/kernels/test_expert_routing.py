"""Routing in one launch: the CUDA source, run on this CPU, does what a plain reading of the rules does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.engine.checkpoint.experts_config import Routing
from shared.engine.cuda.kernels.expert_routing import CHOSEN_MAX, SOURCE, CudaRouter, GpuRouting
from shared.engine.model.routing import Router
from tests.unit.engine.cuda.kernels.host_kernels import HostLaunch, compile_for_host, with_headers
from tests.unit.engine.experts.plain_routing import ROUTINGS, assert_as_read_plainly, correction_of, logits_of

MISTAKES = {
    "lanes compare scores alone": ("other > rank ?", "other >> 32 > rank >> 32 ?"),
    "negative numbers in the order of their bits": (
        "ordered = bits ^ (bits >> 31 & 0x7fffffff);",
        "ordered = bits;",
    ),
    "weights are corrected, too": (
        "rank_of(scores[i] + corrections[i], expert)",
        "rank_of(scores[i] += corrections[i], expert)",
    ),
    "the scale is left out": ("own_weight * factor", "own_weight"),
    "weights are never normalized": ("if (normalized)", "if (false)"),
    "all experts may be chosen": ("if (groups > 1)", "if (false)"),
    "a group is worth its best expert": (" + number_of(second)", ""),
    "an expert is taken twice": ("== first ? NONE", "== first ? ranks[i]"),
    "the sum is that of the lanes' first experts": ("sum += scores[i]", "sum = scores[0]"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostLaunch:
    return HostLaunch(compile_for_host(SOURCE, tmp_path_factory.mktemp("routing")))


@pytest.mark.parametrize("tied", [False, True], ids=["random", "tied"])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_experts_and_weights_are_those_of_a_plain_reading(
    library: HostLaunch, routing: Routing, tied: bool
) -> None:
    assert_as_read_plainly(GpuRouting(lambda: library), routing, logits_of(41, routing.experts, tied=tied))


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_seen(mistake: tuple[str, str], tmp_path: Path) -> None:
    right, wrong = mistake
    assert right in SOURCE.read_text()
    launch = HostLaunch(compile_for_host(with_headers(SOURCE, tmp_path, right, wrong), tmp_path))

    def everything() -> None:
        for routing in ROUTINGS.values():
            for tied in (False, True):
                assert_as_read_plainly(
                    GpuRouting(lambda: launch), routing, logits_of(41, routing.experts, tied=tied)
                )

    with pytest.raises(AssertionError):
        everything()


@pytest.mark.parametrize("routing", [ROUTINGS["Qwen3"], ROUTINGS["DeepSeek-V3"]], ids=["softmax", "groups"])
@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_chooses_experts_that_there_are_and_stays_in_its_row(
    library: HostLaunch, routing: Routing, number: float
) -> None:
    route = CudaRouter(library, routing, correction_of(routing))
    logits = logits_of(3, routing.experts, tied=False)
    undisturbed, weights = route(logits)
    logits[1] = number
    chosen, found = route(logits)
    assert sorted(set(chosen[1].tolist())) == sorted(chosen[1].tolist())
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < routing.experts
    assert torch.equal(chosen[::2], undisturbed[::2])
    assert torch.equal(found[::2], weights[::2])


def test_a_token_has_the_same_bits_in_any_batch(library: HostLaunch) -> None:
    logits = logits_of(70, 128, tied=False)
    route = CudaRouter(library, ROUTINGS["Qwen3"], None)
    chosen, weights = route(logits)
    for token in (0, 3, 69):
        alone, weights_alone = route(logits[token : token + 1])
        assert torch.equal(alone[0], chosen[token])
        assert torch.equal(weights_alone[0], weights[token])


def test_the_kernels_are_made_once_and_what_they_have_no_room_for_is_routed_by_torch(
    library: HostLaunch,
) -> None:
    made: list[HostLaunch] = []

    def make() -> HostLaunch:
        made.append(library)
        return library

    routing, device = GpuRouting(make), torch.device("cpu")
    for unroutable in (Routing(513, 4), Routing(64, CHOSEN_MAX + 1)):
        assert isinstance(routing(unroutable, None, device), Router)
    assert not made
    assert all(isinstance(routing(ROUTINGS["Qwen3"], None, device), CudaRouter) for _ in range(2))
    assert made == [library]
