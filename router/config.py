"""Settings of a router: where it listens, which workers it connects to, its bounds.

The core and the HTTP side are given this model as it is: nothing else holds a default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from router.parsers.answer_formats import ReasoningParser, ToolCallParser
from router.placement_policies import POLICIES, LocalPrefill, PolicyName
from shared.primitives.cell import CELL_WORKERS_MAX
from shared.process.process_config import ProcessConfig
from shared.process.settings import Count, Port, PositiveInt, Seconds, Texts
from shared.wire.messages import Role


def weight_of(entry: str) -> tuple[str, float]:
    """Name and weight of `NAME=WEIGHT`; raises `ValueError` for anything else."""
    name, _, text = entry.rpartition("=")
    weight = float(text)
    if not name or not 0 < weight < float("inf"):
        raise ValueError(entry)
    return name, weight


def _check_weights(entries: tuple[str, ...]) -> tuple[str, ...]:
    try:
        for entry in entries:
            weight_of(entry)
    except ValueError:
        raise PydanticCustomError("weights", "should be NAME=WEIGHT with a weight above 0") from None
    return entries


def _check_networks(entries: tuple[str, ...]) -> tuple[str, ...]:
    try:
        for entry in entries:
            ip_network(entry)
    except ValueError:
        raise PydanticCustomError("networks", "should be addresses or networks such as 10.0.0.0/8") from None
    return entries


# As browsers write it, in lower case: anything else would never match. Patterns are in the chart's schema, too.
_ORIGIN = re.compile(r"^(\*|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+)$")
_HOST_NAME = re.compile(r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$")


def _check_origins(entries: tuple[str, ...]) -> tuple[str, ...]:
    if not all(_ORIGIN.fullmatch(entry) for entry in entries):
        raise PydanticCustomError(
            "origins", "should be origins such as https://chat.example.com, in lower case and without a path"
        )
    return entries


def _check_host_names(entries: tuple[str, ...]) -> tuple[str, ...]:
    if not all(_HOST_NAME.fullmatch(entry) for entry in entries):
        raise PydanticCustomError(
            "host_names", "should be names such as api.example.com, without scheme or port"
        )
    return entries


def _each(pattern: re.Pattern[str]) -> WithJsonSchema:
    """The schema of a list of such texts."""
    return WithJsonSchema({"type": "array", "items": {"type": "string", "pattern": pattern.pattern}})


Weights = Annotated[Texts, AfterValidator(_check_weights)]
Networks = Annotated[Texts, AfterValidator(_check_networks)]
Origins = Annotated[Texts, AfterValidator(_check_origins), _each(_ORIGIN)]
HostNames = Annotated[Texts, AfterValidator(_check_host_names), _each(_HOST_NAME)]


class RouterConfig(ProcessConfig):
    """Segue's router: OpenAI's HTTP API in front of prefill and decode workers."""

    groups: ClassVar[Mapping[str, str]] = {
        "model": "model served_model_name model_aliases generation_config chat_template tool_call_parser "
        "reasoning_parser",
        "network": "port tls_cert tls_key metrics_on_api_port metric_names allowed_hosts allowed_origins "
        "trusted_proxies",
        "workers": "discovery workers namespace slice_selector prefill_policy decode_policy",
        "tenants": "api_keys_file usage_log tenant_weights tenant_waiting_max tenant_running_max "
        "tenant_tokens_per_minute share_prefix_cache",
        "bounds": "max_queued_requests max_body_bytes router_bytes_max answers_bytes_max connections_max "
        "connections_per_address_max",
        "time limits": "ttft_target_seconds waiting_seconds_max request_seconds_max worker_return_seconds "
        "endpoint_lag_seconds drain_seconds",
    }

    model: str = Field(
        default="",
        description="Folder with tokenizer, chat template and config. The router reads no weights.",
    )
    served_model_name: str = Field(
        default="", description="Name of the model for clients. Empty: the name of its folder."
    )
    model_aliases: Texts = Field(
        default=(),
        description="Further names of the model for clients, such as its Hub id. Answers have served_model_name.",
    )
    port: Port = Field(default=8000, description="Port of OpenAI's API and of /health.")
    tls_cert: str = Field(
        default="",
        description="File with the certificate of that port and its chain, in PEM, together with tls_key. It is "
        "followed as it changes; open connections keep theirs. Empty: plain HTTP.",
    )
    tls_key: str = Field(default="", description="File with the certificate's key, in PEM and not encrypted.")
    metrics_on_api_port: bool = Field(
        default=False,
        description="Whether the port of the API serves /metrics, too, without a key: three gauges for an inference "
        "gateway's endpoint picker, and what metric_names adds. All others are on the admin port alone.",
    )
    metric_names: Literal["segue", "vllm", "both"] = Field(
        default="segue",
        description="Names on that page: vllm and both have vLLM's for requests that wait and run, KV that is used, "
        "and the seconds to the first token, between tokens and of requests.",
    )
    live_page: bool = Field(
        default=False,
        description="Whether the live page and its events are on the API's port, too, for those who may use the API. "
        "They are on the admin port always.",
    )
    kill_worker_fd: int = Field(
        default=-1,
        ge=-1,
        description="Descriptor of a pipe to the parent, which ends the worker whose name comes. `segue up` uses it. "
        "-1: the live page ends none.",
    )
    kill_token_file: str = Field(
        default="",
        description="File with the token that the live page has to send to end a worker. `segue up` prints it in the "
        "page's address. Empty: nobody has it.",
    )
    discovery: Literal["static", "kubernetes"] = Field(
        default="static",
        description="How workers are found. static takes those in workers, kubernetes watches EndpointSlices.",
    )
    workers: Texts = Field(
        default=(),
        description="Workers for static discovery: prefill=HOST:PORT and decode=HOST:PORT with their links ports.",
    )
    namespace: str = Field(
        default="", description="Namespace of the workers' pods. Empty: the namespace of this pod."
    )
    slice_selector: str = Field(
        default="",
        description="Labels of this release's EndpointSlices, name=value,…. They keep releases in one namespace apart.",
    )
    cell_workers_max: int = Field(
        default=CELL_WORKERS_MAX,
        ge=2,
        le=CELL_WORKERS_MAX,
        description="Workers that serve together. A larger fleet is divided into cells with workers of both roles, and "
        "a router dials those of its cells only. Give it two routers for each cell, and all the same value.",
    )
    relist_seconds: Seconds = Field(
        default=30.0,
        description="Seconds between two full lists of EndpointSlices. A list repairs what a watch missed.",
    )
    watch_read_seconds: Seconds = Field(
        default=10.0,
        description="Seconds that one watch may last. A new watch shows whether the API server is still there.",
    )
    tokenizer_threads: PositiveInt = Field(
        default=2, description="Threads that tokenize beside the event loop. Tokenizers release the GIL."
    )
    max_body_bytes: PositiveInt = Field(
        default=4 << 20,
        description="Bytes of one request body. A larger one is answered with 413. A prompt of a million tokens fits.",
    )
    router_bytes_max: PositiveInt = Field(
        default=256 << 20,
        description="Bytes of all bodies that arrive or wait to be tokenized. Above it the answer is 429, before "
        "memory runs out. One client gets at most half of it.",
    )
    answers_bytes_max: PositiveInt = Field(
        default=128 << 20,
        description="Bytes that answers hold until they are written: logprobs as reckoned from the request, long texts "
        "as they come. Above it the answer is 429. One answer gets a quarter of it (else 400), one client half.",
    )
    body_seconds_max: Seconds = Field(
        default=30.0,
        description="Seconds until a body must have arrived. A slow sender would otherwise hold memory for long.",
    )
    connections_max: PositiveInt = Field(
        default=8192,
        description="Client connections that are open at a time. For a further one the oldest without a request goes, "
        "of the address with most; it gets 503 where each has one. Three quarters are for connections on which a "
        "valid API key came. An idle one costs 4 KiB.",
    )
    connections_per_address_max: PositiveInt = Field(
        default=4096,
        description="Client connections of one address (IPv6: of one /64 network) or of one API key. For a further one "
        "its oldest without a request goes. The default leaves half of connections_max to others. Behind a single "
        "proxy, give both the same value.",
    )
    head_seconds_max: Seconds = Field(
        default=10.0,
        description="Seconds until the head of a request must have arrived, from connecting or its first byte.",
    )
    idle_seconds_max: Seconds = Field(
        default=75.0,
        description="Seconds without a request before an idle connection is closed. It must exceed the idle time-out "
        "of a proxy in front, which is 60 s for most: else requests meet a closing connection.",
    )
    write_seconds_max: Seconds = Field(
        default=30.0,
        description="Seconds in which a client may read nothing of an answer that waits for it. Then it is cut.",
    )
    allowed_hosts: HostNames = Field(
        default=(),
        description="Names in the Host header that are served, besides localhost and IP addresses. Empty: all names; "
        "but where host is loopback, only names that public DNS cannot have: web pages could point theirs here.",
    )
    allowed_origins: Origins = Field(
        default=(),
        description="Origins of web pages (https://chat.example.com) that may use the API, or *. Pages that have the "
        "router's own address always may.",
    )
    prompts_max: PositiveInt = Field(
        default=128,
        description="Prompts in one HTTP request, times n answers to each. Each answer is a request to the workers.",
    )
    tokenizing_max: Count = Field(
        default=256,
        description="Requests that wait for a tokenizer thread, each with its body as it came. A further one is "
        "answered with 429.",
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="Whether fields of sampling that a request leaves out are those of the model's "
        "generation_config.json. none: temperature 1 and no filters.",
    )
    chat_template: str = Field(
        default="",
        description="File with a Jinja template, by which chats are written in place of the model's own. Empty: the "
        "model's.",
    )
    template_seconds_max: Seconds = Field(
        default=5.0,
        description="Seconds that the model's chat template may take for one chat. Then the answer is 400.",
    )
    allow_control_tokens: bool = Field(
        default=False,
        description="Whether control tokens that are spelled in messages count as such. false keeps them text.",
    )
    tool_call_parser: ToolCallParser = Field(
        default="auto",
        description="How the model writes calls of tools, by vLLM's names; openai, gpt-oss and gpt_oss are harmony. "
        "auto: as its tokenizer or chat template shows. A name also serves tools with a model whose chat template does "
        "not show them.",
    )
    reasoning_parser: ReasoningParser = Field(
        default="auto",
        description="How the model writes its thoughts, by vLLM's names; openai_gptoss, gpt-oss and gpt_oss are "
        "harmony. auto: as its tokenizer or chat template shows. none: thoughts are content.",
    )
    stream_backlog_bytes: PositiveInt = Field(
        default=16 << 20,  # 64 choices with 20 logprobs each take it in 90 tokens
        description="Unread bytes of a stream before its connection is closed. Such a client reads too slowly.",
    )
    keepalive_seconds: Seconds = Field(
        default=10.0,
        description="Seconds of silence before a stream gets a comment line. Many proxies close at 60 s.",
    )
    max_queued_requests: PositiveInt = Field(
        default=1024,
        description="Requests that wait for a prefill worker. A further one is answered with 429.",
    )
    tenant_waiting_max: Count = Field(
        default=0,
        description="Requests of one tenant that wait for a prefill worker. A further one is answered with 429. "
        "0: its share of max_queued_requests.",
    )
    tenant_running_max: Count = Field(
        default=0,
        description="Requests of one tenant in prefill and decode at this router. Further ones wait. 0: no limit.",
    )
    tenant_tokens_per_minute: Count = Field(
        default=0,
        description="Tokens of prompts and outputs that one tenant may have in a minute at this router. Then its "
        "requests are answered with 429 until the tokens have flowed back. 0: no limit.",
    )
    tenant_weights: Weights = Field(
        default=(),
        description="Weights of tenants in the queues: NAME=WEIGHT, where a name is a client's address. Others have 1.",
    )
    backfill_max: Count = Field(
        default=32,
        description="Smaller requests that may be placed past one that finds no room. Then the room is kept for it.",
    )
    share_prefix_cache: bool = Field(
        default=False,
        description="Whether tenants share prefix caches. true saves memory and work, and lets a client find out "
        "what others have sent.",
    )
    api_keys_file: str = Field(
        default="",
        description="File with the clients' API keys as hashes, a line a key; it is followed as it changes. Empty: "
        "whoever reaches the port is served.",
    )
    usage_log: bool = Field(
        default=False,
        description="Whether each request with an API key gets a log line with its tokens, at level info.",
    )
    trusted_proxies: Networks = Field(
        default=(),
        description="Addresses or networks (CIDR) of proxies whose X-Forwarded-For names the client. Empty: it is "
        "ignored, and all clients behind a proxy are one tenant.",
    )
    ready_max: PositiveInt = Field(
        default=512,
        description="Requests in prefill or waiting for decode, whatever decode takes. Each holds pages of a prefill "
        "worker.",
    )
    ready_seconds: Seconds = Field(
        default=2.0,
        description="Seconds within which a stream is to go on after its first token. As many requests are in prefill "
        "or wait for decode as decode takes in three quarters of it. Under overload further ones wait before they are "
        "computed.",
    )
    balance_steps: Count = Field(
        default=64,
        description="Decode steps for which all that runs at a decode worker should have pages. Where it has not, "
        "streams migrate to a worker that has room, before any is retracted. 0: they stay where they are.",
    )
    prefill_policy: PolicyName = Field(
        default="cache_aware",
        description="How a prefill worker is chosen. cache_aware prefers one that has computed the prefix. "
        "Decode workers that compute prompts are compared by the seconds that each would take.",
    )
    decode_policy: PolicyName = Field(
        default="cache_aware",
        description="How a decode worker is chosen. cache_aware takes the one that has least to fetch, unless others "
        "hold far fewer tokens; total_tokens the one that holds the fewest for its size.",
    )
    local_prefill: LocalPrefill = Field(
        default="short",
        description="Whether decode workers compute prompts. short: those that they would have computed sooner, by a "
        "fifth or by less where they have more of it cached, than a prefill worker with the fetch that follows. "
        "fallback: while no prefill worker is up that could. "
        "always: prefill workers get none. never: requests wait for a prefill worker.",
    )
    candidates_max: PositiveInt = Field(
        default=8,
        description="Workers that are compared for one request, drawn at random, besides those that have its prefix. "
        "Where none of them has room, all are. In a fleet with no more workers of a role, all are compared at once.",
    )
    losses_max: PositiveInt = Field(
        default=5,
        description="Workers that one request may lose before it fails, with fewer than 32 tokens between a loss and "
        "the next. A request that kills workers cannot kill all.",
    )
    loss_seconds: Seconds = Field(
        default=1.0,
        description="Losses of one request within this many seconds count as one: workers that die together are one "
        "event. After the second of them the request waits until the others are known.",
    )
    waiting_seconds_max: Seconds = Field(
        default=30.0,
        description="Seconds that a new request may wait for a prefill worker. Then the answer is 503. One that would "
        "wait longer than 0.8 of them, by the rate at which others are taken, gets 429 at once.",
    )
    ttft_target_seconds: float = Field(
        default=0.0,
        ge=0.0,
        le=86_400.0,
        description="Seconds within which a request is to have its first token. One that cannot, by the rate at which "
        "others are taken, gets 429 at once; one that waits longer gets 503 before it is computed. 0: no target.",
    )
    unreachable_seconds: Seconds = Field(
        default=30.0,
        description="Seconds in which no decode worker is asked to fetch from a worker that it could not fetch from, "
        "while others can. Then the pair is tried again.",
    )
    worker_return_seconds: Seconds = Field(
        default=60.0,
        description="Seconds that a stream which has begun waits while no worker is there that could continue it, full "
        "or not; then 503. A worker restarts within this time. For room it waits as long as it takes.",
    )
    stall_seconds: Seconds = Field(
        default=900.0,
        description="Seconds in which a live worker may report nothing of a request that it has. Then it is cancelled "
        "there and tried again. A prompt must be computed, and a retracted request resumed, within this time.",
    )
    silent_seconds: Seconds = Field(
        default=30.0,
        description="Seconds in which a live worker may say nothing of all requests that it has and report that it has "
        "none, while others answer such as were sent later. Then they are tried elsewhere. More than a worker's "
        "step_seconds_max.",
    )
    request_seconds_max: float = Field(
        default=0.0,
        ge=0.0,
        description="Seconds for a whole request. Then the answer is 504. 0: no limit, because outputs may be long.",
    )
    renew_seconds: Seconds = Field(
        default=1.0,
        description="Seconds between two renewals of a lease. Several must fit into the workers' lease_seconds.",
    )
    endpoint_lag_seconds: Seconds = Field(
        default=5.0,
        description="Seconds after SIGTERM in which new requests are still accepted. Load balancers notice "
        "the drain late.",
    )
    drain_seconds: Seconds = Field(
        default=300.0,
        description="Seconds after that for open streams to end. Then they are closed. A second SIGTERM closes them at "
        "once.",
    )
    retry_after_seconds: Seconds = Field(
        default=1.0, description="Seconds in the Retry-After header of 429 and 503."
    )
    no_room_seconds: Seconds = Field(
        default=0.1,
        description="Seconds before a worker that refused for lack of room is tried again. Workers report their load "
        "as often.",
    )
    prefilling_per_slot: float = Field(
        default=2.0,
        gt=0.0,
        description="Requests in flight per prefill slot. 2 keeps one queued behind the running one.",
    )
    cache_hit_tokens_min: Count = Field(
        default=128,
        description="Tokens that a cache hit must save before it decides placement. Fewer do not justify an imbalance.",
    )
    cache_miss_weight: float = Field(
        default=2.0,
        ge=1.0,
        description="How much a token that a worker must compute counts, by one that is queued there. Above 1 because "
        "what is computed where it was not cached drives something else out.",
    )
    own_worker_tokens_max: Count = Field(
        default=6144,
        description="Queued tokens by which a prefix's own worker may be behind the emptiest one. By its own worker, "
        "which all routers name alike, a prefix goes that no worker is known to have.",
    )
    imbalance_tokens_max: Count = Field(
        default=8192,
        description="Queued tokens by which a worker may be behind the emptiest one before its cache hits are ignored, "
        "if imbalance_ratio_max is exceeded too.",
    )
    imbalance_ratio_max: float = Field(
        default=1.5,
        ge=1.0,
        description="Ratio of a worker's queued tokens to the emptiest one's above which its cache hits are ignored, "
        "if imbalance_tokens_max is exceeded too.",
    )
    prefix_blocks_max: PositiveInt = Field(
        default=1_048_576,
        description="Prefix blocks of 64 tokens remembered for all workers together. A worker gets an equal share, and "
        "no more than its pool holds. The default covers 67 million tokens.",
    )
    ended_requests_max: PositiveInt = Field(
        default=1000, description="Ended requests that /debug/requests still knows."
    )

    @property
    def indexed_roles(self) -> tuple[Role, ...]:
        """Roles whose policy asks what a worker has in its prefix cache."""
        policies: dict[Role, PolicyName] = {"prefill": self.prefill_policy, "decode": self.decode_policy}
        return tuple(role for role, policy in policies.items() if POLICIES[policy].reads_prefixes)

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or Path(self.model).name

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name by which clients may call it; the first one is in answers."""
        return tuple(dict.fromkeys((self.model_name, *self.model_aliases)))
