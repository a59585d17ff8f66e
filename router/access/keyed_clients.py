"""What there is where clients have API keys: the keys, quotas and accounts of one router, put together.

Without `api_keys_file` nothing of it is made, and a request passes none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.key_ring import KeyRing
from router.access.quotas import KeyQuota, Quotas
from router.access.usage_accounts import UsageAccount, UsageAccounts
from router.config import RouterConfig
from router.replies.replies import error_of, retry_after, send_json
from router.request_context import context_of
from shared.process.api_keys import ApiKey


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
        context_of(scope).connection.show_key(key.name)  # those with a valid key have places of their own
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
            await _refuse(scope, send, 429, refusal.message, "rate_limit_exceeded", headers)
            return
        context = context_of(scope)
        context.key = key
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
    scope: Scope, send: Send, status: int, message: str, code: str, headers: Headers = ()
) -> None:
    context_of(scope).connection.count_refusal(status)
    await send_json(send, status, error_of(scope, status, message, code=code), headers)
