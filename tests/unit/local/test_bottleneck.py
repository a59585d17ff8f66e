"""The verdict on pages where a single figure decides; on whole deployments: `tests/unit/benchmarks`."""

from __future__ import annotations

from collections.abc import Mapping
from time import process_time

import pytest

from shared.local.bottleneck import Sample, Scrape, verdict

ROUTER = {"role": "router"}


def page(states: Mapping[str, float], workers: Mapping[str, float], **totals: float) -> Scrape:
    """A router's page: requests by state, workers by role, and totals."""
    samples = [Sample("segue_requests_running", ROUTER | {"state": state}, n) for state, n in states.items()]
    samples += [Sample("segue_workers", ROUTER | {"worker_role": role}, n) for role, n in workers.items()]
    samples += [Sample(name, ROUTER, value) for name, value in totals.items()]
    return Scrape(totals.get("at", 0.0), {"router:8001": samples})


BOTH = {"prefill": 1.0, "decode": 1.0}


def test_without_a_decode_worker_its_replicas_are_to_be_turned() -> None:
    states = {"waiting": 2.0, "ready": 4.0}
    found = verdict(
        page(states, {"prefill": 1.0, "decode": 0.0}), page(states, {"prefill": 1.0, "decode": 0.0}, at=10)
    )
    assert (found.cause, found.turn) == ("decode", "decode.replicas: no decode worker is linked")


def test_without_a_prefill_worker_its_replicas_are_to_be_turned() -> None:
    nobody = {"prefill": 0.0, "decode": 0.0}
    found = verdict(page({"waiting": 5.0}, nobody), page({"waiting": 5.0}, nobody, at=10))
    assert (found.cause, found.turn) == ("prefill", "prefill.replicas: no prefill worker is linked")


def test_a_flooded_tokenizer_is_the_router() -> None:
    one = page({"decoding": 2.0}, BOTH, segue_tokenizing=40)
    two = page(
        {"decoding": 2.0},
        BOTH,
        segue_tokenizing=60,
        at=10,
        segue_itl_seconds_count=400,
        segue_itl_seconds_sum=4,
    )
    assert verdict(one, two).cause == "router"


def test_two_stages_that_hold_up_as_many_are_both_named() -> None:
    states = {"waiting": 0.0, "decoding": 10.0}
    one = page(states, BOTH, segue_tokenizing=7)
    two = page(states, BOTH, segue_tokenizing=7, at=10, segue_itl_seconds_count=100, segue_itl_seconds_sum=40)
    found = verdict(one, two)
    assert (found.cause, set(found.candidates)) == ("not clear", {"decode", "router"})


def test_a_key_at_its_own_limit_is_the_tenant_while_the_fleet_has_room() -> None:
    def keyed(served: float, refused: float, at: float) -> Scrape:
        scrape = page({"decoding": 1.0}, BOTH, at=at)
        labels = ROUTER | {"key": "shop"}
        mine = [
            Sample("segue_key_requests_total", labels | {"outcome": "served"}, served),
            Sample("segue_key_requests_total", labels | {"outcome": "tpm"}, refused),
            Sample("segue_itl_seconds_count", ROUTER, 100 * at),
            Sample("segue_itl_seconds_sum", ROUTER, at),
        ]
        return Scrape(at, {"router:8001": [*scrape.processes["router:8001"], *mine]})

    found = verdict(keyed(10, 0, 0), keyed(30, 20, 10))
    assert (found.cause, found.turn) == ("tenant", "the line of shop in the file of API keys: tpm=N")


def test_many_keys_are_judged_with_one_look_at_each_sample() -> None:
    """10,000 keys: looking at all samples for each would take minutes."""

    def keyed(at: float) -> Scrape:
        scrape = page(
            {"decoding": 1.0}, BOTH, at=at, segue_itl_seconds_count=100 * at, segue_itl_seconds_sum=at
        )
        many = [
            Sample("segue_key_requests_total", ROUTER | {"key": f"k{number}", "outcome": outcome}, at * value)
            for number in range(10_000)
            for outcome, value in (("served", 1.0), ("tpm", float(number == 9_999)))
        ]
        return Scrape(at, {"router:8001": [*scrape.processes["router:8001"], *many]})

    began = process_time()
    found = verdict(keyed(0), keyed(10))
    assert found.turn == "the line of k9999 in the file of API keys: tpm=N"
    assert process_time() - began < 20


def test_a_process_that_has_begun_anew_counts_nothing_backwards() -> None:
    one = page({"decoding": 1.0}, BOTH, segue_itl_seconds_count=10_000, segue_itl_seconds_sum=900)
    two = page({"decoding": 1.0}, BOTH, at=10, segue_itl_seconds_count=500, segue_itl_seconds_sum=5)
    assert verdict(one, two).figures  # no division by what is negative


def test_workers_without_a_router_are_no_deployment() -> None:
    lonely = Scrape(0.0, {"decode:8001": [Sample("segue_slots_used", {"role": "decode"}, 1.0)]})
    with pytest.raises(ValueError, match="no router is among"):
        verdict(lonely, Scrape(10.0, lonely.processes))
