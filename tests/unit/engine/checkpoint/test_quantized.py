"""A converted GGUF model has its quantized blocks beside the float weights, and both say the same, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

from shared.engine.checkpoint.model_config import read_model_config
from shared.engine.checkpoint.rope_config import Llama3Scaling, Rope
from shared.engine.gguf.convert import convert
from shared.engine.gguf.packed_file import PACKED_FILE, PackedFile, write_packed
from shared.engine.gguf.packing import PackedWeight, unpack
from tests.unit.engine.checkpoint.tiny_gguf import byte_level, write_tiny_gguf
from tests.unit.engine.driver import COMPILED_KERNELS, Driver, skip_unless_runnable, tokens_of

KINDS = {
    "embed_tokens": "q8_0",
    "q_proj": "q4_1",
    "k_proj": "q4_0",
    "v_proj": "q8_0",
    "o_proj": "q4_0",
    "gate_proj": "q4_1",
    "lm_head": "q4_1",
}


K_QUANTS = {
    "embed_tokens": "q4_k",
    "q_proj": "q4_k",
    "k_proj": "q5_k",
    "v_proj": "q6_k",
    "o_proj": "q5_0",
    "gate_proj": "q5_1",
    "lm_head": "q6_k",
}


@pytest.mark.parametrize("k_quants", [False, True], ids=["narrow", "k-quants"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_packed_weights_are_the_float_weights_with_rows_in_hugging_face_order(
    architecture: str, k_quants: bool, tmp_path: Path
) -> None:
    expected = write_tiny_gguf(tmp_path / "tiny.gguf", architecture, k_quants=k_quants)
    kinds = K_QUANTS if k_quants else KINDS
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "model", lambda *_: None)
    floats = load_file(folder / "model.safetensors")
    packed = PackedFile.open(folder)
    assert packed is not None
    for name, matrix in expected.items():
        kind = kinds.get(name.split(".")[-2])
        assert (name in packed) == (kind is not None)
        if kind is not None:
            weight = packed.take(name)
            assert weight.kind == kind
            unpacked = unpack(weight.kind, weight.data, weight.outputs, weight.inputs)
            assert torch.equal(unpacked, torch.from_numpy(matrix)), name
            assert torch.equal(unpacked.view(torch.int32), floats[name].view(torch.int32)), name


@pytest.mark.parametrize("factor", [8.0, 32.0], ids=["Llama 3.1", "Llama 3.2"])
def test_llama_3s_rotation_is_read_of_its_divisors(factor: float, tmp_path: Path) -> None:
    """As llama.cpp's converter writes them, of a head of 16 numbers."""
    wavelengths = 2 * np.pi * 10_000.0 ** (np.arange(8) / 8)
    smooth = (8192 / wavelengths - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelengths < 2048, 1.0, np.where(wavelengths > 8192, factor, between))
    assert len({round(each, 3) for each in divisors}) == 3, "one of each kind"

    def describe(writer: GGUFWriter) -> None:
        byte_level(writer)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))

    write_tiny_gguf(tmp_path / "tiny.gguf", "llama", describe=describe)
    config = read_model_config(convert(tmp_path / "tiny.gguf", tmp_path / "model", lambda *_: None))
    assert set(config.ropes) == {Rope(10_000.0, 16, Llama3Scaling(factor, 1.0, 4.0, 8192))}
    assert config.context_len == 128


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


def test_of_two_conversions_at_once_the_second_leaves_the_folder_of_the_first(tmp_path: Path) -> None:
    """Workers may have begun to read there."""
    gguf, folder = tmp_path / "tiny.gguf", tmp_path / "model"
    write_tiny_gguf(gguf, "llama")
    of_first: list[int] = []

    def meanwhile(what: str, _share: float) -> None:
        if what == "writing safetensors":
            convert(gguf, folder, lambda *_: None)
            of_first.append(folder.stat().st_ino)

    convert(gguf, folder, meanwhile)
    assert of_first == [folder.stat().st_ino]


# Kinds of blocks that the description must name: `ffn_down`, whose inputs are no whole blocks, stays float.
MODELS = {
    "q4_0": (GGMLQuantizationType.Q4_0, "weights q4_0+float32,"),
    "q4_1": (GGMLQuantizationType.Q4_1, "weights q4_1+float32,"),
    "q8_0": (GGMLQuantizationType.Q8_0, "weights q8_0+float32,"),
    "mixed": (None, "weights q4_0+q4_1+q8_0+float32,"),
    "k-quants": (None, "weights q4_k+q5_0+q5_1+q5_k+q6_k+float32,"),
}


@pytest.fixture(scope="module", params=MODELS)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A converted model, and what its description says of its weights."""
    kind, described = MODELS[request.param]
    path: Path = tmp_path_factory.mktemp("quantized")
    write_tiny_gguf(path / "tiny.gguf", "llama", kind, k_quants=request.param == "k-quants")
    return convert(path / "tiny.gguf", path / "model", lambda *_: None), described


def logits_of(folder: Path, described: str, **settings: Any) -> torch.Tensor:
    """Of a prompt in two chunks, the first of many rows, and of some decode steps: [outputs, vocabulary]."""
    driver = Driver(folder, **settings)
    assert described in driver.engine.description
    driver.prefill(0, tokens_of(7, 61, driver.engine.config.vocab_size), range(6), chunk=50)
    driver.decode([0], 8)
    driver.close()
    return torch.stack(driver.logits[0])


@pytest.mark.parametrize("kernels", COMPILED_KERNELS)
def test_quantized_weights_give_the_logits_of_the_float_weights_bit_for_bit(
    quantized: tuple[Path, str], kernels: str
) -> None:
    skip_unless_runnable(kernels)
    folder, described = quantized
    blocks = logits_of(folder, described, kernels=kernels, dtype="auto")
    floats = logits_of(folder, "weights float32,", kernels=kernels, dtype="float32")
    assert blocks.isfinite().all()
    assert len(set(blocks.argmax(dim=1).tolist())) > 2, "a model that repeats one token shows little"
    assert torch.equal(blocks, floats)


def test_it_is_the_packed_blocks_that_are_computed_with(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "llama")
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "model", lambda *_: None)
    described = MODELS["mixed"][1]
    before = logits_of(folder, described)
    packed = PackedFile.open(folder)
    assert packed is not None
    for name in load_file(folder / PACKED_FILE):
        changed = {each: packed.take(each) for each in load_file(folder / PACKED_FILE)}
        weight = changed[name]
        changed[name] = PackedWeight(weight.kind, weight.outputs, weight.inputs, weight.data ^ 1)
        write_packed(folder, changed)
        assert not torch.equal(logits_of(folder, described), before), f"{name} is read from elsewhere"


def test_a_model_of_blocks_keeps_keys_and_values_in_halves_whatever_computes(tmp_path: Path) -> None:
    """Else a worker with kernels and one without could not read each other's pages."""
    write_tiny_gguf(tmp_path / "tiny.gguf", "llama")
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "model", lambda *_: None)

    def kv_format(**settings: Any) -> str:
        driver = Driver(folder, **settings)
        driver.close()
        return driver.engine.kv_format

    assert kv_format().endswith("float16")
    assert kv_format(kernels="torch") == kv_format(dtype="float32") == kv_format()
    assert kv_format(kv_cache_dtype="float32").endswith("float32")
    (folder / PACKED_FILE).unlink()
    assert kv_format().endswith("float32")
