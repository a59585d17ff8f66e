"""A request as a worker sees it: its tokens, the pages that hold their KV, and how far it has come.

A `Req` is one attempt at one request on one worker. It is plain mutable data; the scheduler that holds it is the only
writer, and `state` is written by `RequestStates.advance` alone. It knows nothing of text (the router's business), of
the device or of time.

Three lengths, each at most the one before, tell where the KV stands:

    len(token_ids)   tokens known to the CPU: the prompt and every settled sample
    launched_len     tokens whose KV is written by a step that was launched (may run one ahead of token_ids)
    kv_len           tokens whose KV is written by a step that has settled: what a baton may promise
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from shared.batch.schedule_batch import SlotJoin
from shared.primitives.state_table import StateName
from shared.wire.messages import Decode, FinishReason, Prefill, Serve
from shared.wire.sampled import TokenLogprobs
from shared.wire.sampling_params import SamplingParams


class CacheNode(Protocol):
    """A node of the prefix cache, which a request only keeps: `shared.kv` alone looks into it."""

    pages: list[int]
    lock_count: int


@dataclass(slots=True, eq=False)
class Req:
    """One attempt at one request. `sequence` numbers requests in the order they came and breaks every tie."""

    rid: str
    attempt: int
    router: str  # the link peer that sent it and gets its tokens
    sequence: int
    token_ids: list[int]
    prompt_len: int  # of the client's prompt; token_ids may already hold output of earlier attempts
    params: SamplingParams
    priority: int = 0
    extra_key: str = ""
    tenant: str = ""
    arrived_at: float = 0.0  # seconds on the worker's clock
    started_at: float = 0.0  # when its first step or its fetch was planned
    state: StateName | None = None  # where it is, in the words of its role's table; None: no scheduler has it

    pages: list[int] = field(default_factory=list)  # page table: pages[i] holds tokens i*page_size …
    owned: list[int] = field(default_factory=list)  # those of `pages` that are its own, not the tree's
    node: CacheNode | None = None  # deepest locked radix node
    cached_len: int = 0  # tokens found in the radix cache; an estimate until they are locked
    kv_len: int = 0
    launched_len: int = 0
    launched_max: int = 0  # decode: to this length it has pages, and does not end
    sent_len: int = field(init=False)  # of token_ids: those that its router has or was sent
    logprobs: list[TokenLogprobs] = field(
        default_factory=list
    )  # of the tokens that were not sent, if asked for
    slot: int | None = None
    retractions: int = 0
    scored_len: int = 1  # tokens of the prompt that need no logprob any more; the first never has one
    final_kv_len: int = field(init=False)  # tokens whose KV it can ever need: all but the very last one

    def __post_init__(self) -> None:
        self.final_kv_len = self.prompt_len + self.params.max_new_tokens - 1
        self.sent_len = len(self.token_ids)

    @classmethod
    def of(
        cls, command: Prefill | Decode | Serve, router: str, sequence: int, now: float, state: StateName
    ) -> Req:
        """The request that `router` asks for with `command`, in the first state of the role's table."""
        return cls(
            rid=command.rid,
            attempt=command.attempt,
            router=router,
            sequence=sequence,
            token_ids=list(command.token_ids),
            prompt_len=command.prompt_len,
            params=command.params,
            priority=command.priority,
            extra_key=command.extra_key,
            tenant=command.tenant,
            arrived_at=now,
            started_at=now,
            state=state,
            scored_len=command.prompt_len if isinstance(command, Decode) else max(1, command.scored_len),
        )

    @property
    def reusable_len(self) -> int:
        """Tokens whose KV may come from a cache: a logprob that is asked for has to be computed."""
        unscored = self.params.prompt_logprobs >= 0 and self.scored_len < self.prompt_len
        return self.scored_len - 1 if unscored else len(self.token_ids) - 1

    def begins_like(self, other: Req, start: int, end: int) -> bool:
        """Whether both have the same first `end` tokens and may share their KV.

        `start` … `end` - 1 are compared first, where most differ: so the rest is hardly ever looked at.
        """
        if self.token_ids[start:end] != other.token_ids[start:end] or self.extra_key != other.extra_key:
            return False
        return end <= len(self.token_ids) and self.token_ids[:start] == other.token_ids[:start]

    def scores(self, start: int, end: int) -> list[int]:
        """The tokens behind positions `start` … `end` - 1 whose logprobs are asked for; none of them: empty."""
        last = min(end, self.prompt_len - 1)
        if self.params.prompt_logprobs < 0 or last < self.scored_len:
            return []
        return self.token_ids[start + 1 : last + 1]

    @property
    def output_len(self) -> int:
        """Tokens of output so far, across attempts."""
        return len(self.token_ids) - self.prompt_len

    @property
    def growing_from(self) -> int:
        """Tokens whose KV it has, or will have before it grows: it may be computed again up to there."""
        return max(self.launched_len, len(self.token_ids) - 1)

    @property
    def remaining_new_tokens(self) -> int:
        """Tokens that may still be generated, by settled length."""
        return self.params.max_new_tokens - self.output_len

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the request ends with its last token; None if it goes on."""
        last = self.token_ids[-1]
        if last in self.params.stop_token_ids or (last in eos_token_ids and not self.params.ignore_eos):
            return "stop"
        return "length" if self.remaining_new_tokens <= 0 else None

    def join(self, last_token: int | None = None) -> SlotJoin:
        """What the device must know of the request before its first step in its slot."""
        assert self.slot is not None
        return SlotJoin(
            slot=self.slot,
            pages=tuple(self.pages),
            kv_len=self.kv_len,
            params=self.params,
            prompt_len=self.prompt_len,
            token_ids=tuple(self.token_ids) if self.params.needs_history else (),
            last_token=last_token,
            tenant=self.tenant,
        )
