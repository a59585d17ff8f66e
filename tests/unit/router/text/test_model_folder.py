"""What a model's folder recommends holds where a request says nothing; and what an answer's fingerprint names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.text.model_folder import read_context_len, read_sampling_defaults
from router.text.tokenizer import Tokenizer
from shared.engine.checkpoint.model_config import parse_model_config
from shared.primitives.errors import ModelError
from shared.wire.sampling_params import SamplingParams
from tests.unit.router.deployment import hello
from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.unit.router.tiny_model import write_folder

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
}
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


def folder_with(folder: Path, **generation: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def asked(router: RunningRouter, **fields: Any) -> SamplingParams:
    body = {"model": MODEL, "prompt": "fox"} | fields
    assert router.http.post("/v1/completions", json=body).status_code == 200
    return router.workers.prefills[-1].params


def sampling(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in NEUTRAL}


def test_a_field_that_is_left_out_is_the_models(tmp_path: Path) -> None:
    with RunningRouter(folder_with(write_folder(tmp_path), **QWEN)) as router:
        recommended = {name: value for name, value in QWEN.items() if name != "do_sample"}
        assert sampling(asked(router)) == recommended
        assert sampling(asked(router, temperature=None, top_k=None)) == recommended
        assert sampling(asked(router, temperature=0)) == recommended | {"temperature": 0}
        assert sampling(asked(router, **NEUTRAL)) == NEUTRAL
        assert asked(router, top_k=-1).top_k == 0


def test_without_the_file_nothing_is_recommended(router: RunningRouter) -> None:
    assert sampling(asked(router)) == NEUTRAL


@pytest.mark.parametrize(
    "generation",
    [{}, {"eos_token_id": 2}, {"do_sample": False, "temperature": 0.6}, {"temperature": None}],
    ids=["empty", "ends alone", "greedy", "null"],
)
def test_a_file_may_recommend_nothing(tmp_path: Path, generation: dict[str, Any]) -> None:
    assert read_sampling_defaults(folder_with(tmp_path, **generation)) == {}


@pytest.mark.parametrize("all_tokens", [-1, 0])
def test_all_tokens_have_one_spelling_inside(tmp_path: Path, all_tokens: int) -> None:
    assert read_sampling_defaults(folder_with(tmp_path, top_k=all_tokens)) == {"top_k": 0}


@pytest.mark.parametrize("generation", [{"temperature": -1}, {"top_p": "0.9"}, {"top_p": 0}, {"min_p": True}])
def test_a_recommendation_that_is_none_is_refused_at_the_start(
    tmp_path: Path, generation: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=next(iter(generation))):
        read_sampling_defaults(folder_with(tmp_path, **generation))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": {"type": "yarn", "factor": 2}}, 81920),
        ({"max_position_embeddings": 262144, "rope_parameters": YARN}, 262144),
        ({"max_position_embeddings": 40960, "rope_parameters": {"full_attention": YARN}}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN | {"rope_type": "linear"}}, 40960),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN | {"factor": [4]}}, 40960),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN | {"factor": float("inf")}}, 1 << 26),
        ({"text_config": {"max_position_embeddings": 40960}}, 0),
    ],
)
def test_a_context_is_as_long_as_yarn_stretches_it(config: dict[str, Any], tokens: int) -> None:
    assert read_context_len(config) == tokens


def test_a_router_takes_prompts_as_long_as_workers_do(tmp_path: Path) -> None:
    config = json.loads((write_folder(tmp_path) / "config.json").read_text())
    stretched = config | {"rope_scaling": YARN | {"original_max_position_embeddings": 256}}
    (tmp_path / "config.json").write_text(json.dumps(stretched))
    assert config["max_position_embeddings"] == 256
    assert Tokenizer(tmp_path, template_seconds_max=10.0).context_len == 1024


def test_workers_have_the_same_stretched_context() -> None:
    for rope in (YARN, {"type": "yarn", "factor": 2}):
        config = SHAPE | {"max_position_embeddings": 40960, "rope_scaling": rope}
        assert read_context_len(config) == parse_model_config(config).context_len > 40960


def fingerprint(router: RunningRouter) -> str:
    body = {"model": MODEL, "prompt": "fox"}
    whole = router.http.post("/v1/completions", json=body).json()
    streamed = router.http.post("/v1/completions", json=body | {"stream": True})
    chunk = json.loads(streamed.text.split("\n\n")[0].removeprefix("data: "))
    assert chunk["system_fingerprint"] == whole["system_fingerprint"]
    return str(whole["system_fingerprint"])


def test_the_fingerprint_changes_with_what_computes_and_with_nothing_else(model_folder: Path) -> None:
    with RunningRouter(model_folder) as router:
        first = fingerprint(router)
        assert first.startswith("fp_")
        fleet, serving = router.core.fleet, router.serving
        fleet.up("d2", hello("decode", "d2", model_name=MODEL))
        fleet.up("d3", hello("decode", "d3", model_name="another"))
        assert serving.system_fingerprint() == first
        fleet.up("d4", hello("decode", "d4", model_name=MODEL, determinism="other kernels"))
        assert serving.system_fingerprint() not in (first, None)
        fleet.down("d4")
        assert serving.system_fingerprint() == first
        for peer in list(fleet.workers):
            fleet.down(peer)
        assert serving.system_fingerprint() is None
