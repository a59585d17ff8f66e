"""The paper around the code: links that lead somewhere, a licence, types that others may rely on, and what CI runs."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.tidy.source_files import ROOT, source_files

PACKAGES = ("decode", "prefill", "router", "shared")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMED_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def anchors(page: Path) -> set[str]:
    """The names by which a link may reach a heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if link.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_tests_that_pages_name_are_there() -> None:
    tests = {file.path: {found.name for found in file.functions()} for file in source_files()}
    named = [each for page in PAGES for each in NAMED_TEST.findall(page.read_text(encoding="utf-8"))]
    assert len(named) > 20
    assert [each for each in named if each[1] not in {*tests.get(each[0], ()), "NAME"}] == []


def test_gates_that_the_page_of_goals_names_are_there() -> None:
    named = set(re.findall(r"`gate\[(\w+)\]`", (ROOT / "docs/lab/goals.md").read_text(encoding="utf-8")))
    gates = (ROOT / "tests/unit/benchmarks/test_virtual_cluster.py").read_text(encoding="utf-8")
    assert len(named) > 10
    assert [each for each in sorted(named - {"NAME"}) if f'scenario="{each}"' not in gates] == []


def test_pages_that_code_and_scripts_name_are_there() -> None:
    files = [ROOT / "Makefile", *ROOT.glob("images/build"), *ROOT.glob("tests/**/*.py")]
    files += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    own = [line for line in lines if "https://" not in line]
    named = {name for line in own for name in re.findall(r"docs/[\w/-]+\.md", line)}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_each_package_says_that_it_is_typed() -> None:
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").exists()] == []


def test_the_licence_is_the_one_that_the_package_names() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_pipeline_runs_what_a_user_runs() -> None:
    runs = re.findall(r"run: (\.ci/run.*)", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert runs == [".ci/run tests", ".ci/run cluster"]
