"""The installed model with seven of its thirty layers: what deployments of tests serve, at a third of the CPU time.

The layers are chosen so that answers do not repeat themselves, for a comparison of such answers would see little. Of 48
greedy tokens after each of the `varied_prompts` of up to 300 tokens, at least 25 are distinct, 36 on the average, and
at least 6 of the last 16. With the whole model they are 6, 22 and 6; with its first six layers 2, 5 and 1.

For workers of several ranks (`ranked`) it has more heads, of zeros, no packed weights, and three layers, since each has
two sums of ranks: of 48 tokens after six such prompts at least 16 are distinct, 36 on the average, 11 of the last 16.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from shared.local.model_store import cache_folder, resolve
from tests.integration.deployments.ranked import RANKED, RANKS, widen, widened

LAYERS = (0, 3, 29) if RANKED else (0, 1, 2, 3, 4, 28, 29)


@functools.cache
def cut_model() -> Path:
    """The folder of the model that is cut, made on first use; clients call it smollm2, too."""
    whole = resolve("smollm2", lambda _line: None)
    stamp = (whole / "converted_from.json").read_bytes() + repr(LAYERS).encode()
    stamp += f", {RANKS} ranks".encode() if RANKED else b""
    parent = cache_folder() / "cut" / hashlib.blake2b(stamp, digest_size=8).hexdigest()
    folder = parent / whole.name
    if not folder.exists():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=parent) as temporary:
            fresh = Path(temporary) / "model"
            _cut(whole, fresh)
            try:
                fresh.rename(folder)
            except OSError:
                if not folder.exists():  # else another process has made the same one meanwhile
                    raise
    return folder


def _cut(whole: Path, folder: Path) -> None:
    # torch takes seconds to import, and mostly nothing is to do
    from safetensors.torch import load_file, save_file

    from shared.engine.gguf.packed_file import PACKED_FILE, PackedFile, write_packed

    stored, packed = load_file(whole / "model.safetensors"), PackedFile(whole / PACKED_FILE)
    names = {old: name for old in stored if (name := _name_here(old))}
    folder.mkdir()
    weights = {name: stored[old] for old, name in names.items()}
    config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": len(LAYERS)}
    if RANKED:
        config = widened(config, RANKS)
        weights = widen(weights, config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if not RANKED:  # beside the weights above, which it names
        write_packed(folder, {name: packed.take(old) for old, name in names.items() if old in packed})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(whole / name, folder)


def _name_here(weight: str) -> str | None:
    """What a weight of the whole model is called in the cut one; None: its layer is left out."""
    words = weight.split(".")
    if words[1] == "layers":
        if int(words[2]) not in LAYERS:
            return None
        words[2] = str(LAYERS.index(int(words[2])))
    return ".".join(words)
