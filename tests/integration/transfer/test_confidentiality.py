"""What clients write and models answer stays out of every record of a whole deployment, also at `--log-level debug`.

A marker goes in as prompt, stop string, key, field and path, through success, refusal, hang-up and the death of a
worker; then everything an operator can read is searched for it: the output of all processes, metrics, `/debug`, errors.
"""

from __future__ import annotations

import json
import os
import re
import signal

import httpx2

from tests.integration.conftest import SMALL
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.observing import continuations
from tests.waiting import until

MARKER = "zebrafish-7f3a"
OWN_ID = "the-clients-own-id"  # the one thing of a client's that the log has
HEADERS = {"authorization": f"Bearer {MARKER}", "x-request-id": OWN_ID, "user-agent": MARKER}
FIELDS = {"model": "smollm2", "prompt": f"{MARKER} and {MARKER}", "temperature": 0, "ignore_eos": True}
SECRETS = {"stop": [MARKER], "user": MARKER, "cache_salt": MARKER, "prompt_cache_key": MARKER, MARKER: MARKER}


def test_neither_prompts_nor_answers_nor_keys_reach_a_record() -> None:
    records: list[str] = []
    with (
        deployment("--log-level", "debug", "--log-format", "json", config=SMALL) as running,
        httpx2.Client(base_url=running.url, headers=HEADERS, timeout=60.0) as client,
    ):
        ids = client.post("/tokenize", json={"model": "smollm2", "prompt": MARKER}).json()["tokens"]
        answered = client.post("/v1/completions", json=FIELDS | SECRETS | {"max_tokens": 24})
        survived = stream_through_the_death_of_a_decode_worker(running, client)
        hang_up(running, client)
        records += [response.text for response in refusals(client)]
        debug = f"{running.admin_url}/debug/requests"
        records += [httpx2.get(f"{debug}/{rid}").text for rid in (rid_of(answered), survived, MARKER)]
        ports = [process.admin_port for process in running.processes()]
        records += [httpx2.get(f"http://127.0.0.1:{port}/metrics").text for port in ports]
    log = "\n".join(running.command.lines)
    for rid in (rid_of(answered), survived):
        assert re.search(rf'"event":"request.answered".*"rid":"{rid}".*"client_id":"{OWN_ID}"', log)
        for role in (
            "router",
            "decode",
        ):  # a worker's lines, too, have the id of the request that they concern
            step = rf'"level":"debug","event":"request.state","role":"{role}",[^\n]*"rid":"{rid}"'
            assert re.search(step, log), role
    said = answered.json()["choices"][0]["text"]
    assert len(said) > 20
    forms = (MARKER, said[:20], json.dumps(said)[1:20], json.dumps(ids)[1:-1], ",".join(map(str, ids)))
    for record in (*records, log):
        assert not [form for form in forms if form in record]


def rid_of(response: httpx2.Response) -> str:
    return response.headers["x-segue-request-id"]


def stream_through_the_death_of_a_decode_worker(running: LocalDeployment, client: httpx2.Client) -> str:
    """A stream that loses its decode worker and goes on; returns its id."""
    (victim,) = running.processes("decode")
    with client.stream(
        "POST", "/v1/completions", json=FIELDS | {"max_tokens": 300, "stream": True}
    ) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        for _ in range(5):
            next(events)
        os.kill(victim.pid, signal.SIGKILL)
        assert list(events)[-1] == "data: [DONE]"
    assert continuations(running) == 1
    return rid_of(answer)


def hang_up(running: LocalDeployment, client: httpx2.Client) -> None:
    """Leave in the middle of a stream."""
    with client.stream(
        "POST", "/v1/completions", json=FIELDS | {"max_tokens": 1000, "stream": True}
    ) as answer:
        next(answer.iter_lines())
    until(lambda: not running.held(), 30.0, "the end of what was hung up on")


def refusals(client: httpx2.Client) -> list[httpx2.Response]:
    """Errors of many kinds, each provoked with the marker."""
    chat = "/v1/chat/completions"
    message = {"role": "user", "content": MARKER}
    responses = [
        client.post(chat, content=MARKER),
        client.post(chat, json={"model": MARKER, "messages": [message]}),
        client.post(chat, json={"model": "smollm2", "messages": [message | {"role": MARKER}]}),
        client.post(chat, json={"model": "smollm2", "messages": [message], "tools": [MARKER]}),
        client.post(chat, json={"model": "smollm2", "messages": [message], "max_tokens": MARKER}),
        client.post(chat, json={"model": "smollm2", "messages": [message | {"content": MARKER * 20_000}]}),
        client.post("/v1/completions", json=FIELDS | {"logit_bias": {MARKER: 1}}),
        client.get(f"/{MARKER}"),
        client.get(f"/v1/models/{MARKER}"),
    ]
    assert all(response.status_code >= 400 for response in responses)
    return responses
