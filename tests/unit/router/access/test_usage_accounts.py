"""What a request uses is counted once, however it ends, and paid from the key's tokens as it comes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from router.access.key_ring import KeyCounters
from router.access.keyed_clients import UsageAccount, UsageAccounts
from router.access.quotas import RESERVED_OUTPUT_MAX, KeyQuota
from router.core.effects import ClientRequest, Outcome, RequestAborted, RequestCompleted, RequestFailed, Usage
from router.shell import TokenSink
from shared.process.api_keys import ApiKey
from shared.wire.sampled import Logprobs
from shared.wire.sampling_params import SamplingParams

PER_MINUTE = 1000
KEY = ApiKey("shop", b"", tpm=PER_MINUTE, priority=3)
REFUSED = RequestFailed(503, "no worker")


@dataclass
class AnswerReader:
    """What the answer is given."""

    came: list[int] = field(default_factory=list)
    ends: list[Outcome] = field(default_factory=list)

    def tokens(self, token_ids: tuple[int, ...], logprobs: Logprobs) -> None:
        del logprobs
        self.came += token_ids

    def scored(self, logprobs: Logprobs) -> None:
        raise AssertionError(f"nobody asked for {logprobs}")

    def ended(self, outcome: Outcome) -> None:
        self.ends.append(outcome)


class Books:
    """The accounts of one router, at a time that stands still."""

    def __init__(self) -> None:
        self.counters, self.quota = KeyCounters(), KeyQuota()
        self.accounts = UsageAccounts(self.counters, lambda: 0.0, logged=False)
        self.quota.follow(KEY, 1, 0.0)

    def open(self, rid: str = "r") -> UsageAccount:
        self.account = self.accounts.open(rid, KEY, self.quota)
        return self.account

    def submit(
        self, rid: str = "r", prompt: int = 10, sampling_group: str = ""
    ) -> tuple[ClientRequest, TokenSink, AnswerReader]:
        params, reader = SamplingParams(max_new_tokens=8, seed=0), AnswerReader()
        asked = ClientRequest(
            rid=rid, model="m", token_ids=(1,) * prompt, params=params, sampling_group=sampling_group
        )
        return *self.account.metered(asked, reader), reader

    def asked(self, rid: str, prompt: int, max_tokens: int) -> ClientRequest:
        params = SamplingParams(max_new_tokens=max_tokens, seed=0)
        return ClientRequest(rid=rid, model="m", token_ids=(1,) * prompt, params=params)

    @property
    def paid(self) -> float:
        headers = dict(self.quota.headers(0.0))
        return PER_MINUTE - int(headers[b"x-ratelimit-remaining-tokens"])

    @property
    def used(self) -> tuple[int, int, int]:
        tokens = self.counters.tokens
        return tokens["shop", "prompt"], tokens["shop", "cached"], tokens["shop", "completion"]


def test_a_completed_request_is_what_its_answer_says() -> None:
    books = Books()
    account = books.open()
    request, sink, reader = books.submit()
    assert (request.priority, books.paid) == (3, 10)
    sink.tokens((7, 8, 9), ())
    assert books.paid == 13
    sink.ended(RequestCompleted("stop", Usage(10, 5, 4)))  # what the core says counts
    books.accounts.close(account)
    assert (books.used, books.paid) == ((10, 4, 5), 15)
    assert (reader.came, len(reader.ends), len(books.accounts)) == ([7, 8, 9], 1, 0)


def test_first_tokens_that_come_within_a_keys_target_are_met_and_later_ones_missed() -> None:
    books, now = Books(), [0.0]
    books.accounts.now = lambda: now[0]
    key = replace(KEY, ttft_target=2.0)
    for rid, seconds in (("soon", 1.5), ("late", 2.5)):
        books.account = books.accounts.open(rid, key, books.quota)
        request, sink, _ = books.submit(rid)
        now[0] += seconds
        sink.tokens((7,), ())
        now[0] += 10.0
        sink.tokens((8,), ())
        assert request.deadline_seconds == 2.0
    assert books.counters.targets == {("shop", "met"): 1, ("shop", "missed"): 1}


def test_tokens_are_counted_while_they_flow_and_those_of_running_streams_by_key() -> None:
    books = Books()
    account = books.open()
    sinks = [books.submit(rid)[1] for rid in ("r-0", "r-1")]
    assert (books.used, books.accounts.context_of["shop"], books.accounts.open_of["shop"]) == (
        (0, 0, 0),
        0,
        1,
    )
    sinks[0].tokens((1, 2), ())
    sinks[0].tokens((3,), ())
    sinks[1].tokens((4,), ())
    assert (books.used, books.accounts.context_of["shop"]) == ((20, 0, 4), 24)
    sinks[0].ended(RequestCompleted("stop", Usage(10, 3, 4)))
    assert (books.used, books.accounts.context_of["shop"]) == ((20, 4, 4), 11)
    sinks[1].ended(RequestAborted())
    books.accounts.close(account)
    assert (books.accounts.context_of["shop"], books.accounts.open_of["shop"]) == (0, 0)


def test_what_was_not_served_is_given_back_and_not_counted() -> None:
    books = Books()
    books.open()
    books.submit()[1].ended(REFUSED)
    assert (books.used, books.paid) == ((0, 0, 0), 0)


def test_who_hangs_up_pays_for_the_prompt_and_is_counted_what_came() -> None:
    books = Books()
    books.open()
    books.submit("r-0")[1].ended(RequestAborted())
    assert (books.used, books.paid) == ((0, 0, 0), 10)
    sink = books.submit("r-1")[1]
    sink.tokens((1, 2), ())
    sink.ended(RequestAborted())
    assert (books.used, books.paid) == ((10, 0, 2), 22)


def test_an_end_that_is_told_twice_counts_once() -> None:
    books = Books()
    books.open()
    sink, reader = books.submit()[1:]
    sink.tokens((1,), ())
    sink.ended(RequestCompleted("stop", Usage(10, 1, 0)))
    sink.ended(REFUSED)
    assert (books.used, books.paid, len(reader.ends)) == ((10, 0, 1), 11, 2)


def test_siblings_pay_for_their_prompt_once_however_they_end() -> None:
    books = Books()
    books.open()
    sinks = [books.submit(f"r-{index}", sampling_group="r-0")[1] for index in range(3)]
    other = books.submit("r-3", sampling_group="r-3")[1]
    assert books.paid == 20
    for sink in (*sinks, other):
        sink.tokens((1,), ())
    for sink in sinks[:2]:
        sink.ended(RequestAborted())
    sinks[2].ended(RequestCompleted("length", Usage(0, 1, 0)))
    other.ended(RequestCompleted("length", Usage(10, 1, 0)))
    assert (books.used, books.paid) == ((20, 0, 4), 24)


def test_an_answer_may_go_on_after_its_http_request() -> None:
    books = Books()
    account = books.open()
    sink = books.submit()[1]
    books.accounts.close(account)
    sink.tokens((1, 2), ())
    sink.ended(RequestCompleted("stop", Usage(10, 2, 0)))
    assert (books.used, account.open_parts) == ((10, 0, 2), 0)


def test_what_was_reserved_is_paid_from_and_what_is_left_given_back_however_it_ends() -> None:
    books = Books()
    account = books.open()
    requests = [books.asked(f"r-{index}", 10, 300) for index in range(3)]
    account.reserve(requests, 0.0)
    assert books.paid == 3 * (10 + RESERVED_OUTPUT_MAX)
    first, second = (account.metered(request, AnswerReader())[1] for request in requests[:2])
    first.tokens((1,) * 20, ())
    assert books.paid == 3 * (10 + RESERVED_OUTPUT_MAX), "paid from what is reserved"
    first.ended(RequestCompleted("stop", Usage(10, 20, 0)))
    assert books.paid == 10 + 20 + 2 * (10 + RESERVED_OUTPUT_MAX)
    second.tokens((1,) * 300, ())
    assert books.paid == 10 + 20 + 10 + 300 + 10 + RESERVED_OUTPUT_MAX, "beyond it each token is paid"
    second.ended(RequestAborted())
    books.accounts.close(account)  # the third never went to the core
    assert books.paid == 10 + 20 + 10 + 300
    assert books.used == (20, 0, 320)
