"""The configs of published models are read as their authors mean them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shared.engine.checkpoint.model_config import parse_model_config, read_model_config
from shared.engine.model.decoder import DecoderModel
from shared.engine.model.torch_ops import TorchOps
from tests.unit.engine.checkpoint.published_models import PUBLISHED, MetaWeights, Published


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_config_is_read(published: Published, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    config = read_model_config(tmp_path)
    assert config.parameters == published.parameters
    assert config.heads == published.group * config.kv_heads
    assert set(config.windows) == {published.window}
    assert config.head_dim == (64 if config.hidden_size == 576 else 128)
    weights = MetaWeights()
    DecoderModel(config, weights, TorchOps(), context_len=16, dtype=torch.bfloat16)
    assert sum(weights.taken.values()) == published.parameters, "what is loaded is what is planned for"


def test_rope_is_scaled_where_the_config_says_so() -> None:
    scaled = [
        name
        for name, each in PUBLISHED.items()
        if any(rope and rope.scaling for rope in parse_model_config(each.config).ropes)
    ]
    assert scaled == ["Llama-3.1-8B"]
