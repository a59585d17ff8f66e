"""Experts stored in 4 bits: a CPU computes with what they mean, exactly, and a GPU keeps them packed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from shared.engine.checkpoint.model_config import parse_model_config
from shared.primitives.errors import ModelError
from tests.unit.engine.driver import Driver
from tests.unit.engine.fp8_models import linears
from tests.unit.engine.int4_models import INT4_FORMATS, WIDE, numbers_of
from tests.unit.engine.test_fallback import assert_exact_in_chunks_cached_and_moved
from tests.unit.engine.tiny_models import save_model


def qwen3_moe() -> Any:
    """Five experts, of which a token takes two."""
    sizes: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**WIDE | sizes | {"head_dim": 32, "norm_topk_prob": True}))


def mixtral() -> Any:
    """Four experts, of which a token takes two."""
    return MixtralForCausalLM(MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2))


def tiny_int4_experts(make: Any, name: str, folder: Path, ignore: list[str]) -> Any:
    """All linears but routers in 4 bits; returns transformers' model with the dequantized ones."""
    form, model = INT4_FORMATS[name], save_model(make, folder)
    weights = load_file(folder / "model.safetensors")
    parameters: dict[str, Tensor] = {name: each.data for name, each in model.named_parameters()}
    for linear, module in linears(model).items():
        found = numbers_of(module.weight.detach(), form.group, symmetric=form.symmetric)
        del weights[f"{linear}.weight"]
        weights |= {f"{linear}.{part}": tensor for part, tensor in form.write(found).items()}
        module.weight.data = found.exact
    for stored in [each for each in weights if re.search(r"\.experts\.\d+\.\w+\.weight$", each)]:
        found = numbers_of(weights.pop(stored), form.group, symmetric=form.symmetric)
        linear = stored.removesuffix(".weight")
        weights |= {f"{linear}.{part}": tensor for part, tensor in form.write(found).items()}
        place = re.match(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)", linear)
        assert place is not None
        prefix, expert, part = f"{place[1]}.mlp.experts", int(place[2]), place[3]
        if part in ("down_proj", "w2"):
            parameters[f"{prefix}.down_proj"][expert] = found.exact
        else:
            first = 0 if part in ("gate_proj", "w1") else len(found.numbers)
            rows = slice(first, first + len(found.numbers))
            parameters[f"{prefix}.gate_up_proj"][expert, rows] = found.exact
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    left_out = {"modules_to_not_convert" if "awq" in name else "ignore": ignore} if ignore else {}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": form.config | left_out})
    )
    return model


@pytest.mark.parametrize(
    ("make", "name", "ignore"),
    [
        (qwen3_moe, "awq", ["mlp.gate"]),
        (mixtral, "awq", ["gate"]),
        (qwen3_moe, "gptq, asym", []),
        (mixtral, "gptq, asym", []),
        (qwen3_moe, "packed, asym", ["lm_head", "re:.*mlp.gate$"]),
    ],
)
def test_logits_are_those_of_the_dequantized_weights(
    make: Any, name: str, ignore: list[str], tmp_path: Path
) -> None:
    model = tiny_int4_experts(make, name, tmp_path, ignore)
    driver = Driver(tmp_path, kernels="torch")
    assert_exact_in_chunks_cached_and_moved(model, driver)
    driver.close()


def test_the_description_says_that_experts_stay_packed(tmp_path: Path) -> None:
    tiny_int4_experts(mixtral, "packed, asym", tmp_path, ["lm_head", "re:.*gate$"])
    driver = Driver(tmp_path, slots=8, device="cuda-on-cpu")
    assert (
        "float32 and int4-packed-32 dequantized, experts in int4-packed-32, KV" in driver.engine.description
    )
    driver.close()


def test_a_group_that_does_not_divide_an_expert_is_refused_before_weights_are_read() -> None:
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    config = Qwen3MoeConfig(**WIDE | sizes | {"head_dim": 32}, architectures=["Qwen3MoeForCausalLM"])
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    with pytest.raises(ModelError, match=r"experts\.0\.down_proj has 96 inputs .* whole groups of 128"):
        parse_model_config(json.loads(config.to_json_string()) | {"quantization_config": awq})
