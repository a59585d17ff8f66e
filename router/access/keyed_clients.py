"""What there is where clients have API keys: the keys, quotas and accounts of one router, put together.

Without `api_keys_file` nothing of it is made, and a request passes none of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.key_ring import KeyCounters, KeyRing
from router.access.quotas import RESERVED_OUTPUT_MAX, KeyQuota, Quotas
from router.config import RouterConfig
from router.core.effects import ClientRequest, Outcome, RequestCompleted, RequestFailed
from router.replies import OverloadedError, error_of, retry_after, send_json
from router.request_context import context_of
from router.shell import TokenSink
from shared.primitives.errors import RequestError
from shared.process.api_keys import ApiKey
from shared.wire.sampled import Logprobs

log = structlog.get_logger(__name__)


class KeyedClients:
    """The keys of one router; made on its event loop."""

    def __init__(self, ring: KeyRing, settings: RouterConfig, routers_ready: Callable[[], int]):
        self.counters = ring.counters
        self.quotas = Quotas(routers_ready, lambda: ring.names)
        now = asyncio.get_running_loop().time
        self.accounts = UsageAccounts(ring.counters, now, logged=settings.usage_log)
        self._ring = ring
        self._settings = settings
        self._following = asyncio.create_task(ring.read_for_ever())

    def guard(self, app: ASGIApp) -> ASGIApp:
        """The application for those who have a key."""
        return KeyGuard(app, self._ring, self.quotas, self.accounts, self._settings)

    def requests_open(self) -> dict[tuple[str, ...], float]:
        """HTTP requests under way, by key; those of a key that has left the file while any is."""
        return self._by_name(self.accounts.open_of)

    def context_tokens(self) -> dict[tuple[str, ...], float]:
        """Tokens of running streams, prompts and outputs, by key."""
        return self._by_name(self.accounts.context_of)

    def _by_name(self, counts: Counter[str]) -> dict[tuple[str, ...], float]:
        return {(name,): counts[name] for name in self._ring.names | (+counts).keys()}

    def close(self) -> None:
        """Follow the file no more."""
        self._following.cancel()


# ---- who is let in, before anything of a body is read ----------------------------------------------------------------
#     401 invalid_api_key        no key, or one that is in no line of the file
#     403 model_not_allowed      a key for other models
#     429 rate_limit_exceeded    the key's requests or tokens of this minute are used up, or as many run as may
#
# Every path needs a key but `/health` and `/ping`, which load balancers ask, and `/`, which says what there is; also
# paths that do not exist, so that nothing can be found out by trying. Probes and metrics are on the admin port. A
# browser's preflight has no key and is answered before. A request that is let in has its `ApiKey` in its context:
# its name is the tenant.


Headers = Sequence[tuple[bytes, bytes]]

OPEN_PATHS = frozenset({"/", "/health", "/ping"})
KEY_HEADERS = (b"authorization", b"x-api-key")
CHALLENGE = (b"www-authenticate", b"Bearer")
MISSING = "an API key is required: send the header Authorization: Bearer, followed by your key, or x-api-key"
UNKNOWN = "this API key is not valid here; it is unknown or was revoked"


class KeyGuard:
    """ASGI around the application, for deployments with a file of keys."""

    def __init__(
        self, app: ASGIApp, ring: KeyRing, quotas: Quotas, accounts: UsageAccounts, settings: RouterConfig
    ):
        self._app = app
        self._ring = ring
        self._quotas = quotas
        self._accounts = accounts
        self._counters = ring.counters
        self._model = settings.model_name
        self._retry_after_seconds = settings.retry_after_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        presented = _presented(scope)
        key = self._ring.find(presented) if presented else None
        if key is None:
            self._counters.refusals["unknown" if presented else "missing"] += 1
            message = UNKNOWN if presented else MISSING
            await _refuse(scope, send, 401, message, "invalid_api_key", [CHALLENGE])
            return
        context = context_of(scope)
        context.key = key
        context.connection.show_key(key.name)  # those with a valid key have places of their own
        if not key.may_use(self._model):
            self._counters.requests[key.name, "model"] += 1
            message = f"this API key is not for the model {self._model}"
            await _refuse(scope, send, 403, message, "model_not_allowed")
        else:
            await self._serve_within_quota(key, scope, receive, send)

    async def _serve_within_quota(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        now = self._accounts.now()
        quota = self._quotas.of(key, now)
        if refusal := quota.enter(now):
            self._counters.requests[key.name, refusal.limit] += 1
            seconds = self._retry_after_seconds if refusal.seconds is None else refusal.seconds
            headers = [*retry_after(seconds), *quota.headers(now)]
            full = f"key_{refusal.limit}"
            await _refuse(scope, send, 429, refusal.message, "rate_limit_exceeded", headers, full)
            return
        context = context_of(scope)
        context.account = account = self._accounts.open(context.rid, key, quota)
        try:
            await self._app(scope, receive, self._telling(send, quota, account))
        finally:
            if not account.status:  # nobody waited for the answer
                self._count(account)
            quota.leave(account.answers)
            self._accounts.close(account)

    def _count(self, account: UsageAccount) -> None:
        self._counters.requests[account.key.name, account.refused_by or "served"] += 1

    def _telling(self, send: Send, quota: KeyQuota, account: UsageAccount) -> Send:
        """`send` that adds what is left of the quota, and notes the status."""

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                account.status = message["status"]
                self._count(account)
                message["headers"] = [*message.get("headers", ()), *quota.headers(self._accounts.now())]
            await send(message)

        return send_with_limits


def _presented(scope: Scope) -> bytes:
    """The key that was presented, as OpenAI's or as Anthropic's clients do; nothing where there are two."""
    found = {_key_in(name, value) for name, value in scope["headers"] if name in KEY_HEADERS}
    return found.pop() if len(found) == 1 else b""


def _key_in(name: bytes, value: bytes) -> bytes:
    if name == b"x-api-key":
        return value.strip()
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


async def _refuse(
    scope: Scope, send: Send, status: int, message: str, code: str, headers: Headers = (), full: str = ""
) -> None:
    context = context_of(scope)
    context.connection.count_refusal(status, full)
    context.code = full or code
    await send_json(send, status, error_of(scope, status, message, code=code), headers)


# ---- what each HTTP request of a key's holder uses: counted by name, paid from the key's tokens, logged if that is set
# One HTTP request is one account, which stands in its context, however many requests to the core it makes. Each of them
# is `metered` before it goes in: what counts its output stands between the core and the answer.
#
#     completed           what the answer says in usage
#     failed, aborted     the tokens that came, and with the first of them the prompt; that of siblings once
#
# Before its requests go to the core, an account reserves their tokens (`quotas`). Each takes its part of that with it.
#
# An answer may go on after its HTTP request, and its account with it.


class UsageAccount:
    """One HTTP request."""

    def __init__(self, accounts: UsageAccounts, rid: str, key: ApiKey, quota: KeyQuota, began_at: float):
        self._accounts = accounts
        self.rid = rid
        self.key = key
        self.quota = quota
        self.began_at = began_at
        self.status = 0
        self.answers = 1  # that run in its name
        self.refused_by = ""  # the limit that was met after it was let in
        self.reserved = 0  # tokens that no request to the core has taken with it yet
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.open_parts = 1  # the HTTP request, and its requests to the core

    def reserve(self, requests: Sequence[ClientRequest], now: float) -> None:
        """Reserve what these requests to the core will need. Raises `RequestError` where the key has not so much."""
        tokens = sum(request.charged_tokens + _reserved_output(request) for request in requests)
        refusal = self.quota.reserve(tokens, len(requests), now)
        if refusal is None:
            self.answers, self.reserved = len(requests), tokens
            return
        self.refused_by = refusal.limit
        if refusal.never:
            raise RequestError(refusal.message, code="key_limit_exceeded")
        raise OverloadedError(refusal.message, f"key_{refusal.limit}", refusal.seconds)

    def note_first_token(self) -> None:
        """The first token of one of its answers has come: within the key's target, or not."""
        if self.key.ttft_target:
            met = self._accounts.now() - self.began_at <= self.key.ttft_target
            self._accounts.counters.targets[self.key.name, "met" if met else "missed"] += 1

    def metered(self, request: ClientRequest, sink: TokenSink) -> tuple[ClientRequest, TokenSink]:
        """A request to the core with its key's priority and target, and a sink that counts before `sink`."""
        self.open_parts += 1
        prompt = min(self.reserved, request.charged_tokens)
        output = min(self.reserved - prompt, _reserved_output(request))
        self.reserved -= prompt + output
        self.quota.spend(request.charged_tokens - prompt, self._accounts.now())
        if self.key.priority:
            request = replace(request, priority=self.key.priority)
        target = self.key.ttft_target
        if target and not 0 < request.deadline_seconds <= target:
            request = replace(request, deadline_seconds=target)
        return request, MeteredSink(self._accounts, self, request.charged_tokens, output, sink)


