"""After everything: nothing is held, nothing is in the log that should not be, and the router is small."""

from __future__ import annotations

import json

import httpx2
import pytest

from tests.abuse.procfs import status_bytes
from tests.abuse.target import MARKER, MIB, AbusedDeployment
from tests.abuse.wire import completion, get, post, talk

ROUTER_MIB = 400


def test_nothing_is_held(target: AbusedDeployment) -> None:
    target.all_home()
    assert target.running.held() == {}


@pytest.mark.aggregated
def test_streams_are_what_they_were_in_the_beginning(target: AbusedDeployment) -> None:
    assert target.stream() == target.undisturbed


def test_no_log_shows_a_bug(target: AbusedDeployment) -> None:
    found = target.bugs()
    assert found == [], f"{len(found)} lines"


def test_no_request_was_answered_with_500(target: AbusedDeployment) -> None:
    assert target.failures() == 0


def test_no_process_ended_by_itself(target: AbusedDeployment) -> None:
    said = [line for line in target.log() if " ended (status " in line]
    drained = [line for line in said if " ended (status 0)" in line]  # the two that a test told to drain
    assert len(said) == len(drained) <= 2


def test_nothing_that_a_client_wrote_is_in_a_record(target: AbusedDeployment) -> None:
    (reply,) = talk(
        target.port, post("/v1/completions", completion(MARKER, max_tokens=32, ignore_eos=True))
    ).replies()
    said = json.loads(reply.body)["choices"][0]["text"]
    records = ["\n".join(target.log())]
    records += [
        httpx2.get(target.admin_url(process, "/metrics")).text for process in target.running.processes()
    ]
    records.append(
        httpx2.get(target.admin_url(target.router(), f"/debug/requests/{reply.headers['x-request-id']}")).text
    )
    assert len(said) > 8
    for record in records:
        assert record
        assert MARKER not in record
        assert said not in record


def test_the_log_was_complete_enough_to_show_it(target: AbusedDeployment) -> None:
    assert len([line for line in target.log() if '"event":"http.request"' in line]) > 1000


def test_the_router_is_small(target: AbusedDeployment) -> None:
    assert status_bytes(target.router().pid, "VmRSS") <= ROUTER_MIB * MIB


def test_the_number_of_metric_series_is_bounded(target: AbusedDeployment) -> None:
    talk(target.port, get(f"/{MARKER}"))  # the first answer of 404 of a router has a series of its own
    series = target.series()
    for k in range(50):
        talk(target.port, get(f"/{MARKER}/{k}"))
    assert target.series() == series
