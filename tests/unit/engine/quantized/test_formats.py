"""`quantization_config` of published checkpoints is read, and what cannot be computed is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from shared.engine.checkpoint.model_config import parse_model_config
from shared.engine.quantized.formats import Quantization
from shared.engine.quantized.fp8_formats import Fp8Format, Scales
from shared.engine.quantized.unsupported import SUPPORTED
from shared.primitives.errors import ModelError
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.engine.checkpoint.test_foreign_configs import LLAMA
from tests.unit.engine.fp8_models import FORMATS

CHANNEL = FORMATS["channel"].config
BLOCK = FORMATS["block"].config
FIRST = "model.layers.0"
DENSE = [name for name, each in PUBLISHED.items() if not parse_model_config(each.config).has_experts]


def read(quantization: object, **config: Any) -> Quantization:
    found = parse_model_config(LLAMA | {"quantization_config": quantization} | config).quantization
    assert found is not None
    return found


def changed(part: str, **fields: Any) -> dict[str, Any]:
    """The format by channel with other fields in a part of its group."""
    group = CHANNEL["config_groups"]["group_0"]
    return CHANNEL | {"config_groups": {"group_0": group | {part: group[part] | fields}}}


def grouped(**fields: Any) -> dict[str, Any]:
    return CHANNEL | {"config_groups": {"group_0": CHANNEL["config_groups"]["group_0"] | fields}}


@pytest.mark.parametrize(
    ("name", "scales", "static"),
    [
        ("channel", Scales.CHANNEL, False),
        ("tensor", Scales.TENSOR, False),
        ("tensor, static", Scales.TENSOR, True),
        ("AutoFP8, static", Scales.TENSOR, True),
        ("fp8 by tensor, dynamic", Scales.TENSOR, False),
        ("block", Scales.BLOCK, False),
        ("block, compressed-tensors", Scales.BLOCK, False),
    ],
)
def test_each_format_is_read(name: str, scales: Scales, static: bool) -> None:
    found = read(FORMATS[name].config)
    assert isinstance(found.format, Fp8Format)
    assert (found.format.scales, found.format.static_inputs, found.kept) == (scales, static, ())
    assert found.format_of(f"{FIRST}.mlp.down_proj") == found.format
    assert found.format_of("lm_head") is found.format_of("model.embed_tokens") is None


def test_no_quantization_is_none() -> None:
    assert parse_model_config(LLAMA).quantization is None
    assert parse_model_config(LLAMA | {"quantization_config": None}).quantization is None


def test_an_older_name_of_the_field_is_read() -> None:
    assert parse_model_config(LLAMA | {"compression_config": CHANNEL}).quantization == read(CHANNEL)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": ["fp8"]}, "fp8"),
        ({"bits": 4}, "unnamed"),
        ("fp8", "fp8"),
        ([1], "1"),
        (CHANNEL | {"format": "int-quantized"}, "compressed-tensors of format int-quantized"),
        (CHANNEL | {"format": "nvfp4-pack-quantized"}, "of format nvfp4-pack-quantized"),
        (CHANNEL | {"format": "mixed-precision"}, "of format mixed-precision"),
        (CHANNEL | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (CHANNEL | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (CHANNEL | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (CHANNEL | {"config_groups": {}}, "of 0 groups of modules"),
        (CHANNEL | {"config_groups": {"a": {}, "b": {}}}, "of 2 groups of modules"),
        (CHANNEL | {"config_groups": None}, "of no groups of modules"),
        (CHANNEL | {"config_groups": {"a": 7}}, "of 7, not of all Linear"),
        (grouped(targets=["re:.*mlp.*"]), "not of all Linear"),
        (grouped(format="int-quantized"), "of format int-quantized"),
        (grouped(input_activations=None), "compressed-tensors without input_activations"),
        (grouped(weights=None), "compressed-tensors without weights"),
        (grouped(output_activations={"num_bits": 8}), "output_activations"),
        (changed("weights", num_bits=4), "weights of compressed-tensors in float4"),
        (changed("weights", type="int"), "weights of compressed-tensors in int8"),
        (changed("weights", symmetric=False), "asymmetric weights"),
        (changed("weights", dynamic=True), "dynamic weights"),
        (changed("weights", strategy="group", group_size=128), "of strategy group"),
        (changed("weights", strategy="block", block_structure=[64, 64]), "blocks of .64, 64."),
        (changed("weights", strategy="block", block_structure=[128, 128]), "scales by token, dynamic True"),
        (changed("input_activations", symmetric=False), "asymmetric input_activations"),
        (changed("input_activations", dynamic=False), "scales by token, dynamic False"),
        (changed("input_activations", dynamic="local"), "dynamic local"),
        (BLOCK | {"weight_block_size": [64, 128]}, "fp8 in blocks of .64, 128."),
        (BLOCK | {"weight_block_size": 128}, "fp8 in blocks of 128"),
        (BLOCK | {"activation_scheme": "static"}, "fp8 in blocks with activation_scheme static"),
        (BLOCK | {"activation_scheme": "none"}, "fp8 with activation_scheme none"),
        (BLOCK | {"fmt": "e5m2"}, "fp8 with fmt e5m2"),
        (BLOCK | {"scale_fmt": "ue8m0"}, "fp8 with scale_fmt ue8m0"),
        (BLOCK | {"modules_to_convert": ["embed_tokens"]}, "fp8 with modules_to_convert"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_in_one_sentence(quantization: object, message: str) -> None:
    with pytest.raises(ModelError, match=f"unsupported quantization: .*{message}") as caught:
        read(quantization)
    assert str(caught.value).endswith(f"; supported are {SUPPORTED}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("entries", [7, "lm_head", [1], {"a": 1}, ["a", None]], ids=str)
def test_a_list_of_modules_that_is_none_is_refused(entries: object) -> None:
    for config, name in ((CHANNEL, "ignore"), (BLOCK, "modules_to_not_convert")):
        with pytest.raises(ModelError, match="list of modules that are not quantized should hold names"):
            read(config | {name: entries})


def test_all_experts_of_a_layer_are_stored_as_its_first_one() -> None:
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    block = f"{FIRST}.block_sparse_moe"
    found = read(CHANNEL | {"ignore": ["re:.*gate$", "re:.*0.block_sparse_moe.experts.*"]}, **mixture)
    assert found.format_of(f"{block}.gate") is None
    assert found.format_of(f"{block}.experts.3.w2") is None
    assert found.format_of(f"{block.replace('0', '1')}.experts.3.w2") == found.format


def test_what_is_left_out_stays_in_16_bits() -> None:
    down = f"{FIRST}.mlp.down_proj"
    for config, entries in (
        (CHANNEL | {"ignore": [down, "lm_head"]}, (down,)),
        (CHANNEL | {"ignore": ["re:.*0.mlp.down.*"]}, (down,)),
        (BLOCK | {"modules_to_not_convert": [f"{FIRST}.mlp"]}, None),
        (BLOCK | {"ignored_layers": ["down_proj"]}, (down, "model.layers.1.mlp.down_proj")),
    ):
        found = read(config)
        if entries is not None:
            assert found.kept == entries
        assert found.format_of(down) is None
        assert found.format_of(f"{FIRST}.self_attn.o_proj") is not None


def test_parts_of_one_linear_have_one_format() -> None:
    names = f"{FIRST}.self_attn.q_proj fp8-channel, {FIRST}.self_attn.k_proj in 16 bits"
    with pytest.raises(ModelError, match=f"linears that are computed as one need one format, found {names}"):
        read(CHANNEL | {"ignore": [f"{FIRST}.self_attn.k_proj"]})


@pytest.mark.parametrize("name", ["channel", "tensor", "block"])
@pytest.mark.parametrize("model", DENSE)
def test_weights_of_published_models_take_about_half(model: str, name: str) -> None:
    """Of 16 bits, but for the embedding and the head; scales of whole blocks take 1/32 of a weight."""
    whole = PUBLISHED[model].config
    config = parse_model_config(whole | {"quantization_config": FORMATS[name].config})
    wide = parse_model_config(whole)
    linears = sum(outputs * inputs for group in config.linears() for _, outputs, inputs in group)
    saved = wide.weight_bytes(2) - config.weight_bytes(2)
    assert wide.weight_bytes(2) == 2 * wide.parameters
    assert linears * (1 - 1 / 25) < saved < linears
