"""A model folder is read completely and exactly, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.checkpoint.model_config import parse_model_config, read_eos_token_ids, read_model_config
from shared.engine.checkpoint.rope_config import FixedFactors, LinearScaling, Rope, YarnScaling
from shared.engine.checkpoint.weight_files import weight_files
from shared.engine.config import Budget, EngineConfig
from shared.engine.engine import load
from shared.engine.model.loading import load_decoder
from shared.engine.model.torch_ops import TorchOps
from shared.engine.model.weights import model_fingerprint
from shared.primitives.errors import ConfigError, ModelError
from tests.unit.engine.checkpoint.published_models import PUBLISHED, MetaWeights, Published
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.tiny_models import tiny_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}
MISTRAL, QWEN2 = (LLAMA | {"architectures": [f"{name}ForCausalLM"]} for name in ("Mistral", "Qwen2"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["OlmoeForCausalLM"]}, "OlmoeForCausalLM; supported are .*, Llama, "),
        ({"architectures": None, "model_type": "bert"}, "none named .model_type 'bert'."),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "its own code"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}, "its own code"),
        (
            {"architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoModelForCausalLM": "evil.Model"}},
            "its own code",
        ),
        ({"architectures": ["Phi3ForCausalLM"], "auto_map": "modeling_phi3.Phi3ForCausalLM"}, "its own code"),
        ({"quantization_config": {"quant_method": "awq"}}, "unsupported quantization: awq"),
        ({"hidden_act": "gelu"}, "unsupported activation: gelu"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "unsupported rope type: dynamic; supported are default, linear, llama3, yarn, longrope",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "longrope should have 8 short and long factors, has 1 and 1",
        ),
        ({"use_bidirectional_attention": True}, "unsupported attention: bidirectional"),
        (
            {"architectures": ["LlavaForConditionalGeneration"]},
            "unsupported architecture: LlavaForConditionalGeneration",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
            "no_rope_layers names 2 layers, the model has 3",
        ),
        ({"partial_rotary_factor": 0.5}, "unsupported partial_rotary_factor"),
        (
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "layer types: linear_attention",
        ),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"num_key_value_heads": 3}, "cannot share 3 key-value heads"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_model_config(LLAMA | change)


def test_code_that_a_file_of_phi_3_names_is_passed_over_for_the_familys() -> None:
    """So are the files of Phi-3, Phi-3.5 and Phi-4-mini; transformers takes its own code for them as well."""
    phi = LLAMA | {"architectures": ["Phi3ForCausalLM"]}
    names = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    assert parse_model_config(phi | {"auto_map": names}) == parse_model_config(phi)
    saved_again = {name: f"microsoft/Phi-3-mini-4k-instruct--{given}" for name, given in names.items()}
    assert parse_model_config(phi | {"auto_map": saved_again}) == parse_model_config(phi)


def test_rope_is_read_from_old_and_new_files() -> None:
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    old = parse_model_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
    new = parse_model_config(LLAMA | {"rope_parameters": scaling | {"rope_theta": 5e5}})
    assert old == new
    (rope,) = set(old.ropes)
    assert rope is not None
    assert rope.theta == 5e5
    assert rope.scaling is not None


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA | {"sliding_window": 9}, (None, None, None)),
        (MISTRAL | {"sliding_window": 9}, (9, 9, 9)),
        (MISTRAL | {"sliding_window": None}, (None, None, None)),
        (MISTRAL, (4096, 4096, 4096)),
        (QWEN2 | {"sliding_window": 9}, (None, None, None)),
        (QWEN2 | {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 9)),
    ],
)
def test_windows_are_those_of_the_family(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse_model_config(config).windows == windows


GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 9}
SMOLLM3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"]}
LONGROPE = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def test_gemma3_has_a_rope_for_windowed_layers_and_one_for_the_sixth() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = parse_model_config(
        GEMMA3 | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling}
    )
    local, distant = Rope(1e4, 256), Rope(1e6, 256, LinearScaling(8.0))
    assert config.windows == (9, 9, 9, 9, 9, None, 9)
    assert config.ropes == (local, local, local, local, local, distant, local)
    by_kind = {
        "full_attention": scaling | {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert parse_model_config(GEMMA3 | {"rope_parameters": by_kind}).ropes == config.ropes
    assert config.tied_embeddings, "Gemma's files leave it out"


def test_a_fourth_of_smollm3_does_not_rotate() -> None:
    rotating = [rope is not None for rope in parse_model_config(SMOLLM3).ropes]
    assert rotating == [True, True, True, False, True]
    listed = parse_model_config(SMOLLM3 | {"no_rope_layers": [0, 1, 1, 1, 0]}).ropes
    assert [rope is not None for rope in listed] == [False, True, True, True, False]


def test_the_context_chooses_the_factors_of_longrope() -> None:
    config = parse_model_config(PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 512})
    short, long = (config.at_context(context_len).ropes[0] for context_len in (512, 513))
    assert short is not None
    assert long is not None
    assert isinstance(short.scaling, FixedFactors)
    assert isinstance(long.scaling, FixedFactors)
    assert (short.scaling.factors[0], long.scaling.factors[0]) == (1.0, 2.0)
    assert config.at_context(9).at_context(513) == config.at_context(9), "it is chosen once"
    plain = parse_model_config(LLAMA)
    assert plain.at_context(1) == plain


def test_yarn_stretches_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert parse_model_config(LLAMA | {"rope_scaling": yarn}).context_len == 4096
    assert (
        parse_model_config(LLAMA | {"rope_scaling": yarn, "max_position_embeddings": 5000}).context_len
        == 5000
    )


def test_yarns_factor_of_attention_has_two_names() -> None:
    """That of DeepSeek-R1-0528-Qwen3-8B multiplies what would be taken without it, as in vLLM and SGLang."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found = [
        parse_model_config(LLAMA | {"rope_scaling": yarn | named}).ropes[0]
        for named in ({}, {"attn_factor": 0.8782488562869419}, {"attention_factor": 1.0})
    ]
    factors = [
        rope.scaling.attention_factor for rope in found if rope and isinstance(rope.scaling, YarnScaling)
    ]
    assert factors == pytest.approx([1.138629, 1.0, 1.0], abs=1e-6)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _pickle_instead(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")


def _reshape_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(71)
    save_file(weights, folder / "model.safetensors")


def _store_integers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(72, dtype=torch.int8)
    save_file(weights, folder / "model.safetensors")


def _leave_a_list(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _drop_a_shard(folder: Path) -> None:
    _leave_a_list(folder)
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")


def _point_outside(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _leave_a_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")


def _drop_the_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _cut_the_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["Llama')


def _forget_a_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))


def test_a_list_of_other_shards_beside_a_model_in_one_file_is_passed_over(tmp_path: Path) -> None:
    """As transformers does: whoever quantizes a model may copy the list of the shards that it was made of."""
    tiny_model("mistral", tmp_path)
    expected = weight_files(tmp_path)
    _leave_a_list(tmp_path)
    assert weight_files(tmp_path) == expected == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "not a complete safetensors file .*: fetch it again"),
        (_leave_a_pointer, "git lfs pull"),
        (_pickle_instead, "pytorch_model.bin is never read"),
        (_drop_a_weight, "no weight named model.layers.1.mlp.up_proj.weight.*fetch the folder again"),
        (_reshape_a_weight, r"model.norm.weight should have shape \[72\], has \[71\]"),
        (_store_integers, "supported are unquantized floating-point weights"),
        (_drop_a_shard, "lacks model-00001-of-00002.safetensors"),
        (_point_outside, "outside its folder"),
        (_drop_the_config, "holds no config.json"),
        (_cut_the_config, "cannot be read as JSON"),
        (_forget_a_size, "lacks 'hidden_size'"),
    ],
)
def test_a_damaged_folder_is_one_sentence(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    tiny_model("mistral", tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path, EngineConfig(pages=4, page_size=16, slots=64))


@pytest.mark.parametrize(
    "settings",
    [{}, {"kernels": "torch"}, {"model_impl": "transformers"}, {"device": "cuda-on-cpu"}],
    ids=lambda settings: "-".join(settings.values()) or "compiled",
)
def test_weights_that_give_no_numbers_are_found_at_start(settings: dict[str, Any], tmp_path: Path) -> None:
    tiny_model("mistral", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"numbers, the first ones are not \(NaN\)"):
        load(tmp_path, EngineConfig(pages=4, page_size=16, slots=4, **settings))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compiled_kernels_keep_matrices_of_16_bits_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_model("mistral", tmp_path)
    path = tmp_path / "model.safetensors"
    narrow = {name: weight.to(dtype) for name, weight in load_file(path).items()}
    save_file(narrow, path, {"format": "pt"})
    first, described, nbytes = _logits_of(tmp_path)
    matrices = sum(weight.numel() for weight in narrow.values() if weight.dim() == 2)
    numbers = sum(weight.numel() for weight in narrow.values())
    assert nbytes == matrices * dtype.itemsize + (numbers - matrices) * 4
    name = str(dtype).removeprefix("torch.")
    assert f"weights {name}, " + ("KV" if dtype is torch.float32 else "computed in float32") in described
    save_file({name: weight.float() for name, weight in narrow.items()}, path, {"format": "pt"})
    second, _, _ = _logits_of(tmp_path)
    assert torch.equal(first, second)
    _, by_torch, nbytes = _logits_of(tmp_path, kernels="torch")
    assert nbytes == numbers * 4, by_torch


def test_a_head_that_is_the_embedding_counts_again_where_torch_keeps_a_copy(tmp_path: Path) -> None:
    tiny_model("mistral", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = {name: each.bfloat16() for name, each in load_file(path).items() if name != "lm_head.weight"}
    save_file(weights, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    numbers = sum(weight.numel() for weight in weights.values())
    vectors = sum(weight.numel() for weight in weights.values() if weight.dim() == 1)
    assert _logits_of(tmp_path)[2] == 2 * (numbers + vectors)
    copy = weights["model.embed_tokens.weight"].numel()
    assert _logits_of(tmp_path, kernels="torch")[2] == 4 * (numbers + copy)


def _logits_of(folder: Path, **settings: Any) -> tuple[torch.Tensor, str, int]:
    """Of a prompt and two tokens, what the engine says of itself, and the bytes of weights that it counts."""
    driver = Driver(folder, **settings)
    driver.prefill(0, tokens_of(3, 37, 100), [1, 2, 3])
    driver.decode([0], 2)
    driver.close()
    engine = driver.engine
    return torch.stack(driver.logits[0]), engine.description, engine.memory["weights"]


def test_a_changed_weight_or_tokenizer_changes_the_fingerprint(tmp_path: Path) -> None:
    tiny_model("mistral", tmp_path)
    shape = read_model_config(tmp_path).canonical

    def fingerprint() -> str:
        return model_fingerprint(tmp_path, shape, torch.float32)

    first = fingerprint()
    assert fingerprint() == first
    assert model_fingerprint(tmp_path, shape, torch.bfloat16) != first
    (tmp_path / "tokenizer.json").write_text("{}")
    second = fingerprint()
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: weight * 1.001 for name, weight in weights.items()}, tmp_path / "model.safetensors")
    assert len({first, second, fingerprint()}) == 3


def test_ends_are_gathered_from_all_files(tmp_path: Path) -> None:
    def write(name: str, content: object) -> None:
        (tmp_path / name).write_text(json.dumps(content))

    write("config.json", {"eos_token_id": 5})
    assert read_eos_token_ids(tmp_path) == {5}
    write("generation_config.json", {"eos_token_id": [5, 8]})
    write("tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    write(
        "tokenizer.json", {"added_tokens": [{"id": 9, "content": "<|im_end|>"}, {"id": 1, "content": "<s>"}]}
    )
    assert read_eos_token_ids(tmp_path) == {5, 8, 9}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "unsupported device: tpu; supported are auto, cpu, cuda, cuda-on-cpu"),
        ({"dtype": "float8"}, "unsupported dtype: float8"),
        ({"context_len": 10_000}, "between 1 and the model's 512"),
        ({"kv_cache_dtype": "int8"}, "unsupported kv_cache_dtype: int8"),
        ({"kernels": "sse9"}, "unknown instruction set: sse9; expected auto, avx512, avx2, plain"),
        ({"page_size": 8}, "page_size must be one of 16, 32, 64, 128"),
        ({"page_size": 24, "kernels": "torch"}, "page_size must divide 128"),
        ({"pages": 10**9, "budget": Budget(2**31, "a test")}, "pages need"),
    ],
)
def test_a_wrong_setting_is_one_sentence(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_model("mistral", tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, EngineConfig(**{"pages": 4, "page_size": 16, "slots": 64} | settings))


def test_a_loaded_engine_says_what_it_is(tmp_path: Path) -> None:
    tiny_model("mistral", tmp_path)
    engine = load(tmp_path, EngineConfig(pages=10, page_size=16, slots=3))
    engine.device.close()
    limits = engine.limits
    assert (limits.context_len, limits.page_size, limits.pages, limits.slots) == (160, 16, 10, 3)
    assert engine.cache.nbytes == 10 * engine.cache.page_bytes
    assert engine.cache.page_bytes == 2 * 2 * 2 * 16 * 12 * 4  # layers, K|V, heads, slots, head_dim, bytes
    assert engine.cache.address == engine.cache.store.data_ptr()
    assert engine.eos_token_ids == {3}
    assert (
        "10 KV pages of 16 tokens (as configured), context 160 tokens (all that the pages hold)"
        in engine.description
    )


# ---- the configs of published models are read as their authors mean them ---------------------------------------------


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_config_is_read(published: Published, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    config = read_model_config(tmp_path)
    assert config.parameters == published.parameters
    assert config.computed == (published.computed or published.parameters)
    assert config.heads == published.group * config.kv_heads
    assert max(config.windows, key=lambda window: window or 0) == published.window
    assert config.head_dim == published.head_dim
    weights = MetaWeights()
    load_decoder(config, weights, TorchOps(), context_len=16, dtype=torch.bfloat16)
    assert sum(weights.taken.values()) == published.parameters, "what is loaded is what is planned for"


def test_rope_is_scaled_where_the_config_says_so() -> None:
    scaled = [
        name
        for name, each in PUBLISHED.items()
        if any(rope and rope.scaling for rope in parse_model_config(each.config).ropes)
    ]
    assert scaled == ["Llama-3.1-8B", "gpt-oss-20b", "gpt-oss-120b"]
