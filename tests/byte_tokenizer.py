"""A tokenizer whose tokens are the 256 bytes and some longer pieces, as a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

EOS = 0
VOCAB_SIZE = 320  # more than the tokenizer has, as in models whose matrices are padded


MARKS = {"[TOOL_CALLS]": 262, "[ARGS]": 263, "[CALL_ID]": 264}  # special tokens, behind the pieces


def write_byte_tokenizer(folder: Path, marks: Iterable[str] = MARKS) -> Path:
    """Write it into the folder; returns the file. Token 0 ends an answer, 1 to 256 are bytes, 262 is the first mark."""
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {"<eos>": EOS} | {letter: 1 + at for at, letter in enumerate(alphabet)}
    merges = [("t", "r"), ("tr", "u"), ("tru", "e"), ('"', ":"), ("{", '"')]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<eos>", *marks)])
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return file