class UsageAccounts:
    """The accounts of requests that have not ended. `now` in seconds, of a clock that never goes back."""

    def __init__(self, counters: KeyCounters, now: Callable[[], float], *, logged: bool):
        self.counters = counters
        self._logged = logged
        self._open: set[UsageAccount] = set()
        self.open_of: Counter[str] = Counter()  # HTTP requests by the name of their key
        self.context_of: Counter[str] = Counter()  # tokens of running streams, prompts and outputs, by name
        self.now = now

    def __len__(self) -> int:
        return len(self._open)

    def open(self, rid: str, key: ApiKey, quota: KeyQuota) -> UsageAccount:
        """The account of an HTTP request that was let in."""
        account = UsageAccount(self, rid, key, quota, self.now())
        self._open.add(account)
        self.open_of[key.name] += 1
        return account

    def close(self, account: UsageAccount) -> None:
        """The HTTP request has ended."""
        self._open.remove(account)
        self.open_of[account.key.name] -= 1
        self._part_ended(account)

    def settle(self, account: UsageAccount, prompt: int, cached: int, completion: int) -> None:
        """A request to the core has ended, and used these tokens."""
        account.prompt_tokens += prompt
        account.cached_tokens += cached
        account.completion_tokens += completion
        self.counters.tokens[account.key.name, "cached"] += cached
        self._part_ended(account)

    def _part_ended(self, account: UsageAccount) -> None:
        account.open_parts -= 1
        if not account.open_parts and account.reserved:  # of requests that never went to the core
            account.quota.spend(-account.reserved, self.now())
            account.reserved = 0
        if self._logged and not account.open_parts:
            log.info(
                "usage.request",
                rid=account.rid,
                key_name=account.key.name,
                status=account.status,
                prompt_tokens=account.prompt_tokens,
                cached_tokens=account.cached_tokens,
                completion_tokens=account.completion_tokens,
                seconds=round(self.now() - account.began_at, 3),
            )


