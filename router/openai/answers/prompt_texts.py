"""The JSON of what an answer tells of a prompt and, behind its echo, of an output; of several choices made once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from router.openai.answers.json_parts import KeptTexts, Parts, object_parts
from router.openai.answers.kept_answer import KeptChoice
from router.openai.answers.logprob_objects import LogprobObjects
from router.openai.answers.prompt_echo import PromptEcho

Texts = Iterable[bytes]


class PromptTexts:
    """Texts that report one prompt."""

    def __init__(self, prompt: PromptEcho, objects: LogprobObjects):
        self.prompt = prompt
        # The items of each list of `logprobs`, if the echo has logprobs; and `prompt_logprobs`, if they were asked for.
        self.echo: dict[str, Texts] = {}
        self.logprobs: Texts = ()
        if prompt.echo_top >= 0:
            lists = objects.completion_lists(prompt.echoed)
            self.echo = {name: self._kept(texts) for name, texts in lists.items()}
        if prompt.scored:
            self.logprobs = self._kept(objects.prompt_texts(prompt.entries()))

    def _kept(self, texts: Iterator[bytes]) -> Texts:
        return KeptTexts(texts) if self.prompt.choices > 1 else texts


def completion_logprobs(choice: KeptChoice, echo: dict[str, Texts], objects: LogprobObjects) -> Parts | None:
    """`logprobs` of a choice of completions, behind those of its prompt; None: there are none."""
    if not (echo or choice.entries):
        return None
    own = objects.completion_lists(choice.entries.batches)
    comma = bool(echo and choice.entries)
    return object_parts(
        {name: Parts(_one_list(echo.get(name, ()), items, comma=comma)) for name, items in own.items()}
    )


def _one_list(first: Texts, second: Texts, *, comma: bool) -> Iterator[bytes]:
    yield b"["
    yield from first
    if comma:
        yield b","
    yield from second
    yield b"]"
