"""How the code is written, as far as a test can say it: sizes, names, and what is not done at all."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess

import pytest

from tests.tidy.source_files import ROLES, ROOT, source_files

FILE_LINES_MAX = 600  # above that a file has more than one idea; 250 are normal
FUNCTION_LINES_MAX = 60
VAGUE = ("utils", "util", "common", "helpers", "helper", "base", "manager", "misc", "stuff")


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the `def` to the end."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_the_project_is_seen() -> None:
    seen = {file.path for file in source_files()}
    assert seen >= {
        "shared/scheduling/event_loop.py",
        "decode/scheduler.py",
        "prefill/scheduler.py",
        "router/core/requests/lifecycle.py",
    }


def test_the_first_level_has_the_rooms_that_are_agreed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {path.split("/")[0] for path in listed.splitlines() if "/" in path}
    rooms = {"charts", "decode", "docs", "images", "prefill", "router", "shared", "tests"}
    assert folders == rooms | {".ci", ".github"}


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {file.path: len(file.text.splitlines()) for file in source_files()}
    assert {path: lines for path, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


def test_no_function_is_longer_than_60_lines_and_most_are_short() -> None:
    lengths = {
        f"{file.path}:{function.name}": length(function)
        for file in source_files()
        for function in file.functions()
    }
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES_MAX} == {}
    assert statistics.median(lengths.values()) < 10


def test_every_file_opens_with_its_purpose() -> None:
    silent = [file.path for file in source_files() if file.tree.body and not ast.get_docstring(file.tree)]
    assert silent == []


def test_every_folder_is_a_package() -> None:
    folders = {file.path.rpartition("/")[0] for file in source_files()}
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()] == []


def test_names_say_what_the_thing_is() -> None:
    def words(name: str) -> set[str]:
        return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+", name)}

    files = [file.path for file in source_files() if words(file.path.rpartition("/")[2][:-3]) & set(VAGUE)]
    classes = [
        f"{file.path}:{node.name}"
        for file in source_files()
        for node in file.classes()
        if words(node.name) & set(VAGUE)
    ]
    assert files + classes == []


def test_a_class_name_means_one_thing_in_the_whole_product() -> None:
    homes: dict[str, list[str]] = {}
    for file in (file for file in source_files() if file.shipped):
        for node in file.classes():
            homes.setdefault(node.name, []).append(file.path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_docstring_reads_right_without_its_file() -> None:
    """A docstring begins with a verb or with the noun that is returned, not with a word for something above."""
    pointing = re.compile(r"(It|Its|These|Those|They|Of|The same|Nobody)\b")
    documented = [
        (f"{file.path}:{node.body[0].lineno}", ast.get_docstring(node) or "")
        for file in source_files()
        if file.shipped
        for node in file.nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body
    ]
    assert len(documented) > 1000
    assert [(place, text.partition("\n")[0]) for place, text in documented if pointing.match(text)] == []


def test_every_log_line_is_an_area_and_an_event() -> None:
    written = {
        (file.path, call.args[0].value)
        for file in source_files()
        if file.shipped
        for call in file.nodes
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant)
        if re.fullmatch(r"log\.[a-z]+|Note", ast.unparse(call.func))
    }
    assert len(written) > 30
    assert [line for line in written if not re.fullmatch(r"[a-z_]+\.[a-z_]+", str(line[1]))] == []


@pytest.mark.parametrize("module", ["pickle", "marshal", "shelve", "unittest.mock"])
def test_nobody_imports(module: str) -> None:
    assert [file.path for file in source_files() if module in set(file.imports())] == []


def test_nobody_sleeps_in_a_test() -> None:
    calls = re.compile(r"\b(time|asyncio)\.sleep[(](?!0[)])|from time import .*\bsleep\b")
    assert [file.path for file in source_files() if not file.shipped and calls.search(file.text)] == []


def test_nobody_prints_in_production() -> None:
    printing = [
        f"{file.path}:{node.lineno}"
        for file in source_files()
        if file.shipped
        for node in file.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


def test_no_code_decides_by_role() -> None:
    branch = re.compile(rf"\bif\b[^\n]*\brole\s*(==|!=|in\b)[^\n]*({'|'.join(ROLES)})")
    inside = (
        "shared/kv/",
        "shared/scheduling/",
        "prefill/",
        "decode/",
    )
    deciding = [
        file.path for file in source_files() if file.path.startswith(inside) and branch.search(file.text)
    ]
    assert deciding == []
