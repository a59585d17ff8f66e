"""The safetensors files of a model folder: which there are, and whether each is whole. Knows no torch.

Whether a file is whole is seen in its first bytes and its size, so `segue up` looks before it starts a process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shared.limits.model_files import INDEX_BYTES_MAX, read_json
from shared.primitives.errors import ModelError

_LFS = b"version https://git-lfs"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order; `ModelError` if there are none or a shard is missing.

    A quantized model in one file may have the list of the shards that it was made of beside it.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        weight_map = read_json(index, INDEX_BYTES_MAX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if foreign := [name for name in names if Path(name).name != name]:
            raise ModelError(f"{index} names a file outside its folder: {foreign[0]}")
        paths = [folder / name for name in names]
    else:
        paths = [single]
    if single.exists() and not all(path.exists() for path in paths):
        return [single]
    for path in paths:
        if not path.exists():
            pickled = sorted(
                found.name for found in folder.glob("*") if found.suffix in {".bin", ".pt", ".pth"}
            )
            also = f" ({', '.join(pickled)} is never read: it could run code)" if pickled else ""
            raise ModelError(f"{folder} lacks {path.name}: expected weights in safetensors{also}")
    return paths


def open_weights(path: Path, framework: str, device: str = "cpu") -> Any:
    """The opened file, of which nothing but the header has been read; `ModelError` unless it is whole."""
    try:
        return safe_open(path, framework=framework, device=device)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a complete safetensors file ({error}): {_remedy(path)}") from None


def require_whole(folder: Path) -> None:
    """Raise ModelError unless every file of the weights is there and as large as its header says."""
    for path in weight_files(folder):
        open_weights(path, framework="numpy")


def _remedy(path: Path) -> str:
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_LFS)) == _LFS
    except OSError:
        return "make it readable"
    return "it is a pointer of git-lfs, run `git lfs pull` in its folder" if pointer else "fetch it again"
