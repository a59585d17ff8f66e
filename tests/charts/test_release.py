"""One version everywhere, the changelog's word on each value that has gone, and images that cannot be last month's."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from shared.primitives.version import VERSION
from tests.charts.released_values import taken_by_the_last_release, taken_now, values_of
from tests.charts.rendering import CHART, ROOT, Object, objects, pods

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
DIGEST = f"sha256:{'0' * 64}"


def section(heading: str) -> str:
    """The changelog under the newest heading of this text, up to the next of its level."""
    level = heading.partition(" ")[0]
    found = re.search(
        rf"^{re.escape(heading)}.*?(?=^#{{1,{len(level)}}} |\Z)", CHANGELOG, re.MULTILINE | re.DOTALL
    )
    assert found is not None, f"CHANGELOG.md has no part {heading}"
    return found[0]


def test_chart_app_and_changelog_are_of_the_version_of_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    number, developed, _ = VERSION.partition(".dev")
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", VERSION)
    assert chart["version"] == chart["appVersion"] == (f"{number}-dev" if developed else number)
    newest = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)[0]
    assert newest == "Unreleased" if developed else newest.startswith(f"{number} (20")


def test_a_tree_between_releases_has_a_tag_of_its_own() -> None:
    tag = subprocess.run([ROOT / "images" / "tag"], capture_output=True, text=True, check=True).stdout.strip()
    number = re.escape(VERSION.partition(".dev")[0])
    assert re.fullmatch(rf"{number}-dev\.t[0-9a-f]{{12}}", tag) or tag == VERSION


def test_each_value_that_has_gone_since_the_last_release_has_its_line_under_upgrading() -> None:
    told = section("### Upgrading")
    gone = taken_by_the_last_release() - taken_now()
    assert [value for value in sorted(gone) if f"`{value.replace('=', ': ')}`" not in told] == []


def test_a_value_that_is_only_refused_and_a_word_that_has_gone_count_as_gone() -> None:
    old = {"properties": {"a": {"enum": ["x", "y"]}, "b": {}, "c": {"$ref": "#/definitions/d"}}}
    new = {"properties": {"a": {"then": {"enum": ["x"]}}, "b": {"deprecated": True}, "c": {}}}
    definitions: dict[str, Object] = {"d": {"properties": {"e": {}}}}
    before, after = (values_of({**schema, "definitions": definitions}) for schema in (old, new))
    assert before - after == {"a=y", "b", "c.e"}


@pytest.mark.parametrize(
    ("sets", "policy"),
    [
        ((), "IfNotPresent"),  # registry localhost: somebody has loaded them
        (("image.registry=registry.example.com",), "Always"),
        (("image.registry=",), "Always"),
        (("image.registry=registry.example.com", "image.tag=2026-11"), "Always"),
        (("image.registry=registry.example.com", "image.pullPolicy=Never"), "Never"),
        (("image.registry=localhost", "image.pullPolicy=Always"), "Always"),
    ],
)
def test_a_tag_in_a_registry_is_asked_for_anew(sets: tuple[str, ...], policy: str) -> None:
    assert policies(objects(None, *sets)) == {policy}


def test_a_digest_is_kept_by_nodes() -> None:
    digests = [f"{image}.digest={DIGEST}" for image in ("router.image", "worker.image", "modelSource.image")]
    assert policies(objects(None, "image.registry=registry.example.com", *digests)) == {"IfNotPresent"}


def test_a_models_image_may_have_a_policy_of_its_own() -> None:
    sets = (
        "image.registry=registry.example.com",
        "image.pullPolicy=Always",
        "modelSource.image.pullPolicy=Never",
    )
    specs = {
        role: pod["spec"]
        for role, pod in pods(objects(None, *sets)).items()
        if "initContainers" in pod["spec"]
    }
    assert specs.keys() == {"router", "prefill", "decode"}
    for spec in specs.values():
        assert spec["initContainers"][0]["imagePullPolicy"] == "Never"
        assert spec["containers"][0]["imagePullPolicy"] == "Always"
    volumes = pods(objects("image-volume", "modelSource.image.pullPolicy=Never"))["decode"]["spec"]["volumes"]
    assert [each["image"]["pullPolicy"] for each in volumes if each["name"] == "model"] == ["Never"]


def policies(rendered: list[Object]) -> set[str]:
    """The pull policies of all containers of all roles."""
    specs = [pod["spec"] for pod in pods(rendered).values()]
    return {
        each["imagePullPolicy"]
        for spec in specs
        for each in spec["containers"] + spec.get("initContainers", [])
    }


def test_the_test_pods_ask_for_their_image_as_routers_do() -> None:
    rendered = objects(None, "image.registry=registry.example.com")
    tests = [each for each in rendered if each["kind"] == "Pod"]
    assert {each["spec"]["containers"][0]["imagePullPolicy"] for each in tests} == {"Always"}
