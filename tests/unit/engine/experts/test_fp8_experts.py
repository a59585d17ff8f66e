"""Experts stored in 8 bits are kept so by the path of a GPU, and read into 32 bits by the CPU engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.engine.checkpoint.model_config import read_model_config
from shared.primitives.errors import ModelError
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.engine.driver import Driver
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES, sized
from tests.unit.engine.fp8_models import E4M3, FORMATS, _spread
from tests.unit.engine.test_fallback import assert_exact_in_chunks_cached_and_moved
from tests.unit.engine.tiny_models import save_model

ATTENTION = r"re:.*self_attn.*"
KEPT = [
    "lm_head",
    r"re:.*mlp.gate$",
    r"re:.*block_sparse_moe.gate$",
    ATTENTION,
    r"re:.*layers.0.mlp.(gate|up|down)_proj",
]
CASES = [
    ("qwen3-moe, 3 of 9, normalized", "block, compressed-tensors"),
    ("mixtral", "channel"),
    ("mixtral", "tensor"),
    ("glm4-moe, shared, a dense layer", "channel"),
]


def tiny_fp8_experts(family: str, form: str, folder: Path) -> Any:
    """Experts in 8 bits, all else as it was; returns transformers' model with the dequantized experts."""
    stored, model = FORMATS[form], save_model(EXPERT_FAMILIES[family], folder)
    weights = load_file(folder / "model.safetensors")
    parameters: dict[str, Tensor] = {name: each.data for name, each in model.named_parameters()}
    for name in [name for name in weights if re.search(r"\.experts\.\d+\.\w+\.weight", name)]:
        weight = weights[name]
        scale = stored.scales(weight)
        spread = _spread(scale, weight.shape)
        weights[name] = (weight / spread).to(E4M3)
        weights[name.replace(".weight", f".{stored.scale_name}")] = scale
        place = re.match(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        assert place is not None
        prefix, expert, part = place[1], int(place[2]), place[3]
        exact = weights[name].float() * spread
        if part in ("down_proj", "w2"):
            parameters[f"{prefix}.mlp.experts.down_proj"][expert] = exact
        else:
            first = 0 if part in ("gate_proj", "w1") else len(weight)
            parameters[f"{prefix}.mlp.experts.gate_up_proj"][expert, first : first + len(weight)] = exact
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change(folder, FORMATS[form].config | {"ignore": [*KEPT, "re:.*shared_experts.*"]})
    return model


def change(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


@pytest.mark.parametrize("settings", [{}, {"device": "cuda-on-cpu"}], ids=str)
@pytest.mark.parametrize(("inner", "hidden"), [(40, 64), (160, 224), (256, 256)])
@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_are_those_of_the_dequantized_weights(
    family: str, form: str, inner: int, hidden: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Of experts that no kernel reads packed; that do not begin at a block; and that do."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": inner}
    with sized(**sizes):
        model = tiny_fp8_experts(family, form, tmp_path)
    driver = Driver(tmp_path, slots=8, **settings)
    if "device" in settings:
        kept = f"fp8-{form.split(',')[0]}" if inner % 32 == 0 else "float32"
        assert f"experts in {kept}, KV" in driver.engine.description
    assert_exact_in_chunks_cached_and_moved(model, driver)
    driver.close()


def test_an_expert_in_another_type_than_the_first_is_one_sentence(tmp_path: Path) -> None:
    tiny_fp8_experts("mixtral", "channel", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    weights[name] = weights[name].bfloat16()
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"experts.2.w1.weight is BF16; expected F8_E4M3"):
        Driver(tmp_path, kernels="torch")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_one_sentence(code: int, tmp_path: Path) -> None:
    """Of any expert: the first token may not choose it, and kernels that read packed ones take it for 480."""
    with sized(hidden_size=224, intermediate_size=160, moe_intermediate_size=160):
        tiny_fp8_experts("mixtral", "channel", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    weights[name].view(torch.uint8)[7, 9] = code
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"layers\.1\..*experts\.2\.w2\.weight holds codes that are no numbers"
    ):
        Driver(tmp_path, device="cuda-on-cpu")


def test_experts_that_are_left_out_are_read_as_they_are(tmp_path: Path) -> None:
    model = save_model(EXPERT_FAMILIES["mixtral"], tmp_path)
    change(tmp_path, FORMATS["channel"].config | {"ignore": [*KEPT, "re:.*experts.*"]})
    driver = Driver(tmp_path, kernels="torch")
    assert_exact_in_chunks_cached_and_moved(model, driver)
    driver.close()


def test_the_published_list_of_qwen3_30b_a3b_fp8_is_read(tmp_path: Path) -> None:
    kept = ["lm_head"]
    for layer in range(48):
        kept += [
            f"model.layers.{layer}.{name}"
            for name in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
        ]
    config = PUBLISHED["Qwen3-30B-A3B"].config | {
        "quantization_config": FORMATS["block"].config | {"modules_to_not_convert": kept}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization = read_model_config(tmp_path).quantization
    assert quantization is not None
    assert quantization.format_of("model.layers.7.mlp.experts.99.down_proj") == quantization.format
    assert quantization.format_of("model.layers.7.self_attn.o_proj") == quantization.format
