"""`segue pull MODEL` fetches or converts a model ahead of time; `segue models` lists what this machine has.

Nothing is loaded, and nothing but the Hub is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.local.model_store import cache_folder, resolve
from shared.primitives.errors import ModelError


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model of a cache. `name` is what `segue up` takes."""

    name: str
    size_bytes: int
    folder: Path


def pull(model: str) -> None:
    """Fetch the model and print its folder. Raises StartError."""
    folder = resolve(model, lambda line: sys.stderr.writelines([line, "\n"]))
    sys.stdout.write(f"{folder}\n")


def models() -> None:
    """Print what the caches have, with sizes. Raises ModelError."""
    found = sorted([*converted_models(), *hub_models()], key=lambda model: model.name)
    width = max((len(model.name) for model in found), default=0)
    for model in found:
        sys.stdout.write(f"{model.name:<{width}}  {model.size_bytes / 1e9:7.2f} GB  {model.folder}\n")
    if not found:
        sys.stderr.write("no models yet: `segue pull MODEL` fetches one\n")


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
