"""Every name that was given up is refused wherever it can be written, in a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic.alias_generators import to_camel

from shared.local.config import ROLE_CONFIGS, load_local
from shared.primitives.errors import ConfigError
from shared.process import settings
from shared.process.process_config import ProcessConfig
from shared.process.settings import flag_of, load, unknown_variables, variable_of
from shared.wire.messages import Role

ROLE_NAMES = [
    (role, old, new)
    for old, new in settings.FORMER_SETTINGS.items()
    for role, model in ROLE_CONFIGS.items()
    if new in model.model_fields
]
ROLE_VALUES = [
    (role, name, old, new)
    for name, renamed in settings.FORMER_VALUES.items()
    for old, new in renamed.items()
    for role, model in ROLE_CONFIGS.items()
    if name in model.model_fields
]


ROLE_GONE = [
    (role, old, why)
    for old, (beside, why) in settings.GONE_SETTINGS.items()
    for role, model in ROLE_CONFIGS.items()
    if beside in model.model_fields
]


def refusal(
    model: type[ProcessConfig], argv: Sequence[str] = (), variable: tuple[str, str] = ("HOME", "/")
) -> str:
    """The sentence with which a process refuses to start."""
    with pytest.raises(ConfigError) as refused:
        load(model, argv, dict([variable]))
    return str(refused.value)


def refusal_of_up(argv: Sequence[str] = (), variable: tuple[str, str] = ("HOME", "/")) -> str:
    """The sentence with which `segue up` refuses to start."""
    with pytest.raises(ConfigError) as refused:
        load_local(argv, dict([variable]))
    return str(refused.value)


def test_every_entry_is_of_a_setting_that_some_process_has() -> None:
    assert {old for _, old, _ in ROLE_NAMES} == set(settings.FORMER_SETTINGS)
    assert {old for _, old, _ in ROLE_GONE} == set(settings.GONE_SETTINGS)
    assert {(name, old) for _, name, old, _ in ROLE_VALUES} == {
        (name, old) for name, renamed in settings.FORMER_VALUES.items() for old in renamed
    }
    fields = {name for model in ROLE_CONFIGS.values() for name in model.model_fields}
    assert not fields & {*settings.FORMER_SETTINGS, *settings.GONE_SETTINGS}, "an old name is free"


@pytest.mark.parametrize(("role", "old", "new"), ROLE_NAMES)
def test_an_old_name_is_refused_as_flag_and_variable_and_in_the_file(
    role: Role, old: str, new: str, tmp_path: Path
) -> None:
    model, file = ROLE_CONFIGS[role], tmp_path / "role.yaml"
    sentence = f"{flag_of(old)} is called {flag_of(new)} now"
    assert refusal(model, [flag_of(old), "3"]) == sentence
    assert refusal(model, [f"{flag_of(old)}=3"]) == sentence
    sentence = f"{variable_of(old)} is called {variable_of(new)} now"
    assert refusal(model, variable=(variable_of(old), "3")) == sentence
    file.write_text(f"{to_camel(old)}: 3\n")
    sentence = f"{to_camel(old)} in {file} is called {to_camel(new)} now"
    assert refusal(model, ["--config", str(file)]) == sentence


@pytest.mark.parametrize(("role", "old", "why"), ROLE_GONE)
def test_what_has_gone_is_refused_as_flag_and_variable_and_in_files(
    role: Role, old: str, why: str, tmp_path: Path
) -> None:
    model, file = ROLE_CONFIGS[role], tmp_path / "role.yaml"
    assert (
        refusal(model, [flag_of(old), "3"]) == refusal_of_up([flag_of(old), "3"]) == f"{flag_of(old)} {why}"
    )
    variable = (variable_of(old), "3")
    assert (
        refusal(model, variable=variable) == refusal_of_up(variable=variable) == f"{variable_of(old)} {why}"
    )
    file.write_text(f"{to_camel(old)}: 3\n")
    assert refusal(model, ["--config", str(file)]) == f"{to_camel(old)} in {file} {why}"
    file.write_text(f"{role}: {{config: {{{to_camel(old)}: 3}}}}")
    assert refusal_of_up(["--config", str(file)]).endswith(f"{file} {why}")


@pytest.mark.parametrize(("role", "name", "old", "new"), ROLE_VALUES)
def test_an_old_value_is_refused_as_flag_and_variable_and_in_the_file(
    role: Role, name: str, old: str, new: str, tmp_path: Path
) -> None:
    model, file = ROLE_CONFIGS[role], tmp_path / "role.yaml"
    assert refusal(model, [flag_of(name), old]) == f"{flag_of(name)} {old} is called {new} now"
    sentence = f"{variable_of(name)} {old} is called {new} now"
    assert refusal(model, variable=(variable_of(name), old)) == sentence
    file.write_text(f"{to_camel(name)}: {old}\n")
    sentence = f"{to_camel(name)} {old} in {file} is called {new} now"
    assert refusal(model, ["--config", str(file)]) == sentence
    assert getattr(load(model, [flag_of(name), new], {}), name) == new


@pytest.mark.parametrize(("role", "old", "new"), ROLE_NAMES)
@pytest.mark.parametrize(
    "section", ["{}: {{config: {{{}: 3}}}}", "{}: {{{}: 3}}"], ids=["config", "misplaced"]
)
def test_segue_up_refuses_an_old_name(section: str, role: Role, old: str, new: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    assert refusal_of_up([flag_of(old), "3"]) == f"{flag_of(old)} is called {flag_of(new)} now"
    sentence = f"{variable_of(old)} is called {variable_of(new)} now"
    assert refusal_of_up(variable=(variable_of(old), "3")) == sentence
    file.write_text(section.format(role, to_camel(old)))
    told = refusal_of_up(["--config", str(file)])
    assert told.startswith(f"{to_camel(old)} in {role}")
    assert told.endswith(f"{file} is called {to_camel(new)} now")


@pytest.mark.parametrize(("role", "name", "old", "new"), ROLE_VALUES)
def test_segue_up_refuses_an_old_value(role: Role, name: str, old: str, new: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    assert refusal_of_up([flag_of(name), old]) == f"{flag_of(name)} {old} is called {new} now"
    assert (
        refusal_of_up(variable=(variable_of(name), old)) == f"{variable_of(name)} {old} is called {new} now"
    )
    file.write_text(f"{role}: {{config: {{{to_camel(name)}: {old}}}}}")
    sentence = f"{to_camel(name)} {old} in {role}.config of {file} is called {new} now"
    assert refusal_of_up(["--config", str(file)]) == sentence


@pytest.mark.parametrize("old", settings.FORMER_SETTINGS)
def test_a_process_without_the_setting_only_warns_of_the_variable(old: str) -> None:
    """All pods of a node may share an environment."""
    for model in ROLE_CONFIGS.values():
        if settings.FORMER_SETTINGS[old] not in model.model_fields:
            environ = {variable_of(old): "3"}
            load(model, [], environ)
            assert unknown_variables(model, environ) == [variable_of(old)]
