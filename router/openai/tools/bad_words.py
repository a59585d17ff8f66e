"""`bad_words` become sequences of token ids, and what is masked leaves something to choose.

As in vLLM a word is masked where a text begins and behind a space: each word is two sequences, unless the tokenizer
makes the same of both. Sequences that spell the word in other tokens are not masked; a regex is for that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError
from shared.wire.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams

BAD_WORDS_MAX = MAX_BAD_WORDS // 2
BAD_WORD_CHARS_MAX = 256


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The sequences of all words; raises `RequestError`."""
    if len(words) > BAD_WORDS_MAX:
        raise RequestError(
            f"bad_words takes at most {BAD_WORDS_MAX} words, got {len(words)}", param="bad_words"
        )
    found: dict[tuple[int, ...], None] = {}
    for at, word in enumerate(words):
        text = word.lstrip()
        if not text or len(word) > BAD_WORD_CHARS_MAX:
            raise _refused(at, f"must have 1 to {BAD_WORD_CHARS_MAX} characters, and not spaces alone")
        for spelling in (text, f" {text}"):
            ids = tokenizer.encode(spelling, add_special_tokens=False)
            if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
                raise _refused(at, f"has {len(ids)} tokens; a word may have 1 to {MAX_BAD_WORD_TOKENS}")
            found[ids] = None
    return tuple(found)


def check_masks(params: SamplingParams, eos_token_ids: Collection[int]) -> None:
    """Raise `RequestError` where nothing might be left of `allowed_token_ids`."""
    if not params.allowed_token_ids:
        return
    left = set(params.allowed_token_ids) - {word[-1] for word in params.bad_words}
    if params.min_new_tokens:
        left -= {*eos_token_ids, *params.stop_token_ids}
    if not left:
        raise RequestError(
            "allowed_token_ids must hold a token that neither bad_words nor min_tokens bars",
            param="allowed_token_ids",
        )


def _refused(at: int, reason: str) -> RequestError:
    return RequestError(f"bad_words[{at}] {reason}", param=f"bad_words[{at}]")
