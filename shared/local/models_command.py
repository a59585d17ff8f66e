"""`segue pull MODEL` fetches or converts a model ahead of time; `segue models` lists what this machine has.

Nothing is loaded, and nothing but the Hub is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.local.model_store import cache_folder, resolve
from shared.primitives.errors import ConfigError, ModelError

PULL_USAGE = """usage: segue pull MODEL

Fetches MODEL (a Hub id, a .gguf file or smollm2) and says where it lies. `segue up MODEL` then needs no network.
"""
MODELS_USAGE = """usage: segue models

Lists the models in the caches of this machine with their sizes: those of the Hub, and converted GGUF files.
"""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model of a cache. `name` is what `segue up` takes."""

    name: str
    size_bytes: int
    folder: Path


def pull(words: Sequence[str]) -> None:
    """Carry out `segue pull`. Raises StartError."""
    match words:
        case ["-h" | "--help"]:
            sys.stdout.write(PULL_USAGE)
        case [model] if not model.startswith("-"):
            folder = resolve(model, lambda line: sys.stderr.writelines([line, "\n"]))
            sys.stdout.write(f"{folder}\n")
        case _:
            raise ConfigError("expected one model: segue pull MODEL")


def models(words: Sequence[str]) -> None:
    """Carry out `segue models`. Raises ConfigError."""
    match words:
        case ["-h" | "--help"]:
            sys.stdout.write(MODELS_USAGE)
        case []:
            found = sorted([*converted_models(), *hub_models()], key=lambda model: model.name)
            width = max((len(model.name) for model in found), default=0)
            for model in found:
                sys.stdout.write(f"{model.name:<{width}}  {model.size_bytes / 1e9:7.2f} GB  {model.folder}\n")
            if not found:
                sys.stderr.write("no models yet: `segue pull MODEL` fetches one\n")
        case _:
            raise ConfigError("segue models takes no words")


def converted_models() -> Iterator[CachedModel]:
    """GGUF files that have been converted."""
    for folder in sorted((cache_folder() / "models").glob("*/config.json")):
        files = [path for path in folder.parent.rglob("*") if path.is_file()]
        yield CachedModel(folder.parent.name, sum(path.stat().st_size for path in files), folder.parent)


def hub_models() -> Iterator[CachedModel]:
    """Models in the Hub's own cache, which other programs fill, too. Raises ModelError where it cannot be read."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    except OSError as error:
        raise ModelError(f"the Hub's cache cannot be read: {error}") from None
    for each in repositories:
        if each.repo_type == "model":
            yield CachedModel(each.repo_id, each.size_on_disk, each.repo_path)
