"""The switches for thoughts in the dialects of many servers, as one: whether a model thinks, how much, and who sees it.

    1  chat_template_kwargs {enable_thinking | thinking}        vLLM, SGLang: variables of the template
    2  enable_thinking                                          Qwen, SiliconFlow, Cherry Studio
    3  thinking {type: enabled | disabled}, or a boolean        Anthropic, DeepSeek, Zhipu, Dify
    4  think                                                    Ollama
    5  reasoning {enabled, effort}                              OpenRouter
    6  disable_reasoning                                        Cerebras
    7  reasoning_effort                                         OpenAI; none turns thoughts off
    8  thinking_budget, thinking_token_budget, reasoning_budget Qwen, vLLM, llama.cpp; 0 turns thoughts off

Where two say the contrary, the first of this list counts, and the answer's header names the other. What comes out is a
variable of the chat template that the template looks at: it was tried. Without one, thoughts that are to be left out
are so anyway unless the model always thinks; then, and where thoughts are wanted of a model that has none, the answer's
header names the field. No other budget than 0 is held: max_tokens bounds thoughts and answer together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from router.openai.fields.ignored import Ignored
from router.text.tokenizer import Tokenizer

SWITCHES = ("enable_thinking", "thinking")  # variables of templates, each a boolean
EFFORT = "reasoning_effort"  # likewise, a word
BUDGETS = ("thinking_budget", "thinking_token_budget", "reasoning_budget")
_EFFORTS = ("think", "reasoning.effort", EFFORT)
# gpt-oss was trained with low, medium and high; what others call the ends of their scales is the nearest of these.
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_ABOUT_THINKING = (
    *("chat_template_kwargs", "enable_thinking", "thinking", "think", "reasoning", "disable_reasoning"),
    *("reasoning_effort", *BUDGETS, "reasoning_format"),
)

_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
_HIDDEN, _SHOWN, _IN_CONTENT = ("hidden",), ("parsed", "auto", "deepseek"), ("raw", "none")


class ThinkingObject(msgspec.Struct):
    """`thinking`, as Anthropic has it."""

    type: str | None = None
    budget_tokens: int | None = None


class ReasoningObject(msgspec.Struct):
    """`reasoning`, as OpenRouter has it."""

    enabled: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None
    exclude: bool | None = None


class ThoughtFields(Protocol):
    """The fields of a chat that are about thoughts."""

    chat_template_kwargs: dict[str, Any] | None
    enable_thinking: bool | None
    thinking: bool | str | ThinkingObject | None
    think: bool | str | None
    reasoning: ReasoningObject | None
    disable_reasoning: bool | None
    reasoning_effort: str | None
    thinking_budget: int | None
    thinking_token_budget: int | None
    reasoning_budget: int | None
    include_reasoning: bool | None  # false: thoughts are left out of the answer
    separate_reasoning: bool | None  # false: thoughts are content
    reasoning_format: str | None


def template_variables(fields: ThoughtFields, tokenizer: Tokenizer, ignored: Ignored) -> dict[str, Any]:
    """The client's variables for the chat template, with those that its other fields mean."""
    if all(getattr(fields, name) is None for name in _ABOUT_THINKING):
        return {}  # as of most requests: the template need not be tried for them
    read, always_thinks = tokenizer.variables_read, tokenizer.answers.format.thinks
    variables = dict(fields.chat_template_kwargs or {})
    switches = [name for name in SWITCHES if name in read]
    asked = list(_asked(fields, variables))
    reads_effort_alone = EFFORT in read and not switches  # and thinks that much whatever else is said
    if asked:
        name, on = asked[0]
        for other, wanted in asked[1:]:
            if wanted != on and not (wanted and reads_effort_alone and other in _EFFORTS):
                ignored.own(other)
        for switch in switches:
            variables.setdefault(switch, on)
        unmet = not switches and on != always_thinks and not (on and EFFORT in read)
        if unmet and name != "chat_template_kwargs":  # its variables are a template's own affair
            ignored.own(name)
    if effort := _effort(fields):
        nearest = _HARMONY_EFFORTS if tokenizer.answers.format.channels else {}
        variables.setdefault(EFFORT, nearest.get(effort, effort))
    _pass_over(fields, ignored)
    return variables


def _asked(fields: ThoughtFields, variables: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Each field that says whether to think, and what it says, in the order of precedence."""
    thinking, reasoning = fields.thinking, fields.reasoning or ReasoningObject()
    if isinstance(thinking, ThinkingObject):
        thinking = thinking.type
    budgets = [(name, getattr(fields, name)) for name in BUDGETS]
    said: list[tuple[str, Any]] = [
        *(("chat_template_kwargs", variables.get(name)) for name in SWITCHES),
        ("enable_thinking", fields.enable_thinking),
        ("thinking", _TYPES.get(thinking) if isinstance(thinking, str) else thinking),
        ("think", fields.think if not isinstance(fields.think, str) else fields.think != "none"),
        ("reasoning.enabled", reasoning.enabled),
        ("reasoning.effort", _thinks_at(reasoning.effort)),
        ("disable_reasoning", None if fields.disable_reasoning is None else not fields.disable_reasoning),
        ("reasoning_effort", _thinks_at(fields.reasoning_effort)),
        *((name, False if budget == 0 else None) for name, budget in budgets),
    ]
    return ((name, on) for name, on in said if isinstance(on, bool))


def _thinks_at(effort: str | None) -> bool | None:
    return None if effort is None else effort != "none"


def _effort(fields: ThoughtFields) -> str | None:
    """How much to think: a hint, which templates without such a variable do not read."""
    of_object = fields.reasoning.effort if fields.reasoning else None
    return fields.reasoning_effort or of_object or (fields.think if isinstance(fields.think, str) else None)


def _pass_over(fields: ThoughtFields, ignored: Ignored) -> None:
    """Name budgets, and words that are not known here."""
    thinking, reasoning = fields.thinking, fields.reasoning or ReasoningObject()
    budget = thinking.budget_tokens if isinstance(thinking, ThinkingObject) else None
    kind = thinking.type if isinstance(thinking, ThinkingObject) else thinking
    if isinstance(kind, str) and kind not in _TYPES:
        ignored.own("thinking")
    budgets = {name: getattr(fields, name) for name in BUDGETS}
    for name, tokens in (
        budgets | {"thinking.budget_tokens": budget, "reasoning.max_tokens": reasoning.max_tokens}
    ).items():
        if tokens is not None and tokens > 0:
            ignored.own(name)
    if fields.reasoning_format not in (None, "", *_HIDDEN, *_SHOWN, *_IN_CONTENT):
        ignored.own("reasoning_format")


def shows_thoughts(fields: ThoughtFields) -> bool:
    """Whether the answer has the model's thoughts."""
    excluded = fields.reasoning is not None and fields.reasoning.exclude is True
    return fields.include_reasoning is not False and not excluded and fields.reasoning_format not in _HIDDEN


def separates_thoughts(fields: ThoughtFields) -> bool:
    """Whether thoughts are told apart from the content."""
    return fields.separate_reasoning is not False and fields.reasoning_format not in _IN_CONTENT
