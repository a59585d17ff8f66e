"""The tools that Anthropic defines and a client runs: their schemas, as Anthropic documents them. Data alone.

A request names such a tool by its type and brings no schema, because Anthropic's models have learnt it. Other models
have not, so they are shown a function with that schema. A tool whose results are images, as of a computer's screen, is
left out, like those that Anthropic itself runs.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_TEXT = {"type": "string"}
_PATH = {"type": "string", "description": "Absolute path of a file or folder."}
_INSERTED = {"type": "string", "description": "The text to insert."}


def _commands(*names: str) -> Json:
    return {"type": "string", "enum": list(names)}


def _schema(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required}


_BASH = (
    "Run a command in a bash session that goes on from call to call. restart: true begins a new one.",
    _schema([], command=_TEXT, restart={"type": "boolean"}),
)
_TEXT_EDITOR = (
    "View, create and edit text files. view shows a file, or the lines of view_range, or a folder; create writes"
    " file_text; str_replace replaces old_str, which must occur once, by new_str; insert puts insert_text behind the"
    " line insert_line.",
    _schema(
        ["command", "path"],
        command=_commands("view", "create", "str_replace", "insert"),
        path=_PATH,
        file_text=_TEXT,
        old_str=_TEXT,
        new_str=_TEXT,
        insert_line={"type": "integer"},
        insert_text=_INSERTED,
        view_range={"type": "array", "items": {"type": "integer"}},
    ),
)
_MEMORY = (
    "Keep notes in files under /memories that last longer than this conversation.",
    _schema(
        ["command"],
        command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_PATH,
        file_text=_TEXT,
        old_str=_TEXT,
        new_str=_TEXT,
        insert_line={"type": "integer"},
        insert_text=_INSERTED,
        view_range={"type": "array", "items": {"type": "integer"}},
        old_path=_PATH,
        new_path=_PATH,
    ),
)
# By the beginning of the type, behind which a date stands: the description and the schema.
CLIENT_TOOLS: dict[str, tuple[str, Json]] = {
    "bash_2": _BASH,
    "text_editor_2": _TEXT_EDITOR,
    "memory_2": _MEMORY,
}
