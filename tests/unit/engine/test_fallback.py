"""What no family fits is computed by transformers' own code over pages, exactly; what cannot be is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from shared.batch.schedule_batch import ExtendRow, ForwardMode
from shared.engine.checkpoint.model_impl import read_config
from shared.engine.checkpoint.transformers_config import FallbackConfig
from shared.engine.config import EngineConfig
from shared.engine.engine import load
from shared.engine.model.fallback import Scores
from shared.primitives.errors import ConfigError, ModelError
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.tiny_models import SIZES, VOCAB_SIZE, save_model, tiny_model

RELATIVE_GAP_MAX = 4e-5


def _gpt2() -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 72,
        "n_layer": 2,
        "n_head": 6,
        "n_positions": 512,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.25, eos_token_id=3, bos_token_id=3))


def _phi() -> PreTrainedModel:
    return PhiForCausalLM(PhiConfig(**SIZES))


def _cohere2() -> PreTrainedModel:
    windows: dict[str, Any] = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
    return Cohere2ForCausalLM(Cohere2Config(**SIZES, **windows, logit_scale=1.0, pad_token_id=0))


def _olmoe() -> PreTrainedModel:
    return OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2, learned positions": _gpt2,
    "phi, layer norms, partial rotation": _phi,
    "cohere2, windows": _cohere2,
    "olmoe, experts": _olmoe,
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_in_chunks_cached_and_moved(name: str, tmp_path: Path) -> None:
    model: Any = save_model(MODELS[name], tmp_path)
    driver = Driver(tmp_path)
    assert isinstance(driver.engine.config, FallbackConfig)
    assert driver.engine.determinism.startswith("transformers-")
    assert "the code of transformers" in driver.engine.description
    assert_exact_in_chunks_cached_and_moved(model, driver)
    driver.close()


def assert_exact_in_chunks_cached_and_moved(model: Any, driver: Driver) -> None:
    """Requests in chunks, beside others, with a cached prefix and moved to other pages have the model's logits."""
    prompt, other = tokens_of(1, 131, VOCAB_SIZE), tokens_of(2, 40, VOCAB_SIZE)

    def assert_exact(slot: int, of: list[int]) -> None:
        with torch.inference_mode():
            found = model(torch.tensor([[*of, *driver.tokens[slot][:-1]]])).logits[0, len(of) - 1 :]
        assert len(driver.logits[slot]) > 1
        for index, (logits, expected) in enumerate(zip(driver.logits[slot], found, strict=True)):
            gap = float((logits - expected).abs().max() / expected.abs().max())
            assert gap < RELATIVE_GAP_MAX, f"output {index}: {gap:.1e}"

    driver.prefill(0, prompt, range(10), chunk=50)
    joins = [driver.join(1, range(10, 14), prompt_len=len(other))]
    driver.run(ForwardMode.EXTEND, joins=joins, extend=[ExtendRow(1, other, 0, True)])
    driver.decode([0, 1], 5)
    cached = [driver.join(2, [*range(8), 30, 31], prompt_len=len(prompt), kv_len=128)]
    driver.run(ForwardMode.EXTEND, joins=cached, extend=[ExtendRow(2, prompt[128:], 128, True)])
    driver.decode([1, 2, 0], 4)
    assert_exact(2, prompt)
    store, tokens, logits = driver.engine.cache.store, driver.tokens[0], driver.logits[0]
    store[40:50] = store[:10]  # as a migration does
    store[:10] = torch.nan
    kv_len = len(prompt) + len(tokens) - 1
    moved = driver.join(5, range(40, 50), prompt_len=len(prompt), kv_len=kv_len, last_token=tokens[-1])
    driver.run(ForwardMode.PREBUILT, joins=[moved])
    driver.tokens[5], driver.logits[5] = tokens, logits
    driver.decode([5, 1], 4)
    assert_exact(5, prompt)
    assert_exact(1, other)


def test_a_family_of_the_decoder_may_be_computed_by_transformers_too(tmp_path: Path) -> None:
    tiny_model("llama, tied, head_dim 24", tmp_path)
    drivers = [Driver(tmp_path), Driver(tmp_path, model_impl="transformers")]
    for driver in drivers:
        driver.prefill(0, tokens_of(3, 70, VOCAB_SIZE), range(8), chunk=33)
        driver.decode([0], 8)
        driver.close()
    own, theirs = (torch.stack(driver.logits[0]) for driver in drivers)
    assert float((own - theirs).abs().max() / own.abs().max()) < RELATIVE_GAP_MAX
    engines = [driver.engine for driver in drivers]
    assert engines[0].determinism != engines[1].determinism
    assert engines[0].model_fingerprint != engines[1].model_fingerprint


def _mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2))


def _bamba() -> PreTrainedModel:
    sizes = SIZES | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 36, "mamba_d_state": 8}
    return BambaForCausalLM(BambaConfig(**sizes))


def _with_sinks() -> PreTrainedModel:
    return GraniteSWAForCausalLM(GraniteSWAConfig(**SIZES))


def _t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_ff=32, num_layers=1, num_heads=2)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_mamba, "MambaForCausalLM has layers with a state of their own"),
        (_bamba, "BambaForCausalLM .*state"),
        (_with_sinks, "GraniteSWAForCausalLM adds sinks"),
        (_t5, "it has an encoder"),
    ],
)
def test_what_pages_cannot_hold_is_refused_by_name(
    make: Callable[[], PreTrainedModel], message: str, tmp_path: Path
) -> None:
    save_model(make, tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path, EngineConfig(pages=8, page_size=16, slots=2))


def _changed(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, "its own code"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel is no text decoder of transformers"),
        ({"model_type": "llama"}, "OlmoeForCausalLM is no text decoder"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "its rope .dynamic.",
        ),
    ],
)
def test_a_strange_config_is_refused_by_name(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_model(_olmoe, tmp_path)
    _changed(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


def test_a_model_whose_pages_give_other_logits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does beside attention: here the window is not said to the attention."""
    save_model(_cohere2, tmp_path)
    monkeypatch.setattr(
        "shared.engine.model.fallback.Scores", lambda scale, _window, cap: Scores(scale, None, cap)
    )
    with pytest.raises(ModelError, match="over pages its logits differ by"):
        load(tmp_path, EngineConfig(pages=8, page_size=16, slots=2))


def test_the_setting_is_obeyed(tmp_path: Path) -> None:
    save_model(_olmoe, tmp_path)
    config = EngineConfig(pages=8, page_size=16, slots=2)
    with pytest.raises(ModelError, match="unsupported architecture: OlmoeForCausalLM; supported are"):
        load(tmp_path, replace(config, model_impl="segue"))
    with pytest.raises(ConfigError, match="model_impl transformers needs device cpu"):
        load(tmp_path, replace(config, model_impl="transformers", device="cuda-on-cpu"))
