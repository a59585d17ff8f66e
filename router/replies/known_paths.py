"""Every path of the API, and the paths of other servers that are not served: why, and what there is instead.

Data alone. `/` and an unknown path list the served ones.
"""

from __future__ import annotations

SERVED = {
    "/v1/chat/completions": "POST: the next message of a chat",
    "/v1/responses": "POST: the same in OpenAI's newer form; nothing is stored",
    "/v1/messages": "POST: the same in Anthropic's form",
    "/v1/messages/count_tokens": "POST: how long the prompt of such a request is",
    "/v1/completions": "POST: the continuation of a text",
    "/v1/models": "GET: the model's name, and its context length",
    "/tokenize": "POST: the token ids of a text or a chat",
    "/detokenize": "POST: the text of token ids",
    "/tokenizer_info": "GET: the tokenizer's special tokens and its chat template",
    "/health": "GET: whether requests are served; /ping is the same",
    "/version": "GET: this program's version",
}

_POOLED = "the model generates text: a vector of a prompt is a model's of another kind"
_STATELESS = "nothing is stored here: send the whole conversation"
_TEXT_ONLY = "this server reads and writes text only"
_ONE_MODEL = "this server has one model, as it is"

# By the beginning of the path. Without `/v1` as well, where a client was given an address that lacks it.
REFUSED = {
    "/v1/embeddings": _POOLED,
    "/v1/score": _POOLED,
    "/v1/rerank": _POOLED,
    "/v2/rerank": _POOLED,
    "/v1/classify": _POOLED,
    "/v1/pooling": _POOLED,
    "/score": _POOLED,
    "/rerank": _POOLED,
    "/classify": _POOLED,
    "/pooling": _POOLED,
    "/v1/conversations": _STATELESS,
    "/v1/assistants": _STATELESS,
    "/v1/threads": _STATELESS,
    "/v1/files": _STATELESS,
    "/v1/uploads": _STATELESS,
    "/v1/vector_stores": _STATELESS,
    "/v1/batches": "send the requests as they are: they wait in one queue, and are served fairly",
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
    "/v1/videos": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/v1/moderations": "nothing is moderated here",
    "/v1/fine_tuning": _ONE_MODEL,
    "/v1/load_lora_adapter": _ONE_MODEL,
    "/v1/unload_lora_adapter": _ONE_MODEL,
    "/v1/messages/batches": "send the requests as they are: they wait in one queue, and are served fairly",
    "/v1/complete": "it is Anthropic's; use /v1/messages",
    "/api/chat": "it is Ollama's; use /v1/chat/completions",
    "/api/generate": "it is Ollama's; use /v1/completions",
    "/api/tags": "it is Ollama's; use /v1/models",
    "/generate": "it is SGLang's; use /v1/completions",
    "/inference/v1/generate": "it is vLLM's; use /v1/completions with token ids",
    "/openai/deployments": "it is Azure's; use /v1",
}
ADMIN = ("/metrics", "/livez", "/readyz", "/debug")


def describe_unknown(path: str) -> str:
    """What a client is told that asked for a path which is not served. The path is its text and is not repeated."""
    for known in ADMIN:
        if _begins(path, known):
            return f"{known} is on the admin port"
    for known, reason in REFUSED.items():
        if _begins(path, known):
            return f"{known} is not served: {reason}"
    for known in SERVED:
        if path.rstrip("/") in (known, known.removeprefix("/v1"), f"/v1{known}"):
            return f"there is nothing at this path; did you mean {known}?"
    return f"there is nothing at this path; there are {', '.join(SERVED)}"


def _begins(path: str, known: str) -> bool:
    return path == known or path.startswith(f"{known}/")
