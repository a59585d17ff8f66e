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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.model_impl import read_config
from shared.engine.checkpoint.transformers_config import FallbackConfig
from shared.engine.gguf.convert import DEFAULT_MODEL, is_converted
from shared.local.demo_model import DEFAULT_HUB_ID, demo_gguf
from shared.model_cache.gguf import PrintLine, convert_in_a_child
from shared.model_cache.hub import UNWANTED, WANTED, is_wanted
from shared.primitives.errors import ModelError, StartError

HUB_SECONDS_MAX = 8.0  # to learn whether the Hub knows the model; name resolution has no timeout of its own
CONVERSION_BYTES = 1 << 30  # free space on the disk without which no conversion starts
Requirement = Callable[[ModelConfig | FallbackConfig], None]  # raises StartError for a model that is unfit
_ADDRESS = re.compile(r"(https?://|hf://)?(www\.)?(huggingface\.co|hf\.co)/|hf://")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")  # as llama.cpp names them
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def cache_folder() -> Path:
    """Where converted models live: `$XDG_CACHE_HOME/segue`, else `~/.cache/segue`. Raises StartError without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segue"
    except RuntimeError:  # a user of a container who has a number alone
        raise StartError(
            "this user has no home folder: set HOME, or XDG_CACHE_HOME, to one that they may write"
        ) from None


def name_of(model: str) -> str:
    """What clients call a model without `--served-model-name`."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def hub_id_of(model: str) -> str | None:
    """What the Hub calls a model; None: `model` is a folder or a file, which has no name there."""
    if Path(model).expanduser().exists():
        return None
    return DEFAULT_HUB_ID if model == DEFAULT_MODEL else model if _HUB_ID.fullmatch(model) else None


def resolve(
    model: str,
    print_line: PrintLine,
    endpoint: str | None = None,
    require: Requirement = lambda _config: None,
) -> Path:
    """The folder of `model`, checked. Raises ModelError, and what `require` does.

    `print_line` shows the user what takes long. `endpoint` is the address of another Hub. `require` is asked before
    weights are fetched from there.
    """
    path = Path(model).expanduser()
    if model.endswith(".gguf") or (model == DEFAULT_MODEL and not path.exists()):
        folder = _converted(model, path, print_line)
    elif model and path.is_dir():
        folder = path.resolve()
    elif model and path.exists():
        raise ModelError(f"{model} is a file; expected a folder, a .gguf file, a Hub id or {DEFAULT_MODEL}")
    elif model.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(model) or _ADDRESS.match(model):
        raise ModelError(f"there is no model {model}: {_expected(model)}")
    else:
        folder = _from_hub(model, print_line, endpoint, require)
    _refuse_other_kind(str(folder), os.listdir(folder), f"name one of them, as {folder}/")
    require(read_config(folder))
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} holds no safetensors weights; others (.bin, .pt) are never loaded")
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer.model").exists():
        raise ModelError(f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model)")
    return folder


def _expected(model: str) -> str:
    """What to type in place of a name that is none: users of other servers bring the Hub's addresses and tags along."""
    if _HUB_ID.fullmatch(name := _ADDRESS.sub("", model).rstrip("/")):
        return f"a model of the Hub is called {name} here"
    if _HUB_ID.fullmatch(name.partition(":")[0]):
        return (
            "there are no tags here: give the id of a repository with safetensors, or download one of its .gguf files "
            "and name that"
        )
    return f"expected a folder, a .gguf file, a Hub id or {DEFAULT_MODEL}"


def _refuse_other_kind(model: str, names: Iterable[str], gguf: str) -> None:
    """Raise ModelError where these files of `model` are none that Segue computes, but something else that is known.

    `gguf`: what to do with a GGUF file, whose name comes next.
    """
    names = sorted(names)
    weights = [name for name in names if is_wanted(name, ["*.safetensors"])]
    files = [name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]
    if "config.json" in names and weights:
        return
    if "adapter_config.json" in names:
        raise ModelError(
            f"{model} is a LoRA adapter, which is not served: merge it into its model, and name that"
        )
    if "model_index.json" in names:
        raise ModelError(f"{model} is a pipeline of diffusers, which writes no text")
    if files and not weights:
        usual = next((name for name in files if "q4_k_m" in name.lower()), files[0])
        raise ModelError(f"{model} has GGUF files and no safetensors: {gguf}{usual}")


