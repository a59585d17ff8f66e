"""What an API key has left at a router, in virtual time."""

from __future__ import annotations

from router.access.quotas import Quotas
from shared.process.api_keys import ApiKey

KEY = ApiKey("shop", b"", rpm=60, tpm=600, concurrent=4)


class Clients:
    """The holders of some keys, and the routers they share."""

    def __init__(self, routers: int = 1):
        self.routers = routers
        self.valid = {"shop"}
        self.quotas = Quotas(lambda: self.routers, lambda: self.valid)

    def enter(self, now: float, key: ApiKey = KEY) -> str:
        """`in`, or which limit was met."""
        refusal = self.quotas.of(key, now).enter(now)
        return refusal.limit if refusal else "in"

    def leave(self, now: float, key: ApiKey = KEY) -> None:
        self.quotas.of(key, now).leave()

    def enter_and_leave(self, now: float, key: ApiKey = KEY) -> str:
        met = self.enter(now, key)
        if met == "in":
            self.leave(now, key)
        return met

    def served(self, times: int, now: float, key: ApiKey = KEY) -> int:
        return [self.enter_and_leave(now, key) for _ in range(times)].count("in")

    def headers(self, now: float, key: ApiKey = KEY) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.quotas.of(key, now).headers(now)}


def test_a_minutes_requests_may_come_at_once_and_flow_back_steadily() -> None:
    clients = Clients()
    assert clients.served(100, 0.0) == 60
    assert clients.enter_and_leave(0.5) == "rpm"
    assert clients.served(100, 10.0) == 10
    assert clients.served(100, 1000.0) == 60


def test_tokens_are_paid_when_they_are_known_and_a_debt_is_waited_for() -> None:
    clients = Clients()
    quota = clients.quotas.of(KEY, 0.0)
    quota.spend(599, 0.0)
    assert clients.enter_and_leave(0.0) == "in"
    quota.spend(301, 0.0)  # 300 below zero: 30 seconds, and one token more
    assert clients.enter_and_leave(30.0) == "tpm"
    refusal = quota.enter(0.0 + 30.0)
    assert refusal is not None
    assert 0 < (refusal.seconds or 0) <= 0.1
    assert clients.enter_and_leave(30.2) == "in"


def test_what_a_refused_request_would_have_cost_is_not_taken() -> None:
    clients = Clients()
    clients.quotas.of(KEY, 0.0).spend(600, 0.0)
    assert clients.served(100, 0.0) == 0
    assert clients.headers(0.0)["x-ratelimit-remaining-requests"] == "60"


def test_no_more_run_at_a_time_than_may() -> None:
    clients = Clients()
    assert [clients.enter(0.0) for _ in range(5)] == ["in", "in", "in", "in", "concurrent"]
    clients.leave(0.0)
    assert [clients.enter(0.0) for _ in range(2)] == ["in", "concurrent"]


def test_ready_routers_share_the_limits_and_what_is_left_follows_their_number() -> None:
    clients = Clients(routers=3)
    assert clients.served(100, 0.0) == 20
    assert [clients.enter(60.0) for _ in range(3)] == ["in", "in", "concurrent"]  # 4 / 3, rounded up
    clients.leave(60.0)
    clients.leave(60.0)
    clients.routers = 1
    assert clients.served(100, 60.0) == 18  # nothing is given for the past
    assert clients.served(100, 120.0) == 60
    clients.routers = 0  # a router that does not see itself
    assert clients.served(100, 180.0) == 60


def test_a_limit_smaller_than_the_routers_is_one_at_each() -> None:
    clients, single = Clients(routers=5), ApiKey("shop", b"", rpm=1, concurrent=1)
    assert clients.served(3, 0.0, single) == 1
    assert clients.served(3, 61.0, single) == 1


def test_headers_say_what_is_left_of_what_is_limited() -> None:
    clients = Clients()
    clients.enter_and_leave(0.0)
    clients.quotas.of(KEY, 0.0).spend(900, 0.0)
    assert clients.headers(0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "90.000s",
    }
    assert clients.headers(0.0, ApiKey("free", b"")) == {}


def test_new_limits_count_at_once_and_keep_what_was_used() -> None:
    clients = Clients()
    assert clients.served(50, 0.0) == 50
    tighter = ApiKey("shop", b"", rpm=6)
    assert clients.served(100, 0.0, tighter) == 6
    assert clients.served(100, 0.0, ApiKey("shop", b"")) == 100


def test_quotas_of_names_that_are_gone_are_forgotten_but_not_while_they_run() -> None:
    clients = Clients()
    clients.valid = {f"key-{number}" for number in range(100)}
    keys = [ApiKey(name, b"", rpm=1) for name in sorted(clients.valid)]
    for key in keys:
        clients.enter_and_leave(0.0, key)
    clients.enter(60.0, keys[0])
    assert len(clients.quotas) == 100
    clients.valid = {"shop"}
    clients.enter_and_leave(60.0)
    assert len(clients.quotas) == 2
    clients.leave(60.0, keys[0])


def test_what_is_reserved_is_there_for_nobody_else_until_it_is_given_back() -> None:
    clients = Clients()
    quota = clients.quotas.of(KEY, 0.0)
    assert clients.enter(0.0) == "in"
    assert quota.reserve(500, 1, 0.0) is None
    assert clients.headers(0.0)["x-ratelimit-remaining-tokens"] == "100"
    assert clients.enter(0.0) == "in"
    refusal = quota.reserve(200, 1, 0.0)
    assert refusal is not None
    assert (refusal.limit, refusal.never, refusal.seconds) == ("tpm", False, 10.0)
    quota.spend(-400, 0.0)
    assert quota.reserve(200, 1, 0.0) is None


def test_one_request_that_needs_more_than_a_minutes_tokens_waits_for_all_of_them() -> None:
    clients = Clients()
    quota = clients.quotas.of(KEY, 0.0)
    assert clients.enter(0.0) == "in"
    assert quota.reserve(2000, 1, 0.0) is None
    assert clients.enter(60.0) == "tpm"
    assert clients.enter(199.9) == "in"
    refusal = quota.reserve(2000, 1, 199.9)
    assert refusal is not None
    assert not refusal.never
    assert quota.reserve(2000, 1, 200.1) is None


def test_the_answers_of_a_request_that_is_refused_do_not_run() -> None:
    clients = Clients()
    quota = clients.quotas.of(KEY, 0.0)
    assert clients.enter(0.0) == "in"
    assert quota.reserve(10, 3, 0.0) is None
    assert clients.enter(0.0) == "in"
    refusal = quota.reserve(10, 2, 0.0)
    assert refusal is not None
    assert (refusal.limit, refusal.never) == ("concurrent", False)
    assert quota.running == 4
    quota.leave(1)
    quota.leave(3)
    assert quota.running == 0
