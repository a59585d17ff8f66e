"""A folder's tokenizer.json says how text is split, whatever class of a family the folder names for its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, models, pre_tokenizers, trainers
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


@pytest.mark.parametrize("saved", ["truncation", "padding"])
def test_no_prompt_is_cut_or_filled_as_in_training(saved: str, tmp_path: Path) -> None:
    """Whoever saves a tokenizer behind a training saves how that cut and filled its texts, too."""
    tokenizer = Backend.from_str(shaped("llama3").to_str())
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    if saved == "truncation":
        tokenizer.enable_truncation(8)
    else:
        tokenizer.enable_padding(length=64)
    write_shape(tmp_path, tokenizer, CHATML)
    served = Tokenizer(tmp_path, template_seconds_max=10.0)
    assert list(served.encode(TEXT, add_special_tokens=False)) == ids


TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HINDI = "हिन्दी में एक वाक्य है और यह दूसरा वाक्य भी हिन्दी में है। "
MISTRAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]


def by(regex: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def hindi(special: list[str]) -> Backend:
    """A tokenizer that was trained on words as Mistral's."""
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = by(TEKKEN)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([HINDI] * 4, trainer)
    return tokenizer


@pytest.mark.parametrize("special", [MISTRAL, ["<unk>", "<s>", "</s>", "[INST]"]], ids=["mistral", "another"])
def test_mistrals_own_words_stand_for_those_of_llama_3_in_its_file(
    special: list[str], tmp_path: Path
) -> None:
    right, wrong = hindi(special), hindi(special)
    wrong.pre_tokenizer = by(LLAMA3)
    expected, as_written = (each.encode(HINDI).ids for each in (right, wrong))
    assert expected != as_written
    write_shape(tmp_path, wrong, CHATML)
    ids = Tokenizer(tmp_path, template_seconds_max=10.0).encode(HINDI, add_special_tokens=False)
    assert list(ids) == (expected if special is MISTRAL else as_written)
