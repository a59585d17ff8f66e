"""What each HTTP request of a key's holder uses: counted by name, paid from the key's tokens, logged if that is set.

One HTTP request is one account, which stands in its context, however many requests to the core it makes. Each of them
is `metered` before it goes in: what counts its output stands between the core and the answer.

    completed           what the answer says in usage
    failed, aborted     the tokens that came, and with the first of them the prompt; that of siblings once

Before its requests go to the core, an account reserves their tokens (`quotas`). Each takes its part of that with it.

An answer may go on after its HTTP request, and its account with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from router.access.key_counters import KeyCounters
from router.access.quotas import RESERVED_OUTPUT_MAX, KeyQuota
from router.core.effects import ClientRequest, Outcome, RequestCompleted, RequestFailed
from router.replies.replies import OverloadedError
from router.shell import TokenSink
from shared.primitives.errors import RequestError
from shared.process.api_keys import ApiKey
from shared.wire.sampled import Logprobs

log = structlog.get_logger(__name__)


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
        raise OverloadedError(refusal.message, refusal.seconds)

    def metered(self, request: ClientRequest, sink: TokenSink) -> tuple[ClientRequest, TokenSink]:
        """A request to the core with its key's priority, and a sink that counts before `sink`."""
        self.open_parts += 1
        prompt = min(self.reserved, request.charged_tokens)
        output = min(self.reserved - prompt, _reserved_output(request))
        self.reserved -= prompt + output
        self.quota.spend(request.charged_tokens - prompt, self._accounts.now())
        if self.key.priority:
            request = replace(request, priority=self.key.priority)
        return request, MeteredSink(self._accounts, self, request.charged_tokens, output, sink)


class UsageAccounts:
    """The accounts of requests that have not ended. `now` in seconds, of a clock that never goes back."""

    def __init__(self, counters: KeyCounters, now: Callable[[], float], *, logged: bool):
        self._counters = counters
        self._logged = logged
        self._open: set[UsageAccount] = set()
        self.now = now

    def __len__(self) -> int:
        return len(self._open)

    def open(self, rid: str, key: ApiKey, quota: KeyQuota) -> UsageAccount:
        """The account of an HTTP request that was let in."""
        account = UsageAccount(self, rid, key, quota, self.now())
        self._open.add(account)
        return account

    def close(self, account: UsageAccount) -> None:
        """The HTTP request has ended."""
        self._open.remove(account)
        self._part_ended(account)

    def settle(self, account: UsageAccount, prompt: int, cached: int, completion: int) -> None:
        """A request to the core has ended, and used these tokens."""
        account.prompt_tokens += prompt
        account.cached_tokens += cached
        account.completion_tokens += completion
        for kind, number in (("prompt", prompt), ("cached", cached), ("completion", completion)):
            self._counters.tokens[account.key.name, kind] += number
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
        self._came += len(token_ids)
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

    def _settle(self, outcome: Outcome) -> None:
        prompt, cached, completion = self._prompt_tokens if self._came else 0, 0, self._came
        if isinstance(outcome, RequestCompleted):
            usage = outcome.usage
            prompt, cached, completion = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        difference = -self._reserved
        if isinstance(outcome, RequestCompleted | RequestFailed):  # who hangs up gets no prompt back
            difference += prompt + completion - self._prompt_tokens - self._came
        self._account.quota.spend(difference, self._accounts.now())
        self._accounts.settle(self._account, prompt, cached, completion)


def _reserved_output(request: ClientRequest) -> int:
    return min(request.params.max_new_tokens, RESERVED_OUTPUT_MAX)
