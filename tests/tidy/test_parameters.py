"""A function of the engine takes few values: what belongs together is one value with a name."""

from __future__ import annotations

import ast

from tests.tidy.source_files import source_files

PARAMETERS_MAX = 6  # but self and cls
ARGUMENTS_OF_A_KERNEL = "prepare_decode"  # the arrays that `step_kernels.cu` reads and writes, one by one


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of all kinds, but self and cls."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return (
        len([name for name in names if name not in ("self", "cls")]) + bool(given.vararg) + bool(given.kwarg)
    )


def test_no_function_of_the_engine_has_more_than_six_parameters() -> None:
    many = {
        (file.path.removeprefix("shared/engine/"), function.name): count
        for file in source_files()
        if file.path.startswith("shared/engine/")
        for function in file.functions()
        if (count := parameters(function)) > PARAMETERS_MAX
    }
    assert many == {("cuda/kernels/step_kernels.py", ARGUMENTS_OF_A_KERNEL): 9}


def test_parameters_of_all_kinds_are_counted() -> None:
    [function] = ast.parse("def f(self, a, /, b, *c, d=1, e, **g): pass").body
    assert isinstance(function, ast.FunctionDef)
    assert parameters(function) == 6
