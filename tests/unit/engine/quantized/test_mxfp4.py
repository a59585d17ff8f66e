"""MXFP4 checkpoints are read as transformers reads them, and what is not one is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shared.engine.checkpoint.experts_config import Storage
from shared.engine.checkpoint.model_config import read_model_config
from shared.engine.quantized.mxfp4 import dequantized
from shared.primitives.errors import ModelError
from tests.unit.engine.driver import Driver
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES
from tests.unit.engine.quantized.mxfp4_models import change, store_in_mxfp4
from tests.unit.engine.test_fallback import assert_exact_in_chunks_cached_and_moved
from tests.unit.engine.tiny_models import save_model

GPT_OSS = "gpt-oss, sinks, windows, biases"


def quantized_model(folder: Path) -> Any:
    """A tiny gpt-oss in MXFP4, and transformers' model of the same numbers."""
    model = save_model(EXPERT_FAMILIES[GPT_OSS], folder)
    store_in_mxfp4(model, folder)
    return model


def test_every_byte_and_scale_is_what_transformers_reads() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)
    scales = torch.tensor([[100, 120, 127, 128, 130, 90, 140, 127]] * 2, dtype=torch.uint8).view(1, 2, 8)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantized(blocks[0], scales[0]), wanted[0].t())


def test_bfloat16_holds_them_exactly() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    for scale in (60, 127, 190):
        found = dequantized(blocks, torch.full((16, 1), scale, dtype=torch.uint8))
        assert torch.equal(found.bfloat16().float(), found)


@pytest.mark.parametrize("settings", [{}, {"device": "cuda-on-cpu"}], ids=str)
def test_logits_are_those_of_the_dequantized_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    model = quantized_model(tmp_path)
    experts = read_model_config(tmp_path).experts[0]
    assert experts is not None
    assert experts.storage is Storage.MXFP4
    driver = Driver(tmp_path, **settings)
    kept = ", experts in mxfp4, KV" if "device" in settings else "bfloat16 of mxfp4, computed in float32, KV"
    assert kept in driver.engine.description
    assert_exact_in_chunks_cached_and_moved(model, driver)
    driver.close()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("down_proj_scales", None, "no weight named .*down_proj_scales"),
        ("gate_up_proj_blocks", lambda blocks: blocks[:, :, :1], "gate_up_proj_blocks should have shape"),
        ("down_proj_blocks", Tensor.float, "down_proj_blocks is F32; expected U8, as quantization_config"),
        ("down_proj_scales", lambda scales: scales.to(torch.int8), "down_proj_scales is I8; expected"),
        ("down_proj_scales", lambda scales: scales * 0 + 149, r"a scale of 2\^22: expected at most 2\^21"),
    ],
)
def test_what_is_damaged_is_one_sentence(name: str, damage: Any, message: str, tmp_path: Path) -> None:
    quantized_model(tmp_path)
    path = tmp_path / "model.safetensors"
    weights, full = load_file(path), f"model.layers.0.mlp.experts.{name}"
    stored = weights.pop(full)
    if damage is not None:
        weights[full] = damage(stored).contiguous()
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        Driver(tmp_path, kernels="torch")


def test_inputs_that_no_block_divides_are_refused(tmp_path: Path) -> None:
    quantized_model(tmp_path)
    change(tmp_path, intermediate_size=80)
    with pytest.raises(ModelError, match=r"80 inputs: expected whole blocks of 32|should have shape"):
        Driver(tmp_path, kernels="torch")


def test_other_families_may_not_be_stored_so(tmp_path: Path) -> None:
    save_model(EXPERT_FAMILIES["mixtral"], tmp_path)
    change(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match="unsupported quantization: mxfp4; supported are"):
        read_model_config(tmp_path)
