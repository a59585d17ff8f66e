"""The smoke test of a deployment: one request through its front door, and the proof that its KV moved between workers.

    python -m shared.local.smoke_test http://segue-router:8000 http://segue-routers:8001 [aggregated]

It streams a completion, then asks a router's admin port what became of that request; any router asks the one that
served it. The prompt begins with a random word, because a decode worker that already has the pages would fetch nothing.
The key in OPENAI_API_KEY, if there is one, goes with what the front door is asked. `aggregated`: the deployment has no
prefill worker, so the request must have gone to a decode worker alone, and no KV moves.

Elsewhere `X-Segue-Local-Prefill: never` goes with it, since an idle decode worker may compute prompts itself
(`local_prefill: short` or `always`).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from typing import Any

import httpx2

from shared.primitives.errors import SmokeTestError

ANSWER_SECONDS_MAX = 120.0  # also for a first request that waits until a worker is ready
MAX_TOKENS = 16
BY_PREFILL = {"x-segue-local-prefill": "never"}


def smoke_test(url: str, admin_url: str, aggregated: bool = False) -> list[str]:
    """What was found behind the two URLs, one line each. Raises SmokeTestError when something is not right."""
    hooks = {"response": [_require_success]}
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}  # not for the admin port
    verify = not url.startswith("https://")  # a certificate names the host that clients use, not the Service
    client = httpx2.Client(
        base_url=url, timeout=ANSWER_SECONDS_MAX, trust_env=False, event_hooks=hooks, verify=verify
    )
    try:
        with client:
            model = client.get("/v1/models", headers=headers).json()["data"][0]["id"]
            rid, pieces = _stream(client, headers | ({} if aggregated else BY_PREFILL), model)
            record = client.get(f"{admin_url}/debug/requests/{rid}").json()
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = f"{type(error).__name__}: {error}"
        raise SmokeTestError(f"{url} gave no answer; is a router ready? {reason}") from error
    return [
        f"{model} streamed {pieces} pieces of text and ended properly",
        *_describe(rid, record, aggregated),
    ]


def _stream(client: httpx2.Client, headers: dict[str, str], model: str) -> tuple[str, int]:
    """Stream a completion; returns the request's id and the number of pieces of text."""
    question = {"role": "user", "content": f"{secrets.token_hex(8)}: why is the sky blue?"}
    body = {"model": model, "stream": True, "max_tokens": MAX_TOKENS, "messages": [question]}
    response = client.post("/v1/chat/completions", json=body, headers=headers)
    events = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    if errors := [chunk["error"] for chunk in chunks if "error" in chunk]:
        raise SmokeTestError(f"the stream broke off: {errors[0]}")
    choices = [chunk["choices"][0] for chunk in chunks]
    pieces = sum(bool(choice["delta"].get("content")) for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    if events[-1:] != ["[DONE]"] or len(reasons) != 1 or not pieces:
        raise SmokeTestError(
            f"a stream of {pieces} pieces ended with {reasons} and {events[-1:]}, not [DONE]"
        )
    return response.headers["x-segue-request-id"], pieces


def _stayed_at_decode(record: dict[str, Any]) -> bool:
    """Whether decode workers alone have served a request."""
    return bool(record["workers"]) and all(visit["role"] == "decode" for visit in record["workers"])


def _describe(rid: str, record: dict[str, Any], aggregated: bool) -> list[str]:
    """Where the request went and how its KV moved; raises SmokeTestError when none moved that should have."""
    workers = [f"{visit['role']} {visit['worker']}" for visit in record["workers"]]
    went = f"request {rid} went to {', then '.join(workers)}"
    if aggregated and _stayed_at_decode(record):
        return [f"{went}, which computed its prompt, too"]
    moved_bytes, milliseconds = record["fetched_bytes"], record["fetch_milliseconds"]
    if moved_bytes <= 0:
        why = f"no KV moved for request {rid}: it went to {', '.join(workers) or 'no worker'}"
        if _stayed_at_decode(record):
            why += ", which computed its prompt, too; is no prefill worker up?"
        raise SmokeTestError(why)
    speed = f"{record['link_bytes_per_second'] / 1e6:.0f} MB/s over {record['transport']}"
    return [
        went,
        f"{moved_bytes} bytes of KV moved for it in {milliseconds:.1f} ms: "
        f"the link gave {moved_bytes / max(milliseconds, 0.001) / 1e3:.0f} MB/s",
        f"by its last fetches it carries {speed}"
        if record["link_bytes_per_second"]
        else "the link has not been measured yet",
    ]


def _require_success(response: httpx2.Response) -> None:
    if response.status_code == httpx2.codes.UNAUTHORIZED:
        sent = "was refused" if "authorization" in response.request.headers else "is not set"
        raise SmokeTestError(f"the router asks for an API key, and the one in OPENAI_API_KEY {sent}")
    if response.status_code != httpx2.codes.OK:
        text = response.read().decode(errors="replace")
        raise SmokeTestError(f"{response.url.path} answered {response.status_code}: {text[:500]}")


def main() -> None:
    """Print what was found and exit with 0, or print one sentence and exit with 1."""
    try:
        found = smoke_test(sys.argv[1], sys.argv[2], aggregated=sys.argv[3:] == ["aggregated"])
        sys.stdout.writelines(f"{line}\n" for line in found)
    except SmokeTestError as error:
        sys.exit(f"segue smoke test: {error}")


if __name__ == "__main__":
    main()
