"""What a fingerprint hashes of a shape stays what it was: workers of two versions continue each other's streams.

A stream goes on only on workers of its fingerprint. When the versions of a release are rolled, and theirs differ, each
stream waits for a worker that will not come, and is lost.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace

import pytest

from shared.engine.checkpoint.experts_config import ExpertLayers
from shared.engine.checkpoint.model_config import ModelConfig, parse_model_config
from tests.unit.engine.checkpoint.popular_models import POPULAR

# Hashes of the canonical text. Those of 0.1.0 were made by the code of ef54591 (`repr` of its configs).
VERSION_0_1_0 = {
    "meta-llama/Llama-3.1-8B-Instruct": "3a4e9c4117ff94e8",
    "meta-llama/Llama-3.2-1B-Instruct": "1321361060ddad5d",
    "meta-llama/Llama-3.2-3B-Instruct": "4aa33fe4020afc70",
    "meta-llama/Llama-3.3-70B-Instruct": "a7815d4b3ce2f07d",
    "NousResearch/Hermes-3-Llama-3.1-8B": "3a4e9c4117ff94e8",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "d4cd8dda545b7ba1",
    "tiiuae/Falcon3-7B-Instruct": "83972b5afab93c4b",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "3a4e9c4117ff94e8",
    "Qwen/Qwen2.5-0.5B-Instruct": "e9d8b6b7346be037",
    "Qwen/Qwen2.5-1.5B-Instruct": "13c9e4f3e6537722",
    "Qwen/Qwen2.5-7B-Instruct": "35a3b476da37fcad",
    "Qwen/Qwen2.5-72B-Instruct": "d49e14fb2dad16fb",
    "Qwen/Qwen2.5-Coder-32B-Instruct": "bacde4632b3a0903",
    "Qwen/QwQ-32B": "94db80493f8281e6",
    "Qwen/Qwen3-0.6B": "ec41c1eec9f239de",
    "Qwen/Qwen3-4B": "acffc2128bc45679",
    "Qwen/Qwen3-8B": "0de98906b6f63b91",
    "Qwen/Qwen3-14B": "d2dec7461014c0cc",
    "Qwen/Qwen3-32B": "91c9540386da48ee",
    "mistralai/Mistral-7B-Instruct-v0.3": "3b7b51a740c325a4",
    "mistralai/Mistral-Nemo-Instruct-2407": "e5df11b3d58e6d7a",
    "mistralai/Mistral-Small-24B-Instruct-2501": "13ec96719f43d81e",
    "google/gemma-2-9b-it": "d2af0b4c9ac33e79",
    "google/gemma-3-1b-it": "34b6d7adbfd96e1a",
    "microsoft/phi-4": "a057988b8f098ad1",
    "allenai/OLMo-2-1124-7B-Instruct": "737d65b4112a7e85",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "485bf88104d627e4",
    "HuggingFaceTB/SmolLM3-3B": "090bda2475ae0813",
    "ibm-granite/granite-3.3-8b-instruct": "b1e52aff36c9f9b3",
}
LATER = {
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": "22fc58c49e721bfa",
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": "8f4f29c85f47925e",
    "Qwen/Qwen2.5-7B-Instruct-AWQ": "c08871b4f8e6042c",
    "Qwen/Qwen2.5-VL-7B-Instruct": "398b3e0e030ce3bb",
    "Qwen/Qwen3-32B-FP8": "2bcf8e3f0c8206eb",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "9e570c479848d3b5",
    "Qwen/Qwen3-30B-A3B-FP8": "02ddd352813a0cc3",
    "Qwen/Qwen3-235B-A22B": "3337404e143412c3",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": "5a6c734ed30f9780",
    "Qwen/Qwen3-VL-8B-Instruct": "8b7262c53eefd6c6",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "eb410e99bf6c7887",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "c830afd4245b3794",
    "openai/gpt-oss-20b": "39ff62337e886d37",
    "openai/gpt-oss-120b": "d24bd479df29e2c9",
    "google/gemma-3-4b-it": "3fe63e53d3e29b82",
    "google/gemma-3-27b-it": "3f936681bdccaa84",
    "microsoft/Phi-3-mini-4k-instruct": "d7d5e3003cfc595e",
    "zai-org/GLM-4.5-Air": "9810c1dc3f0ff8ea",
}


@pytest.mark.parametrize("name", [*VERSION_0_1_0, *LATER])
def test_a_shape_is_told_as_ever(name: str) -> None:
    text = parse_model_config(POPULAR[name]).canonical
    recorded = (VERSION_0_1_0 | LATER)[name]
    assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == recorded, (
        f"streams of {name} would be lost in a roll from the version before. A field that is new has to be among "
        f"`_LATER_FIELDS`, or not in the repr. Now it is told so: {text[:300]} …"
    )


def test_what_says_something_is_told() -> None:
    """Each field of two shapes differs in what is hashed."""
    one = parse_model_config(POPULAR["meta-llama/Llama-3.1-8B-Instruct"])
    other = parse_model_config(POPULAR["openai/gpt-oss-20b"])
    for each in fields(ModelConfig):
        value = getattr(other, each.name)
        if each.repr and value != getattr(one, each.name):
            assert replace(one, **{each.name: value}).canonical != one.canonical, each.name
    experts: ExpertLayers = other.experts
    assert any(experts)
    assert other.sinks
