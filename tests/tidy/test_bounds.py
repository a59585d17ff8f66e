"""The page of bounds names every bound of the product, and tests that exist."""

from __future__ import annotations

import ast
from dataclasses import fields

import pytest

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.config import RouterConfig
from shared.links.session import LinkSettings
from shared.process.process_config import ProcessConfig
from shared.process.settings import Settings
from shared.worker.worker_config import WorkerConfig
from tests.abuse.bounds.bound import Bound
from tests.tidy.reference import BOUNDS
from tests.tidy.source_files import SourceFile, source_files

ALL = [bound for bounds in BOUNDS.values() for bound in bounds]
NAMED = {(bound.place, bound.name) for bound in ALL}
# `segue up`, the init container and the engine take nothing from strangers or peers.
OTHERS = ("shared/local/", "shared/model_cache/", "shared/engine/", "shared/limits/model_files.py")
NO_BOUNDS_ON_OTHERS = {
    "DOUBLINGS_MAX",  # arithmetic
    "INCOMPLETE_TOKENS_MAX",  # of UTF-8
    "PLACES_MAX", "CAUSE_CHARACTERS_MAX", "BATCH_LINES_MAX",  # the form of log lines
    "IDLE_WAIT_SECONDS_MAX", "WAIT_SECONDS_MAX",  # the own pace
    "LAST_READS_SECONDS_MAX",  # within drain_seconds
    "CELL_WORKERS_MAX",  # how routers divide their own fleet
}  # fmt: skip
OF_THE_LIST = {("router.discovery.slice_api", "CONNECT_SECONDS_MAX")}  # within LIST_SECONDS_MAX


def constants(file: SourceFile) -> set[tuple[str, str]]:
    """Module and name of its constants that are bounds by their name."""
    module = file.path.removesuffix(".py").replace("/", ".")
    targets = (target for node in file.tree.body if isinstance(node, ast.Assign) for target in node.targets)
    names = (target.id for target in targets if isinstance(target, ast.Name))
    return {(module, name) for name in names if name.endswith("_MAX") or name.startswith("MAX_")}


def test_every_constant_that_is_a_bound_is_on_the_page() -> None:
    files = [file for file in source_files() if file.shipped and not file.path.startswith(OTHERS)]
    bounds = {bound for file in files for bound in constants(file) if bound[1] not in NO_BOUNDS_ON_OTHERS}
    assert len(bounds) > 50
    assert bounds - OF_THE_LIST - NAMED == set()


@pytest.mark.parametrize("model", [RouterConfig, ProcessConfig, WorkerConfig, PrefillConfig, DecodeConfig])
def test_every_setting_that_is_a_bound_is_on_the_page(model: type[Settings]) -> None:
    settings = {name for name in model.model_fields if name.endswith("_max") or name.startswith("max_")}
    tuning = {"max_prefill_tokens", "max_total_tokens"}  # what an operator gives to the device …
    tuning |= {"local_tokens_max"}  # … and to a step of it …
    tuning |= {"candidates_max", "cell_workers_max"}  # … and how a router divides and compares its own fleet
    assert settings - tuning - {name for _, name in NAMED} == set()


def test_every_bound_of_links_is_on_the_page() -> None:
    bounds = {field.name for field in fields(LinkSettings) if field.name.endswith("_max")}
    assert bounds - {name for _, name in NAMED} == set()


def test_no_bound_is_named_twice() -> None:
    for bounds in BOUNDS.values():
        assert len({bound.title for bound in bounds}) == len(bounds)
    assert len(NAMED) == len(ALL)


@pytest.mark.parametrize("bound", ALL, ids=lambda bound: bound.title)
def test_the_test_of_a_bound_exists(bound: Bound) -> None:
    path, _, rest = bound.test.partition("::")
    function, _, case = rest.removesuffix("]").partition("[")
    (file,) = [file for file in source_files() if file.path == path]
    assert function in {found.name for found in file.functions()}
    assert f'"{case}"' in file.text or not case
