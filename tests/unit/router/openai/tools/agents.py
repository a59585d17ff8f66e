"""What agents declare beside functions, a template that shows it, and what tests ask a router."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.router.scripted_workers import FEATURES, MODEL, RunningRouter
from tests.unit.router.tiny_model import TinyModel

CONTEXT_LEN = 4096
CITY_TEMPLATE = """\
{%- if tools %}<|start|>tools <tool_call>
{%- for tool in tools %}{{ tool.function.name }} {{ tool.function.parameters | tojson }}{% endfor %}<|end|>
{%- endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments.city }}>{% endfor %}
{%- if message.tool_call_id %} of {{ message.tool_call_id }}{% endif %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER: Any = {"role": "user", "content": "How is it in Paris?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'

CITY_MODEL = TinyModel(CITY_TEMPLATE, CONTEXT_LEN, (*FEATURES, "grammar"))

TEMPLATE = """\
{%- if tools %}<|start|>tools <tool_call>
{%- for tool in tools %}{{ tool.function.name }} {{ tool.function.description }}
 {{- tool.function.parameters | tojson }}{% endfor %}<|end|>
{%- endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>
{%- endfor %}
{%- if message.tool_call_id %} of {{ message.tool_call_id }}{% endif %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""
AGENT_MODEL = TinyModel(TEMPLATE, CONTEXT_LEN, (*FEATURES, "grammar"))
FUNCTION: Any = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
    "strict": False,
}
PATCH_TOOL: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.*)/'},
}
AGENTS: Any = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Agents.",
    "tools": [
        {"type": "function", "name": "spawn_agent", "description": "", "parameters": {"type": "object"}},
        {"type": "custom", "name": "note", "description": ""},
    ],
}
HOSTED: Any = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "browser"},
    {"type": "mcp", "server_label": "a", "server_url": "http://a", "authorization": "secret"},
    {"type": "tool_search", "execution": "client"},
    {"type": "local_shell"},
    {"type": "of_next_year"},
]
TOOLS = [FUNCTION, PATCH_TOOL, AGENTS, *HOSTED]
PATCH = '*** Begin Patch\n+print("🙂")\n'


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def posted(router: RunningRouter, path: str = "responses", **fields: Any) -> Any:
    said = {"input": "Hello"} if path == "responses" else {"messages": [{"role": "user", "content": "Hello"}]}
    body = {"model": MODEL, **said, **fields}
    answer = router.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def ignored(answer: Any) -> list[str]:
    return [name for name in answer.headers.get("x-segue-ignored", "").split(", ") if name]


def grammar_of(router: RunningRouter) -> str:
    grammar = router.last_prefill.params.grammar
    return grammar.text if grammar else ""
