"""Model files by strangers: the default model is known by its hash, and no file takes more memory than it explains."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.engine.gguf.convert import convert, default_gguf
from shared.errors import ModelError
from tests.unit.engine.tiny_gguf import INNER, write_tiny_gguf

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
        "import sys; from pathlib import Path; from shared.engine.gguf.convert import bound_memory\n"
        "bound_memory(Path(sys.argv[1])); print(len(bytearray(1 << 20))); bytearray(5 << 30)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == str(1 << 20)
    assert "MemoryError" in result.stderr
