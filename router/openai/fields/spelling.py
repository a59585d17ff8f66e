"""Slips of the finger in names of fields: `tempreature`, `topP`, `max_token`.

A slip is another case or other punctuation, one edit, or two edits of a long name; an edit inserts, drops or replaces a
letter, or swaps two neighbours. Only names whose loss would change an answer unnoticed are looked for: clients have
thousands of words of their own, and an application must not break because one of them resembles a field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from router.openai.fields.generation_fields import SAMPLING
from shared.primitives.errors import RequestError

UNKNOWN = "unknown_parameter"  # OpenAI's word
GUARDED = (  # where a slip is an error: sampling, tools, and the form of an answer
    *SAMPLING,
    *(
        "seed",
        "stop",
        "stop_sequences",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "min_tokens",
    ),
    *(
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "stop_token_ids",
        "ignore_eos",
        "allowed_token_ids",
        "bad_words",
    ),
    *("response_format", "structured_outputs", "tool_choice", "chat_template_kwargs", "reasoning_effort"),
    *("tools", "functions", "stream", "stream_options"),
)
OBJECTS = {  # the names within fields, of which a slip would change the output
    "stream_options": ("include_usage", "continuous_usage_stats", "include_obfuscation"),
    "json_schema": ("name", "description", "schema", "strict"),
    "tool": ("type", "function", "name", "description", "parameters", "strict"),
    "function": ("name", "description", "parameters", "strict"),
    "Anthropic's tool": ("type", "name", "description", "input_schema", "strict", "defer_loading"),
    "thinking": ("type", "budget_tokens", "display"),
    "output_config": ("effort", "format", "task_budget"),
    "output_config.format": ("type", "schema"),
    "output_format": ("type", "schema"),
    "text": ("format", "verbosity"),
    "text.format": ("type", "name", "description", "schema", "strict"),
}
ONE_EDIT_CHARS = 6  # of a name of which one edit is a slip; shorter ones are other words: stop, step
ONE_EDIT_NAMES = frozenset({"tools"})  # shorter, and no other word is near
TWO_EDITS_CHARS = 10
NAMES_MAX = 64  # unknown names of one request that are compared: 20 ms at most


def check_names(given: Iterable[str], within: str, kind: str) -> None:
    """Raise `RequestError` for a slip in the names of an object of this kind. `within` is its place in the body."""
    known = OBJECTS[kind]
    for name in [name for name in given if name not in known][:NAMES_MAX]:
        _check(name, known, f"{within}.{name[:64]}")


def check_names_of_each(entries: Sequence[Iterable[str]], within: str, kind: str) -> None:
    """Check names as `check_names` does in each object of a list, all of them together bounded as one."""
    known, compared = frozenset(OBJECTS[kind]), set[str]()
    for at, given in enumerate(entries):
        for name in given:
            if name in known or name in compared:
                continue
            if len(compared) == NAMES_MAX:
                return
            _check(name, OBJECTS[kind], f"{within}[{at}].{name[:64]}")
            compared.add(name)


def check_guarded(names: Iterable[str], served: Iterable[str]) -> None:
    """Raise `RequestError` for a name that is a slip of a guarded one of `served`."""
    guarded = [name for name in GUARDED if name in served]
    for name in islice(names, NAMES_MAX):
        _check(name, guarded, name[:64])


def _check(name: str, known: Iterable[str], param: str) -> None:
    meant = next((one for one in known if is_slip(name, one)), None)
    if meant:
        raise RequestError(f"{param} is not a field; did you mean {meant}?", param=param, code=UNKNOWN)


def is_slip(name: str, known: str) -> bool:
    """Whether `name` was probably meant to be `known`, which it is not."""
    edits_max = (
        2
        if len(known) >= TWO_EDITS_CHARS
        else 1
        if len(known) >= ONE_EDIT_CHARS or known in ONE_EDIT_NAMES
        else 0
    )
    if abs(len(name) - len(known)) > max(edits_max, 4):  # four more characters of punctuation
        return False
    if _letters(name) == _letters(known):
        return True
    near = abs(len(name) - len(known)) <= edits_max and len(set(name) ^ set(known)) <= 2 * edits_max
    return near and edits(name, known) <= edits_max


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def edits(a: str, b: str) -> int:
    """Edits that make `b` of `a`, no letter edited twice (optimal string alignment)."""
    rows: list[list[int]] = [list(range(len(b) + 1))]
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            best = min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
