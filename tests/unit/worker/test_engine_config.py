"""A worker's settings reach the engine as one value."""

from __future__ import annotations

from dataclasses import fields

from decode.config import DecodeConfig
from shared.engine.config import EngineConfig
from shared.worker.worker import engine_config

OF_THE_MACHINE = {
    "pages",
    "page_size",
    "slots",
    "extend_tokens",
    "host_fraction",
    "budget",
    "device",
    "threads",
}


def test_an_engine_has_the_defaults_of_the_settings() -> None:
    found, bare = engine_config(DecodeConfig(), 0.0, 0), EngineConfig(None, 16, 64)
    for field in fields(EngineConfig):
        if field.name not in OF_THE_MACHINE:
            assert getattr(found, field.name) == getattr(bare, field.name), field.name


def test_every_setting_of_an_engine_reaches_it() -> None:
    asked: dict[str, object] = {
        "page_size": 32,
        "max_total_tokens": 5000,
        "context_len": 700,
        "device_memory_share": 0.3,
        "device": "cuda-on-cpu",
        "model_impl": "segue",
        "kernels": "plain",
        "kernels_folder": "/kernels",
        "dtype": "float16",
        "kv_cache_dtype": "bfloat16",
        "kv_layout": "head-major-1",
        "threads": 3,
        "deterministic": True,
    }
    settings = DecodeConfig(**asked, kv_pages=7, max_running_requests=9, memory_bytes=2**31)  # type: ignore[arg-type]
    found = engine_config(settings, 0.5, 40)
    assert {name: getattr(found, name) for name in asked} == asked
    assert (found.pages, found.slots, found.budget.memory_bytes) == (7, 9, 2**31)
    assert (found.host_fraction, found.extend_tokens) == (0.5, 40)
    untouched = [each.name for each in fields(found) if getattr(found, each.name) == each.default]
    assert untouched == []