def _converted(model: str, path: Path, print_line: PrintLine) -> Path:
    """The folder of a converted GGUF file; converts it unless that has been done."""
    target = cache_folder() / "models" / DEFAULT_MODEL
    if model != DEFAULT_MODEL:
        if not path.is_file():
            raise ModelError(f"there is no file {path}")
        if (shard := _SHARD.search(path.name)) and int(shard[1]) > 1:
            raise ModelError(
                f"{path} is one of {int(shard[1])} parts of a model: merge them by `llama-gguf-split --merge` of "
                "llama.cpp, given the first part and a new name, or use the model's safetensors"
            )
        digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
        target = target.with_name(f"{path.stem}-{digest}")
    source = demo_gguf(cache_folder(), print_line) if model == DEFAULT_MODEL else path
    if is_converted(source, target):
        return target
    _require_room(target, CONVERSION_BYTES)
    print_line(f"converting {model} into {target}, once")
    convert_in_a_child(str(source), target, print_line)
    return target


def _from_hub(model: str, print_line: PrintLine, endpoint: str | None, require: Requirement) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    patterns: dict[str, Any] = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        api = HfApi(endpoint=endpoint)
        info = _on_a_thread(
            lambda: api.model_info(model, files_metadata=True, timeout=HUB_SECONDS_MAX - 2), HUB_SECONDS_MAX
        )
    except Exception as error:  # whatever the HTTP library of the day raises without a network
        _refuse_closed(model, error)
        try:
            return Path(snapshot_download(model, local_files_only=True, **patterns))
        except (LocalEntryNotFoundError, OSError):
            raise ModelError(
                f"the Hub cannot be reached for {model} ({_reason(error)}), and it is not in the local cache"
            ) from None
    place = f"{endpoint or constants.ENDPOINT}/{model}/resolve/main/"
    _refuse_other_kind(
        model,
        [file.rfilename for file in info.siblings or []],
        f"download one of them and name the file, as {place}",
    )
    files = [file for file in info.siblings or [] if is_wanted(file.rfilename, WANTED)]
    if not any(file.rfilename.endswith(".safetensors") for file in files):
        raise ModelError(f"{model} has no safetensors weights; others (.bin, .pt) are never loaded")
    _refuse_unfit(api, model, info.sha, require)
    here = {
        file.rfilename for file in files if try_to_load_from_cache(model, file.rfilename, revision=info.sha)
    }
    if missing_bytes := sum(file.size or 0 for file in files if file.rfilename not in here):
        _require_room(Path(constants.HF_HUB_CACHE, model), missing_bytes)
        print_line(f"downloading {model} ({missing_bytes / 1e9:.1f} GB) from the Hub")
    try:
        # The library waits for its threads, each with a file of gigabytes, before it lets Ctrl-C out.
        return Path(
            _on_a_thread(lambda: snapshot_download(model, endpoint=endpoint, revision=info.sha, **patterns))
        )
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ModelError(
                f"the disk is full: {model} needs {missing_bytes / 1e9:.1f} GB more, less what has come"
            ) from None
        raise ModelError(f"downloading {model} failed: {_reason(error)}") from None


def _refuse_closed(model: str, error: Exception) -> None:
    """Raise ModelError where the Hub does not let this user have the model."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        raise ModelError(
            f"{model} is gated: accept its terms on its Hub page, and set HF_TOKEN to a token of that account"
        ) from None
    if isinstance(error, RepositoryNotFoundError):
        raise ModelError(f"the Hub has no model {model}, or it is private and HF_TOKEN is not set") from None


def _refuse_unfit(api: Any, model: str, revision: str | None, require: Requirement) -> None:
    """Read config.json before gigabytes of weights, of the revision that they will come from.

    The Hub lets everybody list a gated repository: its files are the first that are refused.
    """
    try:
        config = Path(api.hf_hub_download(model, "config.json", revision=revision))
    except Exception as error:
        _refuse_closed(model, error)
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise ModelError(f"{model} has no readable config.json: {_reason(cause)}") from None
    require(read_config(config.parent))


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _require_room(target: Path, needed_bytes: int) -> None:
    """Raise ModelError unless the disk under `target` has this much free space."""
    existing = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise ModelError(
            f"the disk is full: {existing} has {free / 1e9:.1f} GB free, {needed_bytes / 1e9:.1f} GB are needed"
        )


def _on_a_thread(ask: Callable[[], Any], seconds_max: float | None = None) -> Any:
    """The result of `ask()`, on a thread that nobody waits for any more after this time, or after Ctrl-C.

    To resolve a name, for one, can hang for minutes.
    """
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append((ask(), None))
        except Exception as error:
            answers.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds_max)
    if not answers:
        raise TimeoutError(f"no answer within {seconds_max} s")
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
