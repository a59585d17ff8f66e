"""The page of bounds names every bound of the router, and tests that exist."""

from __future__ import annotations

import pytest

from router.config import RouterConfig
from tests.abuse.bounds import BOUNDS, Bound
from tests.tidy.source_files import source_files


def test_every_bound_of_the_router_is_on_the_page() -> None:
    named = {bound.name for bound in BOUNDS if not bound.place}
    settings = {name for name in RouterConfig.model_fields if name.endswith("_max")}
    inherited = {"loop_seconds_max", "step_seconds_max"}  # of every process
    assert settings - inherited - named == set()


def test_no_bound_is_named_twice() -> None:
    assert len({bound.title for bound in BOUNDS}) == len(BOUNDS)


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.title)
def test_the_test_of_a_bound_exists(bound: Bound) -> None:
    path, _, rest = bound.test.partition("::")
    function, _, case = rest.removesuffix("]").partition("[")
    (file,) = [file for file in source_files() if file.path == path]
    assert function in {found.name for found in file.functions()}
    assert f'"{case}"' in file.text or not case
