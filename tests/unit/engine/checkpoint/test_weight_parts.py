"""A part of a weight is read, and no more of its file: a process that touches another page of it dies."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.engine.checkpoint.model_config import read_model_config
from shared.engine.model.loading import load_decoder
from shared.engine.model.torch_ops import TorchOps
from shared.engine.model.weights import Weights
from shared.engine.quantized.weight_source import Part
from shared.primitives.errors import ModelError
from tests.unit.engine.checkpoint.published_models import MetaWeights
from tests.unit.engine.test_fp8_weights import PHI3
from tests.unit.engine.tiny_models import tiny_model

NAME, SHAPE = "model.layers.0.mlp.down_proj.weight", (16, 32768)  # rows of 64 KiB
NUMBERS = torch.arange(16 * 32768, dtype=torch.int32).remainder(251).to(torch.bfloat16).view(SHAPE)
ROWS, COLUMNS = Part(3, 5), Part(8192, 16384, dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("parts")
    save_file({NAME: NUMBERS}, found / "model.safetensors")
    return found


def forbid_all_but(cut: Tensor, whole: Tensor) -> None:
    """Of the mapped pages of a weight those alone may be read from now on that hold some of a part."""
    row, first = cut[0].nbytes, cut.data_ptr()
    starts = [first + number * whole[0].nbytes for number in range(len(cut))]
    wanted = {at // mmap.PAGESIZE for start in starts for at in range(start, start + row, 2)}
    libc = ctypes.CDLL(None, use_errno=True)
    end = whole.data_ptr() + whole.nbytes
    for page in range(whole.data_ptr() // mmap.PAGESIZE + 1, end // mmap.PAGESIZE):
        if page not in wanted:
            address = ctypes.c_void_p(page * mmap.PAGESIZE)
            assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0, ctypes.get_errno()


def read_under_guard(folder: Path, allowed: Part, asked: Part | None) -> None:
    """Of a process: raises if what was asked for is wrong."""
    with Weights(folder) as weights:
        whole = weights.take(NAME, SHAPE, torch.bfloat16)  # a view of the mapped file, which reads nothing
        forbid_all_but(whole[allowed.index_in(SHAPE)], whole)
        found = weights.take(NAME, SHAPE, torch.float32, asked)
        assert torch.equal(found, NUMBERS.float()[asked.index_in(SHAPE)] if asked else NUMBERS.float())


CASES: dict[
    str, tuple[Part, Part | None, bool]
] = {  # what may be read, what is asked for, and whether that dies
    "rows": (ROWS, ROWS, False),
    "columns": (COLUMNS, COLUMNS, False),
    "rows and one more": (ROWS, Part(3, 6), True),
    "columns and more": (COLUMNS, Part(8192, 24576, dim=1), True),
    "all where rows may be read": (ROWS, None, True),
    "all where columns may be read": (COLUMNS, None, True),
}


def read_each_under_guard(folder: Path, codes: Connection) -> None:
    """Of a process of one thread, which each case leaves by a fork: so torch is imported once. Sends how they ended."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    for name, (allowed, asked, _) in CASES.items():
        process = context.Process(target=read_under_guard, args=(folder, allowed, asked))
        process.start()
        process.join()
        codes.send((name, process.exitcode))


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, int]:
    """The exit code of each case."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=read_each_under_guard, args=(folder, there))
    process.start()
    there.close()
    found = dict(here.recv() for _ in CASES)
    process.join()
    assert process.exitcode == 0
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_part_is_read_and_no_more(ended: dict[str, int], name: str) -> None:
    assert ended[name] == (-signal.SIGSEGV if CASES[name][2] else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("part", [ROWS, COLUMNS, Part(15, 16), Part(0, 16)], ids=str)
def test_a_part_is_that_of_the_whole(folder: Path, part: Part, dtype: torch.dtype) -> None:
    with Weights(folder) as weights:
        found = weights.take(NAME, SHAPE, dtype, part)
    assert found.dtype == dtype
    assert torch.equal(found, NUMBERS.to(dtype)[part.index_in(SHAPE)])


def test_a_part_of_a_weight_of_another_shape_is_refused(folder: Path) -> None:
    with Weights(folder) as weights, pytest.raises(ModelError, match=r"should have shape \[64, 16\], has"):
        weights.take(NAME, (64, 16), torch.float32, Part(0, 8))


def test_linears_that_a_file_holds_as_one_are_each_read_once_and_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q, k and v, gate and up of Phi-3: parts that do not overlap, and are all there is."""
    tiny_model(PHI3, tmp_path)
    config, weights, parts = read_model_config(tmp_path), MetaWeights(), []
    take = MetaWeights.take

    def watched(self: MetaWeights, name: str, shape: Any, dtype: torch.dtype, part: Any = None) -> Any:
        parts.append((name, part.start if part else None))
        return take(self, name, shape, dtype, part)

    monkeypatch.setattr(MetaWeights, "take", watched)
    load_decoder(config.at_context(16), weights, TorchOps(), context_len=16, dtype=torch.float32)
    assert sum(weights.taken.values()) == config.parameters
    mlp = [start for name, start in parts if name == "model.layers.0.mlp.gate_up_proj.weight"]
    assert mlp == [0, config.intermediate_size]
    assert len([name for name, _ in parts if name == "model.layers.0.self_attn.qkv_proj.weight"]) == 3
