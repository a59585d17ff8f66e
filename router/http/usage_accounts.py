"""What each HTTP request of a key's holder uses: counted by name, paid from the key's tokens, logged if that is set.

Requests to the core are metered between the core and the answer: `metered` is what `RouterShell` asks about each
before it goes in. One HTTP request is one account, however many requests to the core it makes. Their ids begin with its
own, and are the only thing they have in common.

    completed           what the answer says in usage
    failed, aborted     the tokens that came, and with the first of them the prompt; that of siblings once

An answer may go on after its HTTP request, and its account with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from router.core.effects import ClientRequest, Outcome, RequestCompleted, RequestFailed
from router.http.key_counters import KeyCounters
from router.http.quotas import KeyQuota
from router.shell import TokenSink
from shared.api_keys import ApiKey
from shared.sampled import Logprobs

log = structlog.get_logger(__name__)


class UsageAccount:
    """One HTTP request."""

    def __init__(self, rid: str, key: ApiKey, quota: KeyQuota, began_at: float):
        self.rid = rid
        self.key = key
        self.quota = quota
        self.began_at = began_at
        self.status = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.open_parts = 1  # the HTTP request, and its requests to the core


class UsageAccounts:
    """The accounts of requests that have not ended. `now` in seconds, of a clock that never goes back."""

    def __init__(self, counters: KeyCounters, now: Callable[[], float], *, logged: bool):
        self._counters = counters
        self._logged = logged
        self._by_rid: dict[str, UsageAccount] = {}
        self.now = now

    def __len__(self) -> int:
        return len(self._by_rid)

    def open(self, rid: str, key: ApiKey, quota: KeyQuota) -> UsageAccount:
        """The account of an HTTP request that was let in."""
        account = self._by_rid[rid] = UsageAccount(rid, key, quota, self.now())
        return account

    def close(self, account: UsageAccount) -> None:
        """The HTTP request has ended."""
        del self._by_rid[account.rid]
        self._part_ended(account)

    def metered(self, request: ClientRequest, sink: TokenSink) -> tuple[ClientRequest, TokenSink]:
        """A request to the core with its key's priority, and a sink that counts before `sink`."""
        account = self._by_rid.get(request.rid.partition("-")[0])
        if account is None:
            log.error("usage.unaccounted", rid=request.rid)  # nobody without a key is let in
            return request, sink
        account.open_parts += 1
        account.quota.spend(request.charged_tokens, self.now())
        if account.key.priority:
            request = replace(request, priority=account.key.priority)
        return request, MeteredSink(self, account, request.charged_tokens, sink)

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

    def __init__(self, accounts: UsageAccounts, account: UsageAccount, prompt_tokens: int, sink: TokenSink):
        self._accounts = accounts
        self._account = account
        self._prompt_tokens = prompt_tokens  # paid for already
        self._sink = sink
        self._came = 0
        self._ended = False

    def tokens(self, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        """New tokens: paid for at once, so that a client that hangs up has paid."""
        self._came += len(token_ids)
        self._account.quota.spend(len(token_ids), self._accounts.now())
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
        if isinstance(outcome, RequestCompleted | RequestFailed):  # who hangs up gets nothing back
            difference = prompt + completion - self._prompt_tokens - self._came
            self._account.quota.spend(difference, self._accounts.now())
        self._accounts.settle(self._account, prompt, cached, completion)
