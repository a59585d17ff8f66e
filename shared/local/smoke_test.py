"""A deployment's check-up: one request through its front door, and the proof that its KV moved between workers.

    python -m shared.local.smoke_test http://segue-router:8000

streams a completion, then asks the router that served it what became of that very request. The prompt opens with a
random word: a decode worker that holds the pages already would fetch nothing. Both questions go over one connection,
since a Service chooses one of several routers anew for each.
"""

from __future__ import annotations

import http.client
import json
import secrets
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from shared.errors import BenchError

ANSWER_SECONDS_MAX = 120.0  # also for a first request that waits until a worker is ready
MAX_TOKENS = 16


def check_up(url: str) -> list[str]:
    """What was found, a line each. Raises BenchError when something is not as it should be."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port or 80, timeout=ANSWER_SECONDS_MAX
    )
    try:
        model = _get(connection, "/v1/models")["data"][0]["id"]
        rid, chunks = _stream(connection, model)
        record = _get(connection, f"/debug/requests/{rid}")
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(
            f"{url} gave no answer; is a router ready? {type(error).__name__}: {error}"
        ) from error
    finally:
        connection.close()
    workers = [f"{visit['role']} {visit['worker']}" for visit in record["workers"]]
    if record["fetched_bytes"] <= 0:
        raise BenchError(f"no KV moved for request {rid}: it went to {', '.join(workers) or 'no worker'}")
    return [
        f"{model} streamed {chunks} pieces of text and ended properly",
        f"request {rid} went to {', then '.join(workers)}",
        f"{record['fetched_bytes']} bytes of KV moved for it in {record['fetch_milliseconds']:.1f} ms: "
        f"the link gave {record['fetched_bytes'] / max(record['fetch_milliseconds'], 0.001) / 1e3:.0f} MB/s",
        _link(record),
    ]


def _link(record: dict[str, Any]) -> str:
    if not record["link_bytes_per_second"]:
        return "the link has not been measured yet"
    megabytes_per_second = record["link_bytes_per_second"] / 1e6
    return f"measured by itself it carries {megabytes_per_second:.0f} MB/s over {record['transport']}"


def _stream(connection: http.client.HTTPConnection, model: str) -> tuple[str, int]:
    """The request's id and how many pieces of text came, of a stream that ended as it should."""
    body = {
        "model": model,
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": f"{secrets.token_hex(8)}: why is the sky blue?"}],
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = _successful(connection, "/v1/chat/completions")
    events = list(_events(response))
    pieces, reasons = 0, list[str]()
    for event in events:
        if event == "[DONE]":
            break
        chunk = json.loads(event)
        if "error" in chunk:
            raise BenchError(f"the stream broke off: {chunk['error']}")
        choice = chunk["choices"][0]
        pieces += bool(choice["delta"].get("content"))
        reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    if events[-1:] != ["[DONE]"] or len(reasons) != 1 or not pieces:
        raise BenchError(f"a stream of {pieces} pieces ended with {reasons} and {events[-1:]}, not [DONE]")
    return response.headers["x-request-id"], pieces


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each event, to the end of the body, so that the connection can be used again."""
    for line in response.read().decode().splitlines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def _get(connection: http.client.HTTPConnection, path: str) -> Any:
    connection.request("GET", path)
    return json.loads(_successful(connection, path).read())


def _successful(connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
    response = connection.getresponse()
    if response.status != 200:
        raise BenchError(f"{path} answered {response.status}: {response.read(500).decode(errors='replace')}")
    return response


def main() -> None:
    """Print what was found and leave with 0, or one sentence and 1."""
    try:
        sys.stdout.writelines(f"{line}\n" for line in check_up(sys.argv[1]))
    except BenchError as error:
        sys.exit(f"segue checkup: {error}")


if __name__ == "__main__":
    main()
