"""Model files by strangers: the default model is known by its hash, and no file takes more memory than it explains."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGUFWriter

from shared.engine.gguf.convert import ITEMS_MAX, check_header, convert, default_gguf
from shared.primitives.errors import ModelError
from tests.unit.engine.checkpoint.tiny_gguf import HIDDEN, INNER, byte_level, write_tiny_gguf

WIDTH_BYTES = struct.pack("<I", 4)  # GGUF's type number of an unsigned 32-bit value


def test_another_file_in_the_default_models_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(default_gguf().read_bytes())
    content[-1] ^= 1
    changed = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    changed.write_bytes(content)
    file = SimpleNamespace(suffix=".gguf", locate=lambda: changed)
    monkeypatch.setattr("importlib.metadata.files", lambda _package: [file])
    with pytest.raises(ModelError, match="holds another model than expected"):
        default_gguf()


def test_a_file_whose_loader_drops_what_it_means_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "gemma2")
    with pytest.raises(
        ModelError, match="unsupported in GGUF files: gemma2; supported are llama, mistral, qwen2"
    ):
        convert(tmp_path / "tiny.gguf", tmp_path / "model", lambda *_: None)


def test_a_file_with_biases_that_loading_would_drop_is_refused(tmp_path: Path) -> None:
    """As of Granite's code models, which are of the architecture llama."""

    def describe(writer: GGUFWriter) -> None:
        byte_level(writer)
        for name in ("attn_q", "attn_k"):
            writer.add_tensor(f"blk.1.{name}.bias", np.ones(HIDDEN, np.float32))

    write_tiny_gguf(tmp_path / "tiny.gguf", "llama", describe=describe)
    with pytest.raises(
        ModelError, match=r"unsupported in GGUF files: blk.1.attn_q.bias and 1 other tensors that Llama"
    ):
        convert(tmp_path / "tiny.gguf", tmp_path / "model", lambda *_: None)


def test_a_file_with_another_scaling_of_rope_than_llama_3s_is_refused(tmp_path: Path) -> None:
    def describe(writer: GGUFWriter) -> None:
        byte_level(writer)
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32))

    write_tiny_gguf(tmp_path / "tiny.gguf", "llama", describe=describe)
    with pytest.raises(ModelError, match=r"scaled rope \(rope_freqs.weight other than Llama 3's\)"):
        convert(tmp_path / "tiny.gguf", tmp_path / "model", lambda *_: None)


def test_a_header_that_claims_huge_matrices_does_not_get_them(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "llama")
    key = b"llama.feed_forward_length" + WIDTH_BYTES
    content = path.read_bytes()
    assert content.count(key + struct.pack("<I", INNER)) == 1
    path.write_bytes(content.replace(key + struct.pack("<I", INNER), key + struct.pack("<I", 1 << 26)))
    command = [sys.executable, "-m", "shared.engine.gguf.convert", str(path), str(tmp_path / "model")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "tiny.gguf cannot be converted" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "model").exists()


def test_a_conversion_cannot_take_more_memory_than_its_file_explains(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(bytes(1 << 20))
    code = (
        "import sys; from pathlib import Path; from shared.engine.gguf.convert import bound_resources\n"
        "bound_resources(Path(sys.argv[1])); print(len(bytearray(1 << 20))); bytearray(5 << 30)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == str(1 << 20)
    assert "MemoryError" in result.stderr


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*values: bytes, tensors: int = 0, fields: int | None = None) -> bytes:
    """A header with a field for each value, which is its type number and its bytes."""
    start = struct.pack("<4sIQQ", b"GGUF", 3, tensors, len(values) if fields is None else fields)
    return start + b"".join(text(b"key") + value for value in values)


ARRAY, STRING, BYTE = struct.pack("<I", 9), struct.pack("<I", 8), struct.pack("<I", 0)
HOSTILE_HEADERS = {
    "an array of 2^60 numbers": (header(ARRAY + BYTE + struct.pack("<Q", 1 << 60)), "items"),
    "an array beyond the file": (header(ARRAY + BYTE + struct.pack("<Q", 1 << 20)), "1,048,576 bytes of 0 left"),
    "a text of 2^63 bytes": (header(STRING + struct.pack("<Q", 1 << 63)), "bytes of 0 left"),
    "fields without end": (header(fields=1 << 40), "fields"),
    "tensors without end": (header(tensors=1 << 40), "tensors"),
    "an array of 9 << 32 arrays": (header(ARRAY * 9 + BYTE), "items"),
    "nested arrays": (header(ARRAY + (ARRAY + struct.pack("<Q", 1)) * 20), "arrays within arrays"),
    "an unknown type": (header(struct.pack("<I", 77)), "unknown type 77"),
    "nothing behind": (header(fields=1), "ends within"),
    "many texts": (header(ARRAY + STRING + struct.pack("<Q", ITEMS_MAX + 1)), "items"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "why"), HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS)
def test_a_header_that_claims_what_is_not_there_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"^the header of .* is malformed: .*{why}"):
        convert(path, tmp_path / "model", lambda *_: None)


def test_an_ordinary_header_passes_and_any_end_within_it_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "llama")
    check_header(path)
    check_header(default_gguf())
    content, cut = path.read_bytes(), tmp_path / "cut.gguf"
    for length in range(0, 1000, 7):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"malformed|not a GGUF file"):
            check_header(cut)


def test_a_conversion_that_takes_more_time_than_its_file_explains_ends(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(bytes(1 << 20))
    code = (
        "import sys; from pathlib import Path; from shared.engine.gguf import convert\n"
        "convert._CPU_SECONDS = 1; convert._CPU_SECONDS_PER_FILE_MEGABYTE = 0\n"
        "convert.bound_resources(Path(sys.argv[1]))\n"
        "while True: pass"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert result.returncode == -signal.SIGXCPU
