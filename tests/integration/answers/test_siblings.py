"""Eight answers to one prompt cost one prompt: computed once, fetched once, and each is what it would be alone."""

from __future__ import annotations

import pytest

from tests.integration.deployments.aggregated import AGGREGATED, PROMPT_ROLE
from tests.integration.deployments.deployment import LocalDeployment

PROMPT_TOKENS = 1000
ANSWERS = 8
PAGE_SIZE = 16
PROMPT_PAGES = -(-PROMPT_TOKENS // PAGE_SIZE)


def _ask(running: LocalDeployment, first_id: int, seed: int, n: int) -> list[str]:
    prompt = [first_id + 7 * at % 5000 for at in range(PROMPT_TOKENS)]
    answer = running.client.completions.create(
        model="smollm2", prompt=prompt, n=n, seed=seed, temperature=1.0, max_tokens=12
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    return [choice.text for choice in answer.choices]


@pytest.mark.timeout(600)
@pytest.mark.aggregated
def test_eight_answers_compute_and_fetch_their_prompt_once(two_each: LocalDeployment) -> None:
    def costs() -> list[float]:
        names = {"segue_extend_tokens_total": PROMPT_ROLE, "segue_kv_fetched_bytes_total": "decode"}
        return [two_each.total(role, name) for name, role in names.items()]

    start = costs()
    _ask(two_each, 20_000, seed=1, n=1)
    after_one = costs()
    answers = _ask(two_each, 1000, seed=5, n=ANSWERS)
    after_eight = costs()
    computed, fetched = (after - before for after, before in zip(after_eight, after_one, strict=True))
    one_prompt = after_one[1] - start[1]
    page = one_prompt / PROMPT_PAGES
    assert (one_prompt > 0) != AGGREGATED
    assert PROMPT_TOKENS <= computed <= PROMPT_TOKENS + ANSWERS * (PAGE_SIZE + 1)
    assert one_prompt <= fetched <= one_prompt + (ANSWERS - 1) * page
    assert len(set(answers)) > ANSWERS // 2, "at temperature 1 they differ"
    alone = [_ask(two_each, 1000, seed=5 + number, n=1)[0] for number in range(ANSWERS)]
    assert answers == alone
