"""`quantization_config` of checkpoints in 4 bits is read, and what cannot be computed is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from shared.engine.checkpoint.model_config import parse_model_config
from shared.engine.quantized.int4_formats import Int4Format, Packing
from shared.engine.quantized.patterns import STEPS_MAX, NameMatch, NamesKept
from shared.engine.quantized.unsupported import SUPPORTED
from shared.primitives.errors import ModelError
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.engine.int4_models import INT4_FORMATS
from tests.unit.engine.quantized.test_formats import DENSE, FIRST, read

QWEN3 = PUBLISHED["Qwen3-0.6B"].config
AWQ = INT4_FORMATS["awq"].config
GPTQ = INT4_FORMATS["gptq, sym"].config
PACKED = INT4_FORMATS["packed"].config


def packed(part: str = "weights", **fields: Any) -> dict[str, Any]:
    """The packed format with other fields in a part of its group."""
    group = PACKED["config_groups"]["group_0"]
    return PACKED | {"config_groups": {"group_0": group | {part: group[part] | fields}}}


@pytest.mark.parametrize("name", INT4_FORMATS)
def test_each_format_is_read(name: str) -> None:
    written = INT4_FORMATS[name]
    found = read(written.config, **QWEN3)
    assert isinstance(found.format, Int4Format)
    assert (found.format.name, found.format.group, found.kept) == (written.name, written.group, ())
    assert found.format_of(f"{FIRST}.mlp.down_proj") == found.format
    assert found.format_of("lm_head") is found.format_of("model.embed_tokens") is None


@pytest.mark.parametrize(
    "more",
    [
        {"version": "GEMM"},
        {"version": None, "format": "gemm", "backend": "auto", "checkpoint_format": "gemm", "sym": False},
        {"backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None},
    ],
    ids=str,
)
def test_settings_that_change_nothing_are_passed_over(more: dict[str, Any]) -> None:
    assert read(AWQ | more, **QWEN3).format == Int4Format(Packing.AWQ, 64)


def test_what_qwen_publishes_of_gptq_is_read() -> None:
    published = {
        "batch_size": 1,
        "bits": 4,
        "block_name_to_quantize": None,
        "cache_block_outputs": True,
        "damp_percent": 0.01,
        "dataset": None,
        "desc_act": False,
        "exllama_config": {"version": 1},
        "group_size": 128,
        "max_input_length": None,
        "model_seqlen": None,
        "modules_in_block_to_quantize": None,
        "quant_method": "gptq",
        "sym": True,
        "tokenizer": None,
        "true_sequential": True,
        "use_cuda_fp16": False,
        "use_exllama": True,
    }
    assert read(published, **QWEN3).format == Int4Format(Packing.GPTQ, 128)


def test_older_names_of_awq_are_read() -> None:
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM", "zero_point": True}
    assert read(older, **QWEN3).format == Int4Format(Packing.AWQ, 128)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (AWQ | {"bits": 8}, "awq of 8 bits, not of 4"),
        (AWQ | {"bits": None}, "awq of None bits"),
        (AWQ | {"group_size": 48}, "awq in groups of 48, not of 32, 64, 128, 256 or all"),
        (AWQ | {"group_size": "128"}, "awq in groups of 128, not of"),
        (AWQ | {"group_size": None}, "awq in groups of None"),
        (AWQ | {"version": "gemv"}, "awq of version gemv, not gemm"),
        (AWQ | {"version": "marlin"}, "awq of version marlin"),
        (AWQ | {"version": None, "format": "gemv_fast"}, "awq of version gemv_fast"),
        (AWQ | {"zero_point": False}, "awq with zero_point False"),
        (AWQ | {"backend": "llm-awq"}, "awq with backend llm-awq"),
        (GPTQ | {"bits": 3}, "gptq of 3 bits"),
        (GPTQ | {"group_size": 1024}, "gptq in groups of 1024"),
        (GPTQ | {"desc_act": True}, "gptq with desc_act True"),
        (GPTQ | {"is_marlin_format": True}, "gptq with is_marlin_format True"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq of checkpoint_format marlin"),
        (GPTQ | {"checkpoint_format": ["gptq"]}, "gptq of checkpoint_format"),
        (GPTQ | {"lm_head": True}, "gptq with lm_head True"),
        (GPTQ | {"pack_dtype": "int64"}, "gptq with pack_dtype int64"),
        (GPTQ | {"modules_in_block_to_quantize": [["a"]]}, "gptq with modules_in_block_to_quantize"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "gptq with dynamic"),
        (GPTQ | {"dynamic": [1]}, "gptq with dynamic"),
        (packed(num_bits=8), "pack-quantized of 8 bits"),
        (packed(type="float"), "weights of pack-quantized in float"),
        (packed(group_size=16), "pack-quantized in groups of 16"),
        (packed(group_size=None), "pack-quantized in groups of None"),
        (packed(strategy="tensor"), "pack-quantized of strategy tensor"),
        (packed(strategy="block"), "pack-quantized of strategy block"),
        (packed(dynamic=True), "pack-quantized with dynamic True"),
        (packed(actorder="group"), "pack-quantized with actorder group"),
        (
            PACKED
            | {
                "config_groups": {
                    "a": PACKED["config_groups"]["group_0"] | {"input_activations": {"num_bits": 8}}
                }
            },
            "input_activations of pack-quantized",
        ),
        (
            PACKED | {"config_groups": {"a": {"targets": ["Linear"], "weights": None}}},
            "compressed-tensors without weights",
        ),
        (PACKED | {"format": "marlin-24"}, "compressed-tensors of format marlin-24"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_in_one_sentence(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"unsupported quantization: .*{message}") as caught:
        read(quantization, **QWEN3)
    assert str(caught.value).endswith(f"; supported are {SUPPORTED}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["awq", "packed", "packed, channel"])
def test_sizes_that_groups_do_not_divide_are_refused_before_weights_are_read(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"mlp.down_proj has 3000 inputs and 1024 outputs; int4-.* needs whole groups"
    ):
        read(INT4_FORMATS[name].config, **QWEN3 | {"intermediate_size": 3000})
    with pytest.raises(
        ModelError, match=r"mlp.gate_proj has 1024 inputs and 3076 outputs; .* whole words of 8"
    ):
        read(INT4_FORMATS[name].config, **QWEN3 | {"intermediate_size": 3076})


def test_awq_leaves_out_every_module_whose_name_has_an_entry_in_it() -> None:
    """As AutoAWQ does."""
    found = read(AWQ | {"modules_to_not_convert": ["self_attn", "0.mlp.down"]}, **QWEN3)
    for name, kept in (("self_attn.o_proj", True), ("mlp.down_proj", True), ("mlp.gate_proj", False)):
        assert (found.format_of(f"{FIRST}.{name}") is None) == kept
    assert found.format_of("model.layers.1.mlp.down_proj") == found.format


def test_a_search_for_parts_of_names_is_bounded() -> None:
    names = [f"model.layers.{number}.mlp.down_proj" for number in range(500)]
    NamesKept([str(number) * 9 for number in range(9000)], NameMatch.PARTS).among(names)
    with pytest.raises(ModelError, match=f"at most {STEPS_MAX:,} are made"):
        NamesKept([str(number) * 9 for number in range(30_000)], NameMatch.PARTS).among(names)


def test_gptq_leaves_out_what_its_rules_say_and_routers() -> None:
    rules: dict[str, Any] = {r"-:model\.layers\.0\.mlp\..*": {}, "-:lm_head": {}}
    found = read(GPTQ | {"dynamic": rules}, **QWEN3)
    assert found.format_of(f"{FIRST}.mlp.down_proj") is None
    assert found.format_of("model.layers.1.mlp.down_proj") == found.format
    experts = parse_model_config(
        PUBLISHED["Qwen3-30B-A3B"].config | {"quantization_config": GPTQ}
    ).quantization
    assert experts is not None
    assert experts.format_of("model.layers.3.mlp.gate") is None
    assert experts.format_of("model.layers.3.mlp.experts.7.gate_proj") == experts.format


@pytest.mark.parametrize("name", ["awq", "packed, channel"])
@pytest.mark.parametrize("model", DENSE)
def test_weights_of_published_models_take_about_a_quarter(model: str, name: str) -> None:
    """Of 16 bits, but for the embedding and the head; a scale and a zero of 64 numbers take 4 bytes beside their 32."""
    whole = PUBLISHED[model].config
    wide = parse_model_config(whole)
    config = parse_model_config(whole | {"quantization_config": INT4_FORMATS[name].config})
    linears = sum(outputs * inputs for group in config.linears() for _, outputs, inputs in group)
    saved = wide.weight_bytes(2) - config.weight_bytes(2)
    assert 1.43 * linears < saved < 1.5 * linears