class MeteredSink:
    """Counts the output of one request to the core, and hands it on."""

    def __init__(
        self,
        accounts: UsageAccounts,
        account: UsageAccount,
        prompt_tokens: int,
        reserved: int,
        sink: TokenSink,
    ):
        self._accounts = accounts
        self._account = account
        self._prompt_tokens = prompt_tokens  # paid for already
        self._reserved = reserved  # for output that has not come
        self._sink = sink
        self._came = 0
        self._ended = False

    def tokens(self, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        """New tokens: paid for at once, so that a client that hangs up has paid."""
        name, count = self._account.key.name, len(token_ids)
        if not self._came:
            self._account.note_first_token()
            self._told(name, "prompt", self._prompt_tokens)
        self._came += count
        self._told(name, "completion", count)
        paid = min(self._reserved, len(token_ids))
        self._reserved -= paid
        if paid < len(token_ids):
            self._account.quota.spend(len(token_ids) - paid, self._accounts.now())
        self._sink.tokens(token_ids, logprobs)

    def scored(self, logprobs: Logprobs) -> None:
        """What the prompt scores costs nothing beside the prompt."""
        self._sink.scored(logprobs)

    def ended(self, outcome: Outcome) -> None:
        """The end; a second one, after a fault of the sink, counts nothing."""
        if not self._ended:
            self._ended = True
            self._settle(outcome)
        self._sink.ended(outcome)

    def _told(self, name: str, kind: str, tokens: int) -> None:
        """Count tokens while they flow."""
        self._accounts.counters.tokens[name, kind] += tokens
        self._accounts.context_of[name] += tokens

    def _settle(self, outcome: Outcome) -> None:
        name, told = self._account.key.name, self._prompt_tokens if self._came else 0
        prompt, cached, completion = told, 0, self._came
        self._accounts.context_of[name] -= told + self._came
        if isinstance(outcome, RequestCompleted):
            usage = outcome.usage
            prompt, cached, completion = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        self._accounts.counters.tokens[name, "prompt"] += max(0, prompt - told)
        self._accounts.counters.tokens[name, "completion"] += max(0, completion - self._came)
        difference = -self._reserved
        if isinstance(outcome, RequestCompleted | RequestFailed):  # who hangs up gets no prompt back
            difference += prompt + completion - self._prompt_tokens - self._came
        self._account.quota.spend(difference, self._accounts.now())
        self._accounts.settle(self._account, prompt, cached, completion)


def _reserved_output(request: ClientRequest) -> int:
    return min(request.params.max_new_tokens, RESERVED_OUTPUT_MAX)
