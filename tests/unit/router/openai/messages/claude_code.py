"""A body as Claude Code 2.1 sends it: which fields, blocks and roles it has, with words of our own in them."""

from __future__ import annotations

from typing import Any

TOOL_NAMES = ("Agent", "Bash", "Edit", "Read", "Skill", "ToolSearch", "Write")
EPHEMERAL = {"type": "ephemeral"}


def claude_code_body(model: str) -> dict[str, Any]:
    """The first request of `claude -p`: a system message stands behind the question, and tools wait to be searched."""
    return {
        "model": model,
        "system": [
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1.332; cc_entrypoint=sdk-cli;",
            },
            {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "\nYou work in a folder.", "cache_control": EPHEMERAL},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nBe exact.\n</system-reminder>\n"},
                    {"type": "text", "text": "Say hello"},
                ],
            },
            {
                "role": "system",
                "content": [{"type": "text", "text": "# Environment", "cache_control": EPHEMERAL}],
            },
        ],
        "tools": [*map(_tool, TOOL_NAMES), {**_tool("mcp__notes__add"), "defer_loading": True}],
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def _tool(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": f"What {name} does.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A word."}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
