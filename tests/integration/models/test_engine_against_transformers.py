"""SmolLM2, converted from GGUF, generates greedily what transformers generates in float32.

Tokens are compared up to the first near tie, where transformers' own two best logits are so close that the gap
between its logits and ours may decide. Measured largest gap, of logits up to 38: 2.4e-4 with KV in float32, 5.3e-2
with KV in float16, which is what a model of 4-bit blocks gets.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from shared.engine.checkpoint.model_config import read_eos_token_ids
from shared.engine.gguf.convert import convert, default_gguf
from shared.engine.gguf.packed_file import PACKED_FILE, PackedFile
from shared.engine.gguf.packing import unpack
from shared.primitives.errors import ModelError
from tests.unit.engine.driver import Driver

NEW_TOKENS = 24
LOGIT_GAP_MAX = {"float32": 1e-3, "float16": 1e-1}  # by the type of KV

_SENTENCE = (
    "The river carried the boat past the mill, the bridge and the old stone church, and then it turned. "
)
PROMPTS = {
    "one token": "The",
    "a short question": "What is the capital of France?",
    "multi-byte text": "日本の首都は東京です。Ünïcödé und Emoji 🙂👩‍👩‍👧 sont",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "about 1,000 tokens": _SENTENCE * 46,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    said: list[float] = []
    path = convert(
        default_gguf(), tmp_path_factory.mktemp("models") / "smollm2", lambda _, share: said.append(share)
    )
    assert said == sorted(said)
    assert said[-1] == 1.0
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model


@pytest.fixture(scope="module", params=LOGIT_GAP_MAX)
def driver(folder: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = Driver(folder, pages=256, threads=2, kv_cache_dtype=request.param)
    yield driver
    driver.close()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_those_of_transformers(
    prompt: str, driver: Driver, reference: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    token_ids = tokenizer(PROMPTS[prompt])["input_ids"]
    driver.prefill(0, token_ids, range(80), chunk=512)
    driver.decode([0], NEW_TOKENS - 1)
    found = driver.tokens[0]
    with torch.inference_mode():  # all of transformers' logits at once: teacher forcing with our own tokens
        expected = reference(torch.tensor([[*token_ids, *found[:-1]]])).logits[0, len(token_ids) - 1 :]
    compared = 0
    for token, logits, ours in zip(found, expected, driver.logits[0], strict=True):
        gap = float((logits - ours).abs().max())
        assert gap < LOGIT_GAP_MAX[driver.kv_cache_dtype]
        best, second = logits.topk(2).values.tolist()
        if best - second < 2 * gap:
            break
        assert token == int(logits.argmax())
        compared += 1
    assert compared >= NEW_TOKENS // 2, f"a near tie after {compared} tokens: choose another prompt"


def test_sixteen_at_a_time_have_the_bits_of_each_alone(
    driver: Driver, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = [f"{number}. {_SENTENCE * (number % 3)}Once upon a time" for number in range(16)]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    for slot, token_ids in enumerate(prompts):
        driver.prefill(slot, token_ids, range(16 * slot, 16 * slot + 16))
    driver.decode(range(16), 6)
    together = [driver.logits[slot] for slot in range(16)]
    for slot in (0, 5, 11):
        driver.prefill(slot, prompts[slot], range(100, 116))
        driver.decode([slot], 6)
        for ours, alone in zip(together[slot], driver.logits[slot], strict=True):
            assert torch.equal(ours, alone)


def test_one_thread_has_the_bits_of_two(
    folder: Path, driver: Driver, tokenizer: PreTrainedTokenizerBase
) -> None:
    token_ids = tokenizer(_SENTENCE * 8)["input_ids"]
    single = Driver(folder, pages=32, threads=1, kv_cache_dtype=driver.kv_cache_dtype)
    for one in (driver, single):
        one.prefill(0, token_ids, range(16))
        one.decode([0], 4)
    single.close()
    for ours, theirs in zip(driver.logits[0], single.logits[0], strict=True):
        assert torch.equal(ours, theirs)


def test_the_folder_tells_the_chat_template_and_the_end_of_a_turn(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert read_eos_token_ids(folder) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_every_matrix_is_packed_and_unpacks_to_the_float_weight_bit_for_bit(folder: Path) -> None:
    packed = PackedFile(folder / PACKED_FILE)
    for name, weight in load_file(folder / "model.safetensors").items():
        assert (name in packed) == (weight.dim() == 2)
        if weight.dim() == 2:
            taken = packed.take(name)
            unpacked = unpack(taken.kind, taken.data, taken.outputs, taken.inputs)
            assert torch.equal(unpacked.view(torch.int32), weight.view(torch.int32)), name


def test_a_second_conversion_returns_at_once(folder: Path) -> None:
    said: list[str] = []
    written = (folder / "model.safetensors").stat().st_mtime_ns
    convert(default_gguf(), folder, lambda what, _: said.append(what))
    assert said == ["already converted"]
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def _half(path: Path) -> None:
    content = default_gguf().read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _no_magic(path: Path) -> None:
    path.write_bytes(b"not a model at all")


def _only_magic(path: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(64))


def _nothing(_path: Path) -> None:
    """The file is missing."""


@pytest.mark.parametrize("damage", [_half, _no_magic, _only_magic, _nothing])
def test_a_broken_gguf_leaves_no_folder_behind(damage: Callable[[Path], None], tmp_path: Path) -> None:
    source = tmp_path / "source" / "broken.gguf"
    source.parent.mkdir()
    damage(source)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        convert(source, tmp_path / "models" / "broken", lambda *_: None)
    assert not (tmp_path / "models").exists() or list((tmp_path / "models").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    shutil.copy(default_gguf(), tmp_path / "model.gguf")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="cannot write the converted model"):
        convert(tmp_path / "model.gguf", tmp_path / "file" / "model", lambda *_: None)
