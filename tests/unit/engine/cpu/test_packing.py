"""Packing moves bytes and changes no value; the packed file is mapped, shared, and refused when it is damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from shared.engine.gguf.packed_file import PACKED_FILE, PackedFile, write_packed
from shared.engine.gguf.packing import (
    BLOCK_FORMATS,
    FLOAT_KINDS,
    Kind,
    PackedWeight,
    block_inputs,
    narrowest_kind,
    pack_blocks,
    pack_float,
    packed_bytes,
    unpack,
)
from shared.primitives.errors import ModelError
from tests.doubles.live_bytes import LiveBytes
from tests.unit.engine.cpu.random_blocks import odd_rows
from tests.unit.engine.driver import COMPILED_KERNELS, skip_unless_runnable
from tests.unit.engine.product import KINDS, Product, packed_weight

NARROW: tuple[Kind, ...] = ("q8_0", "q4_0", "q4_1")
QUANTIZED: tuple[Kind, ...] = (*NARROW, "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
SHAPES = [(1, 32), (16, 32), (20, 96), (48, 64)]  # outputs, inputs


@pytest.fixture(autouse=True)
def float_weights(tmp_path: Path) -> None:
    """A packed file lies beside the float weights it was made with."""
    save_file({"any": torch.ones(3)}, tmp_path / "model.safetensors")


def test_packed_weights_beside_other_float_weights_are_refused(tmp_path: Path) -> None:
    write_packed(tmp_path, {})
    assert PackedFile.open(tmp_path) is not None
    save_file({"any": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="belongs to other weights"):
        PackedFile.open(tmp_path)


def random_packed(kind: Kind, outputs: int, inputs: int) -> PackedWeight:
    return PackedWeight(kind, outputs, inputs, pack_blocks(kind, odd_rows(kind, outputs, inputs)))


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_unpacked_blocks_are_what_ggml_dequantizes_bit_for_bit(kind: Kind, outputs: int, inputs: int) -> None:
    inputs *= block_inputs(kind) // 32
    blocks = odd_rows(kind, outputs, inputs)
    packed = pack_blocks(kind, blocks)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_bytes(kind, outputs, inputs),)
    expected = dequantize(blocks.numpy(), GGMLQuantizationType[kind.upper()])
    unpacked = unpack(kind, packed, outputs, inputs).numpy()
    assert np.array_equal(unpacked.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("kind", NARROW)
def test_every_byte_of_a_block_lies_where_the_kernels_look_for_it(kind: Kind) -> None:
    outputs, inputs = 20, 96
    block = BLOCK_FORMATS[kind]
    rows = odd_rows(kind, outputs, inputs).numpy()
    packed = pack_blocks(kind, torch.from_numpy(rows)).numpy()
    assert packed.size == 2 * 3 * 16 * block.nbytes
    for output in range(32):
        for number in range(3):
            panel, kv_group = divmod(output, 16)
            start = (panel * 3 + number) * 16 * block.nbytes
            halves = packed[start : start + 32 * block.halves].view(np.uint16).reshape(block.halves, 16)
            quants = packed[start + 32 * block.halves :][: 16 * block.quant_bytes].reshape(-1, 16)
            found = np.concatenate([halves[:, kv_group].copy().view(np.uint8), quants[:, kv_group]])
            stored = rows[output, number * block.nbytes :][: block.nbytes] if output < outputs else 0
            assert np.array_equal(found, np.broadcast_to(stored, found.shape))


@pytest.mark.parametrize(
    ("kind", "stored", "packed"),
    [
        ("q5_0", 5.5, 5.5),
        ("q5_1", 6.0, 6.0),
        ("q4_k", 4.5, 4.625),
        ("q5_k", 5.5, 5.625),
        ("q6_k", 6.5625, 6.5625),
    ],
)
def test_a_wide_block_takes_hardly_more_than_in_its_file(kind: Kind, stored: float, packed: float) -> None:
    assert 8 * odd_rows(kind, 16, 512).nbytes / (16 * 512) == stored
    assert 8 * packed_bytes(kind, 16, 512) / (16 * 512) == packed


@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (17, 5)])
def test_packed_floats_lie_by_panel_and_input_and_unpack_to_themselves(
    outputs: int, inputs: int, kind: Kind
) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(5))
    weight = weight.to(FLOAT_KINDS[kind]).float()
    assert narrowest_kind(weight) == kind
    packed = pack_float(weight, kind)
    assert packed.nbytes == packed_bytes(kind, outputs, inputs)
    assert torch.equal(unpack(kind, packed, outputs, inputs), weight)
    for output in range(outputs):
        assert torch.equal(packed.view(-1, inputs, 16)[output // 16, :, output % 16], weight[output])


def test_the_file_gives_back_what_was_written_aligned_to_cache_lines(tmp_path: Path) -> None:
    written = {f"{kind}.weight": random_packed(kind, 32, 512) for kind in QUANTIZED}
    write_packed(tmp_path, written)
    file = PackedFile.open(tmp_path)
    assert file is not None
    assert "other.weight" not in file
    for name, weight in written.items():
        assert name in file
        taken = file.take(name)
        assert (taken.kind, taken.outputs, taken.inputs) == (weight.kind, weight.outputs, weight.inputs)
        assert torch.equal(taken.data, weight.data)
        assert taken.data.data_ptr() % 64 == 0


def test_a_folder_without_the_file_has_no_packed_weights(tmp_path: Path) -> None:
    assert PackedFile.open(tmp_path) is None


def test_taken_weights_are_the_mapped_file_and_no_copy_of_it(tmp_path: Path) -> None:
    write_packed(tmp_path, {name: random_packed("q4_1", 1024, 1024) for name in ("a", "b")})
    file = PackedFile.open(tmp_path)
    assert file is not None
    weights = [file.take("a"), file.take("b")]
    del file
    assert sum(int(weight.data.sum()) for weight in weights) > 0  # every page is read
    start, end, kilobytes = mapping_of(tmp_path / PACKED_FILE)
    for weight in weights:
        assert start <= weight.data.data_ptr() < weight.data.data_ptr() + weight.data.nbytes <= end
    assert kilobytes["Rss"] * 1024 >= sum(weight.data.nbytes for weight in weights)
    assert kilobytes["Anonymous"] == 0  # copied pages would be


def mapping_of(path: Path) -> tuple[int, int, dict[str, int]]:
    """Where this process has mapped `path`, and what the kernel counts of it, in kilobytes."""
    smaps = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^(\w+)-(\w+) .* {re.escape(str(path))}\n((?:\w+: .*\n)+)", smaps, re.MULTILINE)
    assert found is not None, f"{path} is not mapped"
    counts = {key: int(value) for key, value in re.findall(r"(\w+): +(\d+) kB", found[3])}
    return int(found[1], 16), int(found[2], 16), counts


def _cut_the_data(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _cut_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def _rewrite(path: Path, metadata: dict[str, str] | None) -> None:
    save_file(load_file(path), path, metadata)


def _forget_the_metadata(path: Path) -> None:
    _rewrite(path, None)


def _name_another(path: Path) -> None:
    _describe(path, "b", kind="q4_1", outputs=16, inputs=64)


def _describe(path: Path, name: str, **entry: object) -> None:
    _rewrite(path, {"packed": json.dumps({name: entry})})


def _misspell_the_metadata(path: Path) -> None:
    _rewrite(path, {"packed": "{"})


def _name_an_unknown_kind(path: Path) -> None:
    _describe(path, "a", kind="q3_k", outputs=16, inputs=64)


def _name_the_layout_of_an_older_version(path: Path) -> None:
    _describe(path, "a", kind="q6_k", outputs=16, inputs=64)


def _claim_part_of_a_wide_block(path: Path) -> None:
    _describe(path, "a", kind="q6_k.2", outputs=16, inputs=64)


def _claim_another_kind(path: Path) -> None:
    _describe(path, "a", kind="q8_0", outputs=16, inputs=64)


def _claim_another_shape(path: Path) -> None:
    _describe(path, "a", kind="q4_1", outputs=17, inputs=64)


def _claim_half_a_block(path: Path) -> None:
    _describe(path, "a", kind="q4_1", outputs=16, inputs=72)


def _claim_a_negative_size(path: Path) -> None:
    _describe(path, "a", kind="q4_1", outputs=-16, inputs=-64)


def _forget_a_size(path: Path) -> None:
    _describe(path, "a", kind="q4_1", outputs=16)


def _store_other_numbers(path: Path) -> None:
    metadata = {"packed": json.dumps({"a": {"kind": "q4_1", "outputs": 16, "inputs": 64}})}
    save_file({"a": load_file(path)["a"].view(torch.int8)}, path, metadata)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut_the_data, "not a complete file"),
        (_cut_the_header, "not a complete file"),
        (_forget_the_metadata, "not a complete file"),
        (_misspell_the_metadata, "not a complete file"),
        (_name_another, "name other weights than it holds"),
        (_name_an_unknown_kind, "q3_k"),
        (_name_the_layout_of_an_older_version, "packed as q6_k, expected .* convert its GGUF file again"),
        (_claim_part_of_a_wide_block, "q6_k needs a multiple of 256 inputs, not 64"),
        (_claim_another_kind, r"should be 1088 bytes \(q8_0, 16 x 64\), is torch.uint8 \[640\]"),
        (_claim_another_shape, r"should be 1280 bytes \(q4_1, 17 x 64\)"),
        (_claim_half_a_block, "multiple of 32"),
        (_claim_a_negative_size, ">= 1"),
        (_forget_a_size, "missing required field `inputs`"),
        (_store_other_numbers, r"is torch.int8 \[640\]"),
    ],
)
def test_a_damaged_file_is_one_sentence(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    write_packed(tmp_path, {"a": random_packed("q4_1", 16, 64)})
    damage(tmp_path / PACKED_FILE)
    with pytest.raises(ModelError, match=message) as caught:
        PackedFile(tmp_path / PACKED_FILE).take("a")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / PACKED_FILE) in str(caught.value)


def test_a_weight_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_packed(tmp_path, {"a": random_packed("q4_1", 16, 64)})
    file = PackedFile.open(tmp_path)
    assert file is not None
    with pytest.raises(ModelError, match=r"no packed weight named b"):
        file.take("b")


# ---- the compiled product of rows and a matrix: right, and for each row the same bits whatever rows come with it -----


OUTPUTS, BLOCKS = 200, 3  # partial panels
ROWS_MAX = 121  # one more than a block of rows
ROWS = (*range(1, 65), 119, 120, ROWS_MAX)


@pytest.fixture(scope="module", params=COMPILED_KERNELS)
def product(request: pytest.FixtureRequest) -> Iterator[Product]:
    skip_unless_runnable(request.param)
    product = Product(request.param, threads=2)
    yield product
    product.close()


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_among_any_others(product: Product, kind: Kind, biased: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    inputs = BLOCKS * block_inputs(kind)
    packed = packed_weight(kind, OUTPUTS, inputs, generator)
    x = torch.randn(ROWS_MAX, inputs, generator=generator)
    bias = torch.randn(OUTPUTS, generator=generator) if biased else None
    alone = torch.cat([product(x[row : row + 1], kind, packed, OUTPUTS, bias) for row in range(ROWS_MAX)])
    weight = unpack(kind, packed, OUTPUTS, inputs)
    wide = product(x, "f32", pack_float(weight), OUTPUTS, bias)
    if kind in FLOAT_KINDS or kind == "q8_0":  # others fuse the last step of what their weights are made of
        assert torch.equal(alone, wide), "narrow matrices give the bits of the same numbers in float32"
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (alone - exact).abs().max() < 1e-5 * exact.abs().max()
    for rows in ROWS:
        assert torch.equal(product(x[:rows], kind, packed, OUTPUTS, bias), alone[:rows]), rows
        last = x[-rows:].contiguous()
        assert torch.equal(product(last, kind, packed, OUTPUTS, bias), alone[-rows:]), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_copy_of_a_matrix_in_float32_is_made_beside_it(dtype: torch.dtype) -> None:
    """The head of a model is gigabytes in float32."""
    weight = torch.randn(4096, 2048, generator=torch.Generator().manual_seed(1)).to(dtype).float()
    with LiveBytes() as live:
        packed = pack_float(weight, narrowest_kind(weight))
    assert packed.dtype == dtype
    assert packed.nbytes <= live.most < packed.nbytes + weight.nbytes / 4
