"""A model, disaggregated, says what transformers says: the default one whole; cut, in a crowd and when pages run short.

Segue against itself is compared without any tolerance.
"""

from __future__ import annotations

import pytest

from shared.local.model_store import resolve
from tests.integration.conftest import SMALL
from tests.integration.deployments.cut_model import cut_model
from tests.integration.deployments.deployment import LocalDeployment, RoleConfigs, deployment
from tests.integration.deployments.streams import StreamedAnswer, crowd
from tests.integration.models.answers_of_transformers import assert_answers_of_transformers
from tests.integration.models.prompts import varied_prompts
from tests.waiting import until

TOKENS = 16
GREEDY = {
    "temperature": 0,
    "max_tokens": TOKENS,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return varied_prompts(cut_model())


@pytest.fixture(scope="module")
def alone(one_each: LocalDeployment, prompts: list[list[int]]) -> list[StreamedAnswer]:
    """Each prompt by itself."""
    return crowd(one_each.url, prompts, 1, **GREEDY)


@pytest.mark.timeout(600)
@pytest.mark.long
def test_greedy_answers_of_the_default_model_are_those_of_transformers(prompts: list[list[int]]) -> None:
    some = [prompt for prompt in prompts if len(prompt) <= 1000][::4]
    with deployment(as_shipped=True, config=SMALL) as running:
        answers = crowd(running.url, some, 1, **GREEDY)
    assert_answers_of_transformers(resolve("smollm2", lambda _line: None), some, answers, TOKENS)


@pytest.mark.timeout(600)
def test_greedy_answers_are_those_of_transformers(
    prompts: list[list[int]], alone: list[StreamedAnswer]
) -> None:
    assert_answers_of_transformers(cut_model(), prompts, alone, TOKENS)


@pytest.mark.timeout(600)
@pytest.mark.aggregated
def test_sixteen_at_a_time_get_the_answers_each_got_alone(
    one_each: LocalDeployment, prompts: list[list[int]], alone: list[StreamedAnswer]
) -> None:
    names = ("segue_sampled_tokens_total", "segue_steps_total{mode=decode}")
    before = [one_each.total("decode", name) for name in names]
    together = crowd(one_each.url, prompts, 16, **GREEDY)
    assert together == alone
    tokens, steps = (one_each.total("decode", name) - then for name, then in zip(names, before, strict=True))
    assert tokens >= 3 * steps, "there was no crowd"


@pytest.mark.timeout(900)
@pytest.mark.long
def test_retracted_requests_get_the_answers_they_got_undisturbed(
    one_each: LocalDeployment, prompts: list[list[int]], alone: list[StreamedAnswer]
) -> None:
    """A decode pool that holds a quarter of what the thirty grow to, entered by an optimist, all at once.

    Prefill knows every prompt by then: it hands over faster than decode ends them, so the pool overflows.
    """
    longer = {**GREEDY, "max_tokens": 6 * TOKENS}
    undisturbed = crowd(one_each.url, prompts, 8, **longer)
    for answer, start in zip(undisturbed, alone, strict=True):
        assert answer.token_ids[:TOKENS] == start.token_ids
    tight: RoleConfigs = {
        "router": {"waitingSecondsMax": 300},  # without a prefill worker they wait at the router
        "prefill": {"kvPages": 1200},
        "decode": {"kvPages": 200, "hostFraction": 4.0, "initNewTokenRatio": 0.01},
    }
    with deployment(config=tight) as running:
        crowd(running.url, prompts, 4, **{**GREEDY, "max_tokens": 1})
        assert crowd(running.url, prompts, len(prompts), **longer) == undisturbed
        assert running.total("decode", "segue_retractions_total") >= 1
        assert running.total("decode", "segue_resumes_total") >= 1
        until(lambda: not running.held(), 5, "everything given back")
