"""What a user may type after `segue up` beside flags: the model by its place, and names that other servers have.

segue up MODEL        segue up --model MODEL
-p 9000, --port 9000  --router-port 9000
--max-model-len 4096  --context-len 4096
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.local.foreign_flags import FOREIGN_FLAGS
from shared.primitives.errors import ConfigError

ALIASES = {
    "-p": "--router-port",  # the API's port is the one that users mean
    "--port": "--router-port",
    "--max-model-len": "--context-len",
}


def spelled_out(words: Sequence[str]) -> list[str]:
    """The flags that the words mean; raises ConfigError for a model that is named twice, and for a foreign flag."""
    flags = [_flag(word) for word in words]
    if not flags or flags[0].startswith("-"):
        return flags
    model, *rest = flags
    if any(flag == "--model" or flag.startswith("--model=") for flag in rest):
        raise ConfigError(f"the model is named twice: {model} and --model; leave out one of them")
    return ["--model", model, *rest]


def _flag(word: str) -> str:
    name, equals, value = word.partition("=")
    if answer := FOREIGN_FLAGS.get(name):
        raise ConfigError(f"{name} {answer}")
    return ALIASES.get(name, name) + equals + value
