"""Finds the model that a user names: a folder that every process can read, or one sentence why there is none.

`--model` is a GGUF file, the name `smollm2`, a folder, or an id on the Hugging Face Hub. Only safetensors, JSON and
tokenizer files are ever downloaded: no pickled weights, no code. GGUF is converted once, by a child process, because
that needs torch, which this process does not load. A model is refused here, before any worker starts, if Segue cannot
compute it, if it is gated, or if it does not fit on the disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.engine.checkpoint.model_impl import read_config
from shared.engine.gguf.convert import DEFAULT_MODEL, is_converted
from shared.local.demo_model import DEFAULT_HUB_ID, demo_gguf
from shared.model_cache.gguf import PrintLine, convert_in_a_child
from shared.model_cache.hub import UNWANTED, WANTED, is_wanted
from shared.primitives.errors import ModelError

HUB_SECONDS_MAX = 8.0  # to learn whether the Hub knows the model; name resolution has no timeout of its own
CONVERSION_BYTES = 1 << 30  # free space on the disk without which no conversion starts
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def cache_folder() -> Path:
    """Where converted models live: `$XDG_CACHE_HOME/segue`, else `~/.cache/segue`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segue"


def name_of(model: str) -> str:
    """What clients call a model without `--served-model-name`."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def hub_id_of(model: str) -> str | None:
    """What the Hub calls a model; None: `model` is a folder or a file, which has no name there."""
    if Path(model).expanduser().exists():
        return None
    return DEFAULT_HUB_ID if model == DEFAULT_MODEL else model if _HUB_ID.fullmatch(model) else None


def resolve(model: str, print_line: PrintLine, endpoint: str | None = None) -> Path:
    """The folder of `model`, checked. Raises ModelError.

    `print_line` shows the user what takes long. `endpoint` is the address of another Hub.
    """
    path = Path(model).expanduser()
    if model.endswith(".gguf") or (model == DEFAULT_MODEL and not path.exists()):
        folder = _converted(model, path, print_line)
    elif model and path.is_dir():
        folder = path.resolve()
    elif model and path.exists():
        raise ModelError(f"{model} is a file; expected a folder, a .gguf file, a Hub id or {DEFAULT_MODEL}")
    elif model.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"there is no model {model}: expected a folder, a .gguf file, a Hub id or {DEFAULT_MODEL}"
        )
    else:
        folder = _from_hub(model, print_line, endpoint)
    read_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} holds no safetensors weights; others (.bin, .pt) are never loaded")
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer.model").exists():
        raise ModelError(f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model)")
    return folder


def _converted(model: str, path: Path, print_line: PrintLine) -> Path:
    """The folder of a converted GGUF file; converts it unless that has been done."""
    target = cache_folder() / "models" / DEFAULT_MODEL
    if model != DEFAULT_MODEL:
        if not path.is_file():
            raise ModelError(f"there is no file {path}")
        digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
        target = target.with_name(f"{path.stem}-{digest}")
    source = demo_gguf(cache_folder(), print_line) if model == DEFAULT_MODEL else path
    if is_converted(source, target):
        return target
    _require_room(target, CONVERSION_BYTES)
    print_line(f"converting {model} into {target}, once")
    convert_in_a_child(str(source), target, print_line)
    return target


def _from_hub(model: str, print_line: PrintLine, endpoint: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    patterns: dict[str, Any] = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        api = HfApi(endpoint=endpoint)
        info = _within(
            HUB_SECONDS_MAX, lambda: api.model_info(model, files_metadata=True, timeout=HUB_SECONDS_MAX - 2)
        )
    except GatedRepoError:
        raise ModelError(f"{model} is gated: accept its terms on its Hub page and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(f"the Hub has no model {model}, or it is private and HF_TOKEN is not set") from None
    except Exception as error:  # whatever the HTTP library of the day raises without a network
        try:
            return Path(snapshot_download(model, local_files_only=True, **patterns))
        except (LocalEntryNotFoundError, OSError):
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ModelError(
                f"the Hub cannot be reached for {model} ({reason}), and it is not in the local cache"
            ) from None
    files = [file for file in info.siblings or [] if is_wanted(file.rfilename, WANTED)]
    if not any(file.rfilename.endswith(".safetensors") for file in files):
        raise ModelError(f"{model} has no safetensors weights; others (.bin, .pt) are never loaded")
    _refuse_unsupported(api, model, info.sha)
    needed_bytes = sum(file.size or 0 for file in files)
    print_line(f"downloading {model} ({needed_bytes / 1e9:.1f} GB at most) from the Hub")
    try:
        return Path(snapshot_download(model, endpoint=endpoint, revision=info.sha, **patterns))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"the disk is full: {model} needs {needed_bytes / 1e9:.1f} GB") from None
        raise ModelError(f"downloading {model} failed: {' '.join(str(error).split())[:200]}") from None
    except Exception as error:
        raise ModelError(f"downloading {model} failed: {' '.join(str(error).split())[:200]}") from None


def _refuse_unsupported(api: Any, model: str, revision: str | None) -> None:
    """Read config.json before gigabytes of weights, of the revision that they will come from."""
    try:
        config = Path(api.hf_hub_download(model, "config.json", revision=revision))
    except Exception as error:
        raise ModelError(f"{model} has no readable config.json: {type(error).__name__}") from None
    read_config(config.parent)


def _require_room(target: Path, needed_bytes: int) -> None:
    """Raise ModelError unless the disk under `target` has this much free space."""
    existing = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise ModelError(
            f"the disk is full: {existing} has {free / 1e9:.1f} GB free, {needed_bytes / 1e9:.1f} GB are needed"
        )


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """The result of `ask()`, on a thread of its own, because resolving a name can hang for minutes."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append((ask(), None))
        except Exception as error:
            answers.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    value, error = answers[0]
    if error is not None:
        raise error
    return value


# ---- `segue pull` and `segue models`: nothing is loaded, and nothing but the Hub is asked ----------------------------


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


def main() -> None:
    """`python -m shared.local.model_store MODEL`: fetch or convert the model ahead of time, and print its folder."""
    try:
        folder = resolve(sys.argv[1], lambda line: sys.stderr.writelines([line, "\n"]))
    except ModelError as error:
        sys.exit(f"segue: {error}")
    sys.stdout.write(f"{sys.argv[1]} is in {folder}\n")


if __name__ == "__main__":
    main()
