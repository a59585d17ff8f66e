"""A folder that cannot be served is refused in one sentence, before its weights are read: never with a traceback."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from router.text.tokenizer import Tokenizer
from shared.engine.checkpoint.model_impl import read_config
from shared.primitives.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
}
GROWTH_BYTES_MAX = 256 << 20


def _write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def _made(kind: str) -> Any:
    """The default configuration of a model type; None where transformers cannot make one."""
    try:
        return getattr(transformers, CONFIG_MAPPING_NAMES[kind])()
    except Exception:
        return None


def test_every_configuration_of_transformers_is_read_or_refused_in_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """Text decoders and models of images: Gemma 3 and 4, Bloom, MPT, Llama 4 and others ended in a traceback."""
    caplog.set_level(logging.CRITICAL)
    read: list[str] = []
    refused: dict[str, str] = {}
    for kinds in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for kind, architecture in kinds.items():
            config = _made(kind)
            if config is None:
                continue
            config.architectures = [architecture]
            folder = tmp_path / f"{kind}-{architecture}"
            config.save_pretrained(folder)
            try:
                shape = read_config(folder)
                assert shape.vocab_size > 0
                read.append(architecture)
            except ModelError as error:
                refused.setdefault(architecture, str(error))
    recwarn.clear()
    assert len(read) > 100
    assert len(refused) > 70
    assert not [
        sentence for sentence in refused.values() if "\n" in sentence or "cannot be read:" in sentence
    ]
    assert any("takes more than text" in sentence for sentence in refused.values())
    assert "is no text decoder" in refused["LlavaForConditionalGeneration"]
    assert "layers of different shapes" in refused["Gemma4ForCausalLM"]
    assert "max_position_embeddings" in refused["BloomForCausalLM"]
    assert any("sinks" in sentence for sentence in refused.values())
    assert {"GptOssForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM"} <= set(read)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1e.09, expected 0 to 1,024"),
        (LLAMA | {"num_hidden_layers": float("inf")}, "num_hidden_layers is inf"),
        (LLAMA | {"num_attention_heads": -4}, "num_attention_heads is -4"),
        (LLAMA | {"vocab_size": 10**9}, "vocab_size is 1e.09"),
        (LLAMA | {"text_config": {"num_hidden_layers": 10**12}}, "num_hidden_layers is 1e.12"),
        (LLAMA | {"rope_scaling": [1]}, "malformed"),
        (LLAMA | {"architectures": 7}, "no architecture"),
        (LLAMA | {"hidden_size": {"a": 1}}, "malformed"),
        (
            LLAMA | {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["re:(.+)+#"]}},
            "unsupported pattern of module names",
        ),
        (
            LLAMA
            | {
                "num_hidden_layers": 1024,
                "quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:" + ".*" * 100] * 60},
            },
            "patterns of module names take",
        ),
        (LLAMA | {"quantization_config": {"quant_method": {"fp8": 1}}}, "unsupported quantization"),
        ("[" * 200_000, "nested too deep"),
        ('{"a":' * 200_000, "nested too deep"),
        ('{"a": "' + "x" * (9 << 20) + '"}', "more than 8 MiB"),
        (
            {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 1 << 40},
            "num_local",
        ),
        (
            {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "num_hidden_layers": "many"},
            "cannot be read",
        ),
    ],
)
def test_a_hostile_config_is_one_sentence(config: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(_write(tmp_path, config))


def test_a_router_refuses_a_hostile_vocabulary_before_it_makes_a_list_of_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="vocab_size"):
        Tokenizer(_write(tmp_path, LLAMA | {"vocab_size": 10**9}), template_seconds_max=1.0)


def test_the_header_of_a_weights_file_is_not_read_beyond_its_bound(tmp_path: Path) -> None:
    """A sparse file says that its header has 5 GiB."""
    config = transformers.OlmoeConfig(num_hidden_layers=1)
    config.architectures = ["OlmoeForCausalLM"]
    config.save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((5 << 30).to_bytes(8, "little"))
        file.truncate(6 << 30)
    with pytest.raises(ModelError, match="header has 5,368,709,120 bytes"):
        read_config(tmp_path)


def test_a_folder_of_large_numbers_takes_little_memory(tmp_path: Path) -> None:
    """In a process of its own, which may grow by 256 MiB and has five seconds of CPU once it has started."""
    folder = _write(tmp_path / "model", LLAMA | {"num_hidden_layers": 10**9})
    program = f"""
import resource
from pathlib import Path
import transformers
from shared.engine.checkpoint.model_impl import read_config
from shared.primitives.errors import ModelError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {GROWTH_BYTES_MAX}, used + {GROWTH_BYTES_MAX}))
began = resource.getrusage(resource.RUSAGE_SELF)
try:
    read_config(Path({str(folder)!r}))
except ModelError as error:
    ended = resource.getrusage(resource.RUSAGE_SELF)
    assert ended.ru_utime - began.ru_utime < 5
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "expected 0 to 1,024" in done.stdout, done.stderr
