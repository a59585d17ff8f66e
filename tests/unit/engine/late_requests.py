"""Requests for late streams: all they may ask for, drawn once, and what each gets when it is served alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch
from shared.engine.checkpoint.model_config import ModelConfig, read_model_config
from shared.engine.model.loading import load_decoder
from shared.engine.model.torch_ops import TorchOps
from shared.engine.model.weights import Weights
from shared.engine.sampling.grammars import Matcher
from shared.engine.sampling.masks import Constraints, MaskBudget, MaskShares
from shared.wire.grammar import Grammar
from shared.wire.sampled import TokenLogprobs
from shared.wire.sampling_params import SamplingParams
from tests.simulation.oracle.toy_grammar import FIRM, ToyMatcher, allowed
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

PAGE_SIZE = 4
CONTEXT_PAGES = 12
EOS = frozenset({3})
FAMILY = "qwen3, qk-norm, head_dim 40"


@dataclass(frozen=True)
class Wanted:
    """A request, and the tokens it should get."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: tuple[int, ...]
    told: tuple[TokenLogprobs, ...]  # of the tokens, if it asks
    scored: tuple[TokenLogprobs, ...]  # of the prompt behind its first token, if it asks

    @property
    def follows_output(self) -> bool:
        """Whether the host must know its tokens before the next one is chosen."""
        return self.params.grammar is not None or bool(self.params.bad_words)

    def scores(self, start: int, size: int) -> tuple[int, ...]:
        """What a row of the prompt scores: the tokens behind each of its own."""
        asks = self.params.prompt_logprobs >= 0
        return self.prompt[start + 1 : start + size + 1] if asks else ()


class LateModel:
    """A tiny model on disk and in memory, and some requests with their tokens."""

    def __init__(self, folder: Path, family: str = FAMILY) -> None:
        tiny_model(family, folder)
        found = read_model_config(folder)
        self.config: ModelConfig = found.at_context(found.context_len)
        self.folder = folder
        with Weights(folder) as weights, torch.inference_mode():
            self.decoder = load_decoder(
                self.config,
                weights,
                TorchOps(),
                context_len=CONTEXT_PAGES * PAGE_SIZE,
                dtype=torch.float32,
            )
        self.requests = self._requests(random.Random(5))

    def _requests(self, drawn: random.Random) -> list[Wanted]:
        driver = Driver(self.folder, kernels="torch", page_size=PAGE_SIZE, pages=32, slots=4)
        driver.device._sampler._constraints = Constraints(ToyMatchers(), VOCAB_SIZE)  # type: ignore[attr-defined]
        common = tokens_of(99, 2 * PAGE_SIZE, VOCAB_SIZE)
        found = []
        for number in range(24):
            prompt = tokens_of(number, drawn.randint(1, 20), VOCAB_SIZE)
            if number % 3 == 0:
                prompt = common + prompt[:12]
            params, count = _params(drawn), drawn.randint(2, 16)
            found.append(_alone(driver, Wanted(tuple(prompt), params, (), (), ()), count))
        driver.close()
        return found


def _alone(driver: Driver, wanted: Wanted, count: int) -> Wanted:
    """A request with what it gets when it is served alone."""
    prompt, params = wanted.prompt, wanted.params
    join = driver.join(0, range(CONTEXT_PAGES), prompt_len=len(prompt), params=params, token_ids=prompt)
    row = ExtendRow(0, prompt, 0, True, wanted.scores(0, len(prompt)))
    steps: list[dict[str, Any]] = [{"joins": (join,), "extend": (row,)}]
    steps += [{"decode_slots": (0,)} for _ in range(count - 1)]
    sampled = []
    for batch in steps:
        driver.step += 1
        mode = ForwardMode.EXTEND if "extend" in batch else ForwardMode.DECODE
        driver.device.launch(ScheduleBatch(driver.step, mode, **batch))
        sampled.append(driver.device.wait(driver.step))
    told = tuple(step.logprobs[0] for step in sampled) if params.logprobs >= 0 else ()
    scored = tuple(sampled[0].scored.get(0, ()))
    return replace(wanted, tokens=tuple(step.token_ids[0] for step in sampled), told=told, scored=scored)


class ToyMatchers:
    """Grammars whose next tokens are a hash of the output. They never allow an end."""

    eos_token_ids = EOS

    def matcher(self, grammar: Grammar) -> Matcher:
        return EndlessMatcher(grammar, VOCAB_SIZE)


class ReluctantBudget(MaskBudget):
    """A budget that has no time for masks at random."""

    def __init__(self, drawn: random.Random, share: float) -> None:
        super().__init__()
        self._random = drawn
        self._share = share

    def share(
        self,
        slots: Sequence[int],
        rows: Collection[int],
        compute: Callable[[int, float], bool],
        *,
        bounded: int | None = None,
    ) -> MaskShares:
        passed_over = {row for row in rows if bounded is None or row < bounded}
        passed_over = {row for row in passed_over if self._random.random() < self._share}
        shares = super().share(slots, [row for row in rows if row not in passed_over], compute, bounded=0)
        shares.sat_out |= passed_over
        return shares


class EndlessMatcher(ToyMatcher):
    """See `ToyMatchers`."""

    def compute_bitmask(self) -> bytes:
        bits = sum(1 << token_id for token_id in allowed(self._state, VOCAB_SIZE) - EOS)
        return bits.to_bytes(-(-VOCAB_SIZE // 32) * 4, "little")


def _params(drawn: random.Random) -> SamplingParams:
    def some(value: Any, neutral: Any) -> Any:
        return value if drawn.random() < 0.3 else neutral

    told: dict[str, Any] = {"logprobs": some(drawn.randint(0, 5), -1), "prompt_logprobs": some(3, -1)}
    if drawn.random() < 0.3:
        return SamplingParams(max_new_tokens=64, seed=0, temperature=0.0, **told)
    grammar = some(FIRM, None)
    return SamplingParams(
        max_new_tokens=64,
        seed=drawn.getrandbits(64) - 2**63,
        temperature=drawn.uniform(0.3, 1.5),
        top_p=some(drawn.uniform(0.2, 0.95), 1.0),
        top_k=some(drawn.randint(1, 50), 0),
        min_p=some(drawn.uniform(0.01, 0.3), 0.0),
        repetition_penalty=some(1.5, 1.0),
        frequency_penalty=some(0.9, 0.0),
        presence_penalty=some(0.9, 0.0),
        logit_bias=some({5: 3.0, 17: -100.0, 40: 2.0}, {}),
        min_new_tokens=some(8, 0),
        stop_token_ids=some((7, 9), ()),
        grammar=grammar,
        allowed_token_ids=() if grammar else some(tuple(range(0, VOCAB_SIZE, 3)), ()),
        bad_words=some(((6,), (12, 15), (12, 18, 21)), ()),
        **told,
    )


def assert_alike(told: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    """The same tokens at the same ranks, as likely up to rounding."""
    assert len(told) == len(expected)
    for one, other in zip(told, expected, strict=True):
        assert one.rank == other.rank
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
        assert [one.logprob, *dict(one.top).values()] == pytest.approx(
            [other.logprob, *dict(other.top).values()], abs=1e-4
        )
