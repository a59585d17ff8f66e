"""The init container as a process, and the model that a Hub of the test has for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.hub_server import COMMIT, HubServer, Repository

MODEL = "owner/name"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
WEIGHTS_BYTES = 24 << 20
END_SECONDS_MAX = 60.0


def files_of_a_model(weights: str = "model.safetensors") -> dict[str, bytes | Path]:
    """Small files as a model has them, and weights of 24 MiB that are no two pages alike."""
    return {
        "config.json": json.dumps(LLAMA).encode(),
        "tokenizer.json": b"{}" * 5000,
        "README.md": b"# A model",
        weights: b"".join(number.to_bytes(8, "big") for number in range(WEIGHTS_BYTES // 8)),
        "consolidated.safetensors": b"again",
        "original/model.safetensors": b"again",
        "pytorch_model.bin": b"pickled",
    }


def hub_of(**repositories: Repository) -> HubServer:
    """A Hub with one model of 24 MiB, and others by their name."""
    return HubServer(
        {MODEL: Repository(files_of_a_model())}
        | {f"owner/{name}": each for name, each in repositories.items()}
    )


def command(folder: Path, *words: str, step: str = "hub", model: str = MODEL) -> list[str]:
    """As the chart writes it."""
    what = ["--model", model, "--revision", COMMIT] if step == "hub" else []
    return [sys.executable, "-m", "shared.model_cache.fetch_model", str(folder), step, *what, *words]


def environment(**more: str) -> dict[str, str]:
    """What the process sees: no token and no proxy of this machine."""
    kept = {
        name: value for name, value in os.environ.items() if not name.upper().endswith(("_PROXY", "_TOKEN"))
    }
    return kept | {"HF_HOME": "/nonexistent", "HF_HUB_OFFLINE": "0", "PYTHONUNBUFFERED": "1"} | more


def begin(folder: Path, *words: str, step: str = "hub", **variables: str) -> subprocess.Popen[str]:
    """Start the container."""
    return subprocess.Popen(
        command(folder, *words, step=step),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**variables),
    )


def end(process: subprocess.Popen[str], status: int = 0) -> str:
    """What it said, when it has ended as expected."""
    said = process.communicate(timeout=END_SECONDS_MAX)[0]
    assert process.returncode == status, said
    return said


def fetch(folder: Path, hub: HubServer, *words: str, status: int = 0, **variables: str) -> str:
    """Run it; returns what it said."""
    return end(begin(folder, "--endpoint", hub.url, *words, **variables), status)


def assert_whole(folder: Path, hub: HubServer, model: str = MODEL) -> None:
    """The folder has what a worker needs, byte for byte, and nothing else but the list of it."""
    wanted = ("config.json", "tokenizer.json", "model.safetensors")
    assert {path.name for path in folder.iterdir()} == {*wanted, ".complete"}
    for name in wanted:
        assert (folder / name).read_bytes() == hub.repositories[model].files[name]
