"""A converted GGUF model has its quantized blocks beside the float weights, and both say the same, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.engine.gguf import convert
from shared.engine.packing import PACKED_FILE, PackedFile, unpack
from tests.unit.engine.tiny_gguf import write_tiny_gguf

KINDS = {
    "embed_tokens": "q8_0",
    "q_proj": "q4_1",
    "k_proj": "q4_0",
    "v_proj": "q8_0",
    "o_proj": "q4_0",
    "gate_proj": "q4_1",
    "lm_head": "q4_1",
}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_packed_weights_are_the_float_weights_with_rows_in_hugging_face_order(
    architecture: str, tmp_path: Path
) -> None:
    expected = write_tiny_gguf(tmp_path / "tiny.gguf", architecture)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "model", lambda *_: None)
    floats = load_file(folder / "model.safetensors")
    packed = PackedFile.open(folder)
    assert packed is not None
    for name, matrix in expected.items():
        kind = KINDS.get(name.split(".")[-2])
        assert (name in packed) == (kind is not None)
        if kind is not None:
            weight = packed.take(name)
            assert weight.kind == kind
            unpacked = unpack(weight.kind, weight.data, weight.outputs, weight.inputs)
            assert torch.equal(unpacked, torch.from_numpy(matrix)), name
            assert torch.equal(unpacked.view(torch.int32), floats[name].view(torch.int32)), name


def test_a_folder_of_an_older_conversion_is_converted_again(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "llama")
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "model", lambda *_: None)
    stamp = json.loads((folder / "converted_from.json").read_text())
    (folder / "converted_from.json").write_text(json.dumps(stamp | {"format": stamp["format"] - 1}))
    (folder / PACKED_FILE).unlink()
    assert PackedFile.open(folder) is None
    convert(tmp_path / "tiny.gguf", folder, lambda *_: None)
    assert PackedFile.open(folder) is not None
    assert json.loads((folder / "converted_from.json").read_text()) == stamp
