"""What the router remembers of workers and models, and for how long."""

from __future__ import annotations

import pytest
import structlog

from router.core.fleet import MODELS_MAX, Fleet, Worker
from shared.messages import Limits
from tests.unit.router.deployment import hello


def test_a_model_is_known_before_its_first_worker_and_after_its_last() -> None:
    fleet = Fleet(16, ("named",))
    assert "named" in fleet.models
    fleet.up("p", hello("prefill", "p", model_name="told"))
    fleet.down("p")
    assert fleet.models == ("named", "told")


def test_names_of_gone_models_are_bounded_and_the_configured_one_stays() -> None:
    fleet = Fleet(16, ("named",))
    for number in range(2 * MODELS_MAX):
        fleet.up(f"p{number}", hello("prefill", f"p{number}", model_name=f"m{number}"))
        fleet.down(f"p{number}")
    assert len(fleet.models) <= MODELS_MAX + 1
    assert fleet.models[0] == "named"


def test_context_is_what_the_largest_worker_of_each_role_serves() -> None:
    fleet = Fleet(16)
    assert fleet.context_len("m") is None
    fleet.up("p", hello("prefill", "p", limits=Limits(4096, 16, 10, 4, 100)))
    fleet.up("d0", hello("decode", "d0", limits=Limits(4096, 16, 20, 4, 100)))
    fleet.up("d1", hello("decode", "d1", limits=Limits(4096, 16, 60, 4, 100)))
    assert fleet.context_len("m") == 960, "a decode pool must hold all of a request"
    assert fleet.prompt_len_max("m") == 160, "a prefill pool only its prompt"


def test_a_router_is_no_worker() -> None:
    assert Fleet(16).up("r", hello("router", "r")) == "role"


def test_a_worker_cannot_be_given_the_same_request_twice() -> None:
    fleet = Fleet(16)
    fleet.up("d", hello("decode", "d"))
    (worker,) = fleet.role("decode")
    worker.assign("r", 1, 1)
    with pytest.raises(AssertionError, match="r"):
        worker.assign("r", 1, 1)


def test_whoever_holds_a_worker_sees_that_it_is_down() -> None:
    fleet = Fleet(16)
    fleet.up("d", hello("decode", "d"))
    (worker,) = fleet.role("decode")
    assert fleet.down("d") is worker
    assert not worker.up
    assert fleet.down("d") is None


def test_a_role_without_workers_is_said_once_and_so_is_its_return() -> None:
    fleet = Fleet(100)
    assert fleet.missing == ["prefill", "decode"]
    with structlog.testing.capture_logs() as lines:
        prefill = fleet.up("p0", hello("prefill", "p0"))
        assert isinstance(prefill, Worker)
        assert fleet.missing == ["decode"]
        fleet.up("p1", hello("prefill", "p1"))
        fleet.leave(prefill)
        assert fleet.missing == ["decode"]
        fleet.down("p1")
        assert fleet.missing == ["prefill", "decode"]
        fleet.down("p0")
    assert [(line["log_level"], line["worker_role"]) for line in lines] == [
        ("info", "prefill"),
        ("warning", "prefill"),
    ]
