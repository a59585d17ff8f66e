"""A model folder as gpt-oss has it, but small: special tokens, ends, and a template with the habits of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.unit.router.scripted_workers import FEATURES, LIMITS, RunningRouter
from tests.unit.router.tiny_model import write_folder

MARKS = (
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)  # <|start|> and <|end|> are there
CONTEXT_LEN = 4096
# As gpt-oss's: thoughts in `thinking`, one call of a message, a result of the last call, answers without thoughts.
TEMPLATE = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role == 'system' or tools %}{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}
{%- for tool in tools or [] %}
{{- 'type ' + tool.function.name + ' = ' + (tool.function.parameters | tojson) }}
{%- for name, schema in (tool.function.parameters.properties or {}).items() %}
{%- if schema.enum and schema.default is defined %}{{- ' // default: ' + schema.default }}{% endif %}{% endfor %}
{%- endfor %}
{{- '<|end|>' }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- if message.content or message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}{% endif %}
{%- set called = message.tool_calls[0].function %}{%- set last.name = called.name %}
{{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
{{- (called.arguments | tojson) + '<|call|>' }}
{%- elif message.role == 'assistant' %}{%- set last.name = none %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('no call before') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (message.content | tojson) + '<|end|>' }}
{%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""


def write_harmony(folder: Path, ends: Sequence[str] = ("<|return|>", "<|call|>")) -> Path:
    """Write the folder; generation_config.json names `ends`."""
    write_folder(folder, chat_template=TEMPLATE, context_len=CONTEXT_LEN, marks=MARKS)
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    for name, settings in {
        "config.json": {"eos_token_id": ids["<|return|>"]},
        "tokenizer_config.json": {"eos_token": "<|return|>"},
        "generation_config.json": {"eos_token_id": [ids[end] for end in ends]},
    }.items():
        path = folder / name
        given = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(given | settings))
    return folder


def harmony_router(folder: Path) -> RunningRouter:
    """A router of such a folder, and workers that end answers as its model does."""
    limits = msgspec.structs.replace(LIMITS, context_len=CONTEXT_LEN)
    router = RunningRouter(folder, limits=limits, features=(*FEATURES, "grammar"))
    router.workers.ends = tuple(router.tokenizer.encode("<|return|><|call|>", add_special_tokens=False))
    return router
