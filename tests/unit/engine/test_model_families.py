"""Each family of dense decoders computes what transformers computes in float32.

Measured largest gap of any logit: 7.2e-6 of the largest logit, by any kernel; the bound below is about five times that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.batch.schedule_batch import ForwardMode
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.checkpoint.model_config import read_model_config
from shared.engine.cpu import cpu_engine
from shared.engine.model.loading import load_decoder
from shared.engine.model.torch_ops import TorchOps
from tests.unit.engine.checkpoint.published_models import MetaWeights
from tests.unit.engine.driver import Driver, skip_unless_runnable, tokens_of
from tests.unit.engine.tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    phi3_with_longrope,
    save_model,
    tiny_model,
)

RELATIVE_GAP_MAX = 4e-5
NEAR_TIE = 1e-3
PROMPT_LENS = (1, 7, 16, 131, 300)


@pytest.mark.parametrize("kernels", ["auto", "avx2", "plain", "torch", "cuda-on-cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    family: str, kernels: str, tmp_path: Path
) -> None:
    """Also by the path of a GPU, whose graphs compute the same in plain torch."""
    model = tiny_model(family, tmp_path)
    if kernels == "cuda-on-cpu":
        driver = Driver(tmp_path, device=kernels, slots=2)
    else:
        skip_unless_runnable(kernels)
        driver = Driver(tmp_path, kernels=kernels)
    for length in PROMPT_LENS:
        prompt = tokens_of(length, length, VOCAB_SIZE)
        driver.prefill(0, prompt, range(20))
        driver.decode([0], 12)
        with torch.inference_mode():
            found = model(torch.tensor([[*prompt, *driver.tokens[0][:-1]]])).logits[0, length - 1 :]
        for index, (token, logits, expected) in enumerate(
            zip(driver.tokens[0], driver.logits[0], found, strict=True)
        ):
            gap = float((logits - expected).abs().max() / expected.abs().max())
            assert gap < RELATIVE_GAP_MAX, f"{length} tokens of prompt, output {index}: {gap:.1e}"
            best, second = expected.topk(2).values.tolist()
            assert token == int(expected.argmax()) or best - second < NEAR_TIE
        assert len(set(driver.tokens[0])) > 2, "a model that repeats one token shows little"
    driver.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_attention_over_pages_gives_the_logits_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_engine, "BlockedAttention", ReferenceAttention)
    model = tiny_model(family, tmp_path)
    driver = Driver(tmp_path, kernels="torch")
    prompt = tokens_of(131, 131, VOCAB_SIZE)
    driver.prefill(0, prompt, range(20), chunk=50)
    driver.decode([0], 4)
    with torch.inference_mode():
        found = model(torch.tensor([[*prompt, *driver.tokens[0][:-1]]])).logits[0, len(prompt) - 1 :]
    for logits, expected in zip(driver.logits[0], found, strict=True):
        assert float((logits - expected).abs().max() / expected.abs().max()) < RELATIVE_GAP_MAX
    driver.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_all_weights_are_read_once_and_planned_for(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, tmp_path)
    config, weights = read_model_config(tmp_path), MetaWeights()
    load_decoder(config.at_context(16), weights, TorchOps(), context_len=16, dtype=torch.float32)
    of_transformers = sum(parameter.numel() for parameter in model.parameters())
    assert config.parameters == sum(weights.taken.values()) == of_transformers


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_longrope_takes_the_factors_of_the_longest_request_there_can_be(kernels: str, tmp_path: Path) -> None:
    """transformers changes them as a sequence grows; keys that are cached, or fetched from elsewhere, cannot change."""
    model: Any = save_model(phi3_with_longrope, tmp_path)
    found = []
    for pages, length in ((4, 40), (32, 200)):  # 64 tokens are the original context
        driver = Driver(tmp_path, pages=pages, slots=1, context_len=16 * pages, kernels=kernels)
        prompt = tokens_of(length, length, VOCAB_SIZE)
        driver.prefill(0, prompt, range(pages), chunk=30)
        driver.decode([0], 8)
        with torch.inference_mode():
            wanted = model(torch.tensor([[*prompt, *driver.tokens[0][:-1]]])).logits[0, length - 1 :]
        for logits, expected in zip(driver.logits[0], wanted, strict=True):
            assert float((logits - expected).abs().max() / expected.abs().max()) < RELATIVE_GAP_MAX
        found.append(driver.engine.model_fingerprint)
        driver.close()
    assert found[0] != found[1], "pages of one are nothing to the other"


def test_sharded_weights_are_the_same_model(tmp_path: Path) -> None:
    family = "qwen3, qk-norm, head_dim 40"
    tiny_model(family, tmp_path / "whole")
    tiny_model(family, tmp_path / "shards", shard_bytes=100_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    prompt = tokens_of(5, 40, VOCAB_SIZE)
    found = []
    for name in ("whole", "shards"):
        driver = Driver(tmp_path / name)
        driver.prefill(0, prompt, range(4))
        found.append(driver.logits[0][0])
        driver.close()
    assert torch.equal(*found)


def test_a_prebuilt_join_takes_no_forward_and_samples_nothing(tmp_path: Path) -> None:
    tiny_model("mistral", tmp_path)
    driver = Driver(tmp_path)
    joins = [driver.join(0, range(2), prompt_len=20, kv_len=20, last_token=1)]
    assert driver.run(ForwardMode.PREBUILT, joins=joins) == []
    assert driver.logits[0] == []
    driver.close()
