"""Models that also read images answer text by their text half, with the logits of transformers' whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from shared.engine.checkpoint.model_config import parse_model_config, read_model_config
from shared.engine.checkpoint.text_half import stored_names
from shared.engine.model.loading import load_decoder
from shared.engine.model.torch_ops import TorchOps
from shared.primitives.errors import ModelError
from tests.unit.engine.checkpoint.published_models import MetaWeights
from tests.unit.engine.driver import Driver
from tests.unit.engine.test_fallback import assert_exact_in_chunks_cached_and_moved
from tests.unit.engine.tiny_models import SIZES, save_model

_TEXT: dict[str, Any] = SIZES | {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
_IMAGES = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
_QWEN_TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
_STRETCHED = {  # as of Ministral 3
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}


def _gemma3() -> PreTrainedModel:
    text = _TEXT | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(text_config=text, vision_config=_TOWER | _IMAGES, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def _mistral3() -> PreTrainedModel:
    text = _TEXT | {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False}
    tower = _TOWER | _IMAGES | {"model_type": "pixtral", "head_dim": 16}
    config = Mistral3Config(text_config=text, vision_config=tower, tie_word_embeddings=False)
    return Mistral3ForConditionalGeneration(config)


def _ministral3() -> PreTrainedModel:
    text = _TEXT | {"model_type": "ministral3", "rope_parameters": _STRETCHED, "tie_word_embeddings": False}
    tower = _TOWER | _IMAGES | {"model_type": "pixtral", "head_dim": 16}
    config = Mistral3Config(text_config=text, vision_config=tower, tie_word_embeddings=False)
    return Mistral3ForConditionalGeneration(config)


def _qwen2_5_vl() -> PreTrainedModel:
    text = {name: value for name, value in _TEXT.items() if name != "head_dim"} | {"rope_parameters": _MROPE}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=_QWEN_TOWER))


def _qwen3_vl() -> PreTrainedModel:
    tower = _QWEN_TOWER | {"deepstack_visual_indexes": [0]}
    text = _TEXT | {"rope_parameters": _MROPE}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower))


HALVES: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "ministral3": _ministral3,
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl": _qwen3_vl,
}


@pytest.mark.parametrize("settings", [{}, {"kernels": "torch"}, {"device": "cuda-on-cpu"}], ids=str)
@pytest.mark.parametrize("name", HALVES)
def test_text_has_the_logits_of_the_whole_model(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = save_model(HALVES[name], tmp_path)
    driver = Driver(tmp_path, **settings)
    assert "transformers" not in driver.engine.determinism
    assert_exact_in_chunks_cached_and_moved(model, driver)
    driver.close()


@pytest.mark.parametrize("name", HALVES)
def test_nothing_of_images_is_read_or_planned_for(name: str, tmp_path: Path) -> None:
    model: Any = save_model(HALVES[name], tmp_path)
    config, weights = read_model_config(tmp_path), MetaWeights()
    load_decoder(config.at_context(16), weights, TorchOps(), context_len=16, dtype=torch.float32)
    text = sum(each.numel() for each in model.model.language_model.parameters())
    if not config.tied_embeddings:
        text += model.lm_head.weight.numel()
    assert config.parameters == sum(weights.taken.values()) == text


def test_no_context_is_longer_than_queries_stay_as_they_are(tmp_path: Path) -> None:
    """Ministral 3 multiplies queries from the end of its first context on: the text before that is exact."""
    model: Any = save_model(HALVES["ministral3"], tmp_path)
    config = read_model_config(tmp_path)
    assert config.context_len == 256
    assert model.config.text_config.max_position_embeddings == 512
    tokens = torch.arange(300).unsqueeze(0) % config.vocab_size
    with torch.inference_mode():
        scaled = model(tokens).logits[0]
        model.config.text_config.rope_parameters["llama_4_scaling_beta"] = 0.0
        plain = model(tokens).logits[0]
    assert torch.equal(scaled[:256], plain[:256])
    assert not torch.equal(scaled[256:], plain[256:])


def test_a_decoder_that_the_architecture_does_not_tell_is_refused_by_name(tmp_path: Path) -> None:
    """Files of Mistral Small 4 name the architecture of Mistral Small 3.1, and have experts and MLA."""
    save_model(HALVES["mistral3"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    parse_model_config(config)
    config["text_config"]["model_type"] = "mistral4"
    with pytest.raises(
        ModelError, match="Mistral3ForConditionalGeneration: mistral4; supported are mistral, ministral3"
    ):
        parse_model_config(config)


GEMMA_4B: dict[str, Any] = {  # as published: what equals transformers' defaults is left out
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
QWEN_VL_7B: dict[str, Any] = {  # as published: the text's numbers lie beside those of the whole
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128_000,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1_000_000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280},
    "vocab_size": 152064,
}


def test_a_file_that_leaves_out_defaults_is_read() -> None:
    config = parse_model_config(GEMMA_4B)
    assert (config.vocab_size, config.heads, config.kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert (config.tied_embeddings, config.context_len) == (True, 131_072)
    windowed, full = config.ropes[0], config.ropes[5]
    assert windowed is not None
    assert full is not None
    assert (config.windows[0], windowed.scaling) == (1024, None)
    assert (config.windows[5], full.scaling is None) == (None, False)


def test_a_file_whose_numbers_are_not_apart_is_read() -> None:
    config = parse_model_config(QWEN_VL_7B)
    assert config.parameters == 7_615_616_512, "as many as Qwen2.5-7B"
    assert {rope and rope.scaling for rope in config.ropes} == {None}
    assert set(config.windows) == {None}


def test_weights_are_found_by_the_names_of_all_files() -> None:
    asked = ("model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    for embedding, found in (
        ("model.embed_tokens.weight", asked),
        (
            "language_model.model.embed_tokens.weight",
            ("language_model.model.layers.0.mlp.up_proj.weight", "language_model.lm_head.weight"),
        ),
        (
            "model.language_model.embed_tokens.weight",
            ("model.language_model.layers.0.mlp.up_proj.weight", "lm_head.weight"),
        ),
    ):
        assert tuple(map(stored_names([embedding]), asked)) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": [1]}, "text_config should hold an object, holds list"),
        ({"text_config": {}}, "lacks 'hidden_size'"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "its own code"),
        ({"quantization_config": {"quant_method": "awq"}}, "unsupported quantization: awq"),
    ],
)
def test_a_strange_file_is_one_sentence(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_4B | change))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)
