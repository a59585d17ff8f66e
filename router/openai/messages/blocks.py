"""The blocks of a content, and the text that each one is.

    text                      its text
    document, search_result   its title and its text
    tool_reference            a sentence that names the tool
    what only Anthropic can read or run, as redacted_thinking: nothing; a header names it

An image or a PDF is refused: an answer to a message without it would be an answer to another question.
"""

from __future__ import annotations

import msgspec

from router.openai.fields.ignored import Ignored
from router.openai.fields.request_body import decode, missing_field
from shared.primitives.errors import RequestError

NULL = msgspec.Raw(b"null")
_FOR_ANTHROPIC = frozenset(
    {
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "compaction",
        "container_upload",
        "fallback",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)


class ToolReference(msgspec.Struct):
    """The tool that a `tool_addition` or `tool_removal` is about."""

    type: str
    name: str | None = None


class BlockFields(msgspec.Struct):
    """One block of a content, whatever its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = NULL
    tool_use_id: str | None = None
    content: msgspec.Raw = NULL
    is_error: bool | None = None
    source: msgspec.Raw = NULL
    title: str | None = None
    tool_name: str | None = None
    tool: ToolReference | None = None


class SourceFields(msgspec.Struct):
    """What a document holds."""

    type: str
    data: str | None = None
    content: msgspec.Raw = NULL


def blocks_of(content: msgspec.Raw, param: str) -> list[BlockFields]:
    """The blocks of a content; a string is one of text, null is none."""
    if bytes(content) == b"null":
        return []
    if bytes(content).startswith(b'"'):
        return [BlockFields("text", decode(content, str, param))]
    return decode(content, list[BlockFields], param)


class BlockReader:
    """Reads blocks as text. `ignored` gets the types of those left out; `found_tools`: names that a search found."""

    def __init__(self, ignored: Ignored):
        self._ignored = ignored
        self.found_tools: set[str] = set()

    def text(self, block: BlockFields, param: str) -> str:
        """The text of a block; empty for one that is left out. Raises `RequestError` for what has no text."""
        match block.type:
            case "text":
                if block.text is None:
                    raise missing_field(f"{param}.text")
                return block.text
            case "document":
                return self._document(block, param)
            case "search_result":
                return self._titled(block.title, block.content, f"{param}.content")
            case "tool_reference" if block.tool_name:
                self.found_tools.add(block.tool_name)
                return f"The tool {block.tool_name} can be called now."
            case kind if kind in _FOR_ANTHROPIC:
                self._ignored.own(kind)
                return ""
            case "image":
                raise _unreadable(f"{param} is an image", param)
        raise RequestError(f"{param}.type is not one that can stand here", param=f"{param}.type")

    def _document(self, block: BlockFields, param: str) -> str:
        source = decode(block.source, SourceFields, f"{param}.source")
        if source.type == "text" and source.data is not None:
            return "\n".join(filter(None, (block.title, source.data)))
        if source.type == "content":
            return self._titled(block.title, source.content, f"{param}.source.content")
        raise _unreadable(f"{param} is a document that is not text", param)

    def _titled(self, title: str | None, content: msgspec.Raw, param: str) -> str:
        parts = []
        for at, part in enumerate(blocks_of(content, param)):
            if part.type not in ("text", "image"):  # documents do not hold documents
                raise RequestError(f"{param}[{at}].type must be text", param=f"{param}[{at}].type")
            parts.append(self.text(part, f"{param}[{at}]"))
        return "\n".join(filter(None, (title, *parts)))


def _unreadable(what: str, param: str) -> RequestError:
    return RequestError(
        f"{what}: this model reads text only; leave it out, or send what it says as a block of type text",
        param=param,
    )
