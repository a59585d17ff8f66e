"""Tries the tokenizer and the chat template of a model folder in a child process, before a router loads them.

A folder may come from anybody. Its template is a program and its tokenizer another: `{{ 'x' * 2000000000 }}` takes two
gigabytes in one step, and a normalizer that multiplies its text ends the process that runs it. The child loads the
folder as a router does, renders sample chats and encodes a sample text, under bounds of memory and CPU seconds that the
sizes of the folder's files explain. So a folder that takes more is one sentence, and no router dies of it while it
serves.

What a template does with one particular request alone, no sample shows: `template_seconds_max` bounds its time, and its
memory has no bound. Whoever chooses a model trusts its template that far.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from router.text.chat_template import SAMPLE_TOOL, ChatOptions, TemplateLimitError
from router.text.tokenizer import Tokenizer, TooLongError, hide_torch
from shared.limits.model_files import TOKENIZER_BYTES_MAX
from shared.primitives.errors import ModelError, RequestError

MEMORY_BYTES = 256 << 20  # beside what transformers takes once it is imported
MEMORY_BYTES_PER_FILE_BYTE = 32  # a tokenizer.json of 15 MB with 262,144 tokens takes 23
CPU_SECONDS = 5
CPU_SECONDS_PER_FILE_MEGABYTE = 1.0  # that tokenizer takes 0.2 s a megabyte on a fast machine
WALL_SECONDS = 300  # a machine may be busy; a file that never ends is no file
_SAMPLE_TEXT = "The quick brown fox, 42 times.\n\théllo wörld, 日本語 🙂 <|end|></s> aaaaaaaa"
_ROLES = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "tool", "assistant", "user"),
)
_OPTIONS = (
    ChatOptions(),
    ChatOptions(tools=[SAMPLE_TOOL]),
    ChatOptions(add_generation_prompt=False),
    ChatOptions(variables={"enable_thinking": False}),
)


def try_folder(folder: Path, template_seconds_max: float, chat_template: Path | None = None) -> None:
    """Raise `ModelError` if the folder's tokenizer cannot be loaded, or takes more than its bounds.

    The template in the file `chat_template` is tried in place of the folder's.

    Takes the CPU time of one more loading, some 1.5 seconds for a tokenizer of 50,000 tokens.
    """
    file_bytes = _tokenizer_bytes(folder)
    memory = MEMORY_BYTES + MEMORY_BYTES_PER_FILE_BYTE * file_bytes
    seconds = CPU_SECONDS + int(CPU_SECONDS_PER_FILE_MEGABYTE * file_bytes / 1e6)
    bounds = [str(template_seconds_max), str(memory), str(seconds), str(chat_template or "")]
    own = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}  # what threads reserve would count as memory
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(folder), *bounds],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WALL_SECONDS,
            check=False,
            env=os.environ | own,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"the tokenizer of {folder} was not read within {WALL_SECONDS} s: expected files on a disk that answers"
        ) from None
    if child.returncode == 0:
        return
    if child.returncode == -signal.SIGXCPU:
        raise ModelError(
            f"the tokenizer or the chat template of {folder} takes more than {seconds} s for sample texts: use another"
        )
    sentence = child.stdout.decode(errors="replace").strip()
    if sentence and child.returncode == 1:
        raise ModelError(json.loads(sentence))
    # tokenizers and Python end a process that gets no memory
    raise ModelError(_too_much_memory(folder, memory))


def _too_much_memory(folder: Path, memory: int) -> str:
    return (
        f"the tokenizer or the chat template of {folder} takes more than {memory >> 20} MiB for sample texts: "
        "use another"
    )


def _tokenizer_bytes(folder: Path) -> int:
    """The size of all files that a tokenizer may be read from; raises `ModelError` if one is too large."""
    total = 0
    for path in sorted(folder.glob("*")):
        if path.suffix not in (".json", ".jinja", ".model", ".txt") or path.name.endswith(".index.json"):
            continue
        with contextlib.suppress(OSError):  # loading says what is wrong with it
            size = path.stat().st_size
            if size > TOKENIZER_BYTES_MAX:
                raise ModelError(
                    f"{path} has more than {TOKENIZER_BYTES_MAX >> 20} MiB, the most that a tokenizer's file may have"
                )
            total += size
    return total


def _try_here(folder: Path, template_seconds_max: float, chat_template: Path | None) -> None:
    """Load the folder and use it as requests do; raises `ModelError`, and what a lack of memory raises."""
    tokenizer = Tokenizer(folder, template_seconds_max, chat_template=chat_template)
    if chat_template and (fault := tokenizer.template_fault):
        raise ModelError(f"{chat_template} should be a Jinja template: {fault}")
    with contextlib.suppress(TooLongError):
        tokenizer.decode_all(tokenizer.encode(_SAMPLE_TEXT, tokens_max=1 << 16))
    if not tokenizer.has_chat_template:
        return
    for roles in _ROLES:
        for options in _OPTIONS:
            messages = [{"role": role, "content": _SAMPLE_TEXT} for role in roles]
            try:
                tokenizer.encode_chat(messages, options, tokens_max=1 << 16)
            except TemplateLimitError as error:
                raise ModelError(f"{folder} cannot be served with a sample chat: {error.message}") from None
            except (RequestError, TooLongError):  # a template may ask for roles in another order
                pass


def main() -> int:
    """The child: FOLDER, seconds of a template, bytes of memory, CPU seconds, a template's file or nothing.

    Prints the sentence of a refusal.
    """
    folder, template_seconds_max, memory, seconds = (
        Path(sys.argv[1]),
        float(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
    chat_template = Path(sys.argv[5]) if sys.argv[5] else None
    hide_torch()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401  # bounds are beside what imports take

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    try:
        _try_here(folder, template_seconds_max, chat_template)
    except ModelError as error:
        sentence = str(error)
    except MemoryError:
        sentence = _too_much_memory(folder, memory)
    else:
        return 0
    sys.stdout.write(json.dumps(sentence))
    return 1


if __name__ == "__main__":
    sys.exit(main())
