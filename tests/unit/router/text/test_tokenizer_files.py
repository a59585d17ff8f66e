"""A folder's tokenizer.json says how text is split, whatever class of a family the folder names for its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from router.text.tokenizer import Tokenizer
from tests.unit.router.tokenizer_shapes import CHATML, shaped, write_shape

TEXT = "<s>[INST] The fox 345 4444[/INST]The fox</s>\n héllo  does it?"
# As of Llama 2 and TinyLlama, SmolLM2, and the Qwen distills of DeepSeek-R1.
CLASSES = [
    ("llama2", "LlamaTokenizer", "llama"),
    ("smollm", "GPT2Tokenizer", "llama"),
    ("llama3", "LlamaTokenizerFast", "qwen2"),
]


def named(folder: Path, shape: str, tokenizer_class: str, model_type: str) -> Path:
    """A folder with a tokenizer of this shape, whose files name this class and type."""
    write_shape(folder, shaped(shape), CHATML)
    for name, changed in (
        ("tokenizer_config.json", {"tokenizer_class": tokenizer_class}),
        ("config.json", {"model_type": model_type}),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changed))
    return folder


@pytest.mark.parametrize(("shape", "tokenizer_class", "model_type"), CLASSES)
def test_the_class_that_a_folder_names_changes_no_token(
    shape: str, tokenizer_class: str, model_type: str, tmp_path: Path
) -> None:
    folder = named(tmp_path, shape, tokenizer_class, model_type)
    file = Backend.from_file(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder, template_seconds_max=10.0)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert list(ids) == file.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode_all(ids) == file.decode(list(ids), skip_special_tokens=False)
    assert tokenizer.tokens == file.get_vocab_size(), "the class has added no token of its own"
