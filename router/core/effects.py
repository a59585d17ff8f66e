"""What goes into the router core for a client, and what comes out: requests, and effects to carry out in order.

Effects are values; the shell sends, logs, streams and answers, and decides nothing. Tokens of a request are delivered
exactly once and in order, and each request ends exactly once. There is no text here.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.batch.effects import Note, Send
from shared.wire.messages import FinishReason
from shared.wire.sampled import Logprobs
from shared.wire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One prompt of one client, validated and tokenized; `params.max_new_tokens` is final."""

    rid: str  # unique among live requests
    model: str  # as the client calls it
    token_ids: tuple[int, ...]
    params: SamplingParams
    tenant: str = ""  # in whose name it comes
    priority: int = 0  # higher goes first
    cache_salt: str = ""  # requests of different salts share no prefix cache; reveals nothing of the client's
    deadline_seconds: float = 0.0  # until its first token; 0.0: the client asked for none
    # its prompt goes to a prefill worker while one is up, whatever `local_prefill` says
    by_prefill: bool = False
    session: str = ""  # requests of one session prefer one worker (policy follow_bootstrap_room)
    eos_token_ids: frozenset[int] = frozenset()  # a stream that was cut right behind one of them has ended
    # rid of the first of all requests of this prompt, as `n` asks for them; empty: it is alone
    sampling_group: str = ""
    # when the head of its HTTP request had come, and when its body had; 0.0: with the request itself
    head_at: float = 0.0
    body_at: float = 0.0

    def seconds_before(self, now: float) -> dict[str, float]:
        """Seconds of the stages before the router's core, which begins with it `now`."""
        if not self.head_at:
            return {}
        return {"body": self.body_at - self.head_at, "tokenizing": now - self.body_at}

    @property
    def charged_tokens(self) -> int:
        """Tokens of the prompt that this request is charged for: the first of its siblings pays for all."""
        return len(self.token_ids) if self.sampling_group in ("", self.rid) else 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int  # 0 of one whose sibling is charged for the prompt
    completion_tokens: int
    cached_tokens: int  # of these prompt tokens, found in a prefix cache by the first attempt


@dataclass(frozen=True, slots=True)
class RequestCompleted:
    """The request has all its output."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ends with an error; `status` is the HTTP status, the other words are OpenAI's."""

    status: int  # 400, 404, 429, 500, 503 or 504
    message: str
    retry_after_seconds: float | None = None
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The client has gone."""


Outcome = RequestCompleted | RequestFailed | RequestAborted


def outcome_word(outcome: Outcome) -> str:
    """The outcome as metrics name it: a finish reason, an HTTP status, or `aborted`."""
    match outcome:
        case RequestCompleted(reason=reason):
            return reason
        case RequestFailed(status=status):
            return str(status)
        case RequestAborted():
            return "aborted"


class NewTokens(msgspec.Struct, frozen=True):
    """New output of a request; `index` is the place of token_ids[0] in the output.

    A struct, as messages are: one is made for each token, and making it costs a sixth of what a frozen dataclass does.
    """

    rid: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: Logprobs = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """How likely the next tokens of a request's prompt are, from its second token on; before all of its output."""

    rid: str
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The last effect of a request."""

    rid: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class FleetPaired:
    """For the first time a prefill and a decode worker are up that can exchange pages: requests can be served."""


@dataclass(frozen=True, slots=True)
class EndSession:
    """The core has dropped a worker: nothing more of this session may come. It is dialed again after a rest."""

    peer: str
    reason: str


RouterEffect = Send | Note | NewTokens | PromptScored | RequestEnded | FleetPaired | EndSession
