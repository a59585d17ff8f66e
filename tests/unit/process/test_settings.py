"""Settings: where they come from, in which order, and how a wrong one is answered."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic.alias_generators import to_camel

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.config import RouterConfig
from router.placement_policies import POLICIES
from shared.kv.radix_cache import EVICTION_POLICIES
from shared.local.config import ROLE_CONFIGS, LocalConfig, load_local
from shared.primitives.errors import ConfigError
from shared.process import settings
from shared.process.process_config import ProcessConfig
from shared.process.settings import (
    Settings,
    flag_of,
    groups_of,
    load,
    schema_of,
    unknown_variables,
    variable_of,
)
from shared.scheduling.queue_policy import QUEUE_POLICIES
from shared.wire.messages import Role

ROLES = list(ROLE_CONFIGS.values())


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "prefill.yaml"
    file.write_text("kvPages: 10\nmaxRunningRequests: 10\nquarantineSeconds: 9\n")
    environ = {"SEGUE_KV_PAGES": "20", "SEGUE_MAX_RUNNING_REQUESTS": "20"}
    config = load(PrefillConfig, ["--config", str(file), "--kv-pages=30"], environ)
    assert (config.kv_pages, config.max_running_requests, config.quarantine_seconds) == (30, 20, 9.0)
    assert config.page_size == 16


def test_a_config_made_in_code_reads_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEGUE_KV_PAGES", "5")
    assert DecodeConfig().kv_pages == 0


@pytest.mark.parametrize("overlap", ["false", "0"])
def test_the_normal_loop_is_a_flag(overlap: str) -> None:
    assert load(DecodeConfig, ["--overlap", overlap], {}).overlap is False


def test_a_list_is_separated_by_commas() -> None:
    config = load(RouterConfig, ["--workers", "prefill=127.0.0.1:1, decode=127.0.0.1:2"], {})
    assert config.workers == ("prefill=127.0.0.1:1", "decode=127.0.0.1:2")
    config = load(RouterConfig, [], {"SEGUE_WORKERS": "prefill=[::1]:1,decode=[::1]:2"})
    assert config.workers == ("prefill=[::1]:1", "decode=[::1]:2")


def test_a_repeated_list_grows_and_of_another_flag_the_last_one_counts() -> None:
    flags = ["--workers", "prefill=a:1,prefill=b:1", "--workers=decode=c:1", "--port", "1", "--port", "2"]
    config = load(RouterConfig, flags, {})
    assert (config.workers, config.port) == (("prefill=a:1", "prefill=b:1", "decode=c:1"), 2)


def test_a_list_in_the_file_is_a_list(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("workers: [prefill=a:1, decode=b:2]\n")
    assert load(RouterConfig, ["--config", str(file)], {}).workers == ("prefill=a:1", "decode=b:2")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-pages", "two"], ("--kv-pages should be a valid integer, got 'two'",)),
        (["--kv-pagess", "3"], ("--kv-pagess", "did you mean --kv-pages?")),
        (["--zzz"], ("--zzz", "--help")),
        (["--page", "3"], ("--page", "did you mean")),
        (["--kv-pages", "many"], ("--kv-pages should be a valid integer", "'many'")),
        (["--kv-pages", "-1"], ("--kv-pages should be greater than or equal to 0", "'-1'")),
        (["--page-size", "2000"], ("--page-size should be less than or equal to 1024",)),
        (["--silence-seconds", "nan"], ("--silence-seconds", "'nan'")),
        (["--device", "tpu"], ("--device should be 'auto', 'cpu', 'cuda' or 'cuda-on-cpu'", "'tpu'")),
        (["--kv-ports", "all"], ("--kv-ports", "'all'")),
        (["--overlap", "perhaps"], ("--overlap should be a valid boolean", "'perhaps'")),
        (["--kv-pages"], ("--kv-pages", "expected one argument")),
        (["more"], ("unknown argument more",)),
    ],
)
def test_a_wrong_flag_is_one_sentence_that_names_it(argv: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(DecodeConfig, argv, {})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("kvPagse: 3", ("'kvPagse'", "did you mean kvPages?")),
        ("page_size: 16", ("'page_size'", "did you mean pageSize?")),
        ("kvPages: '3'", ("kvPages in", "integer")),
        ("kvPages: -3", ("kvPages in", "greater than or equal to 0")),
        ("- kvPages", ("mapping",)),
        ("overlap: 1", ("overlap in", "boolean")),
        ("kvPages: 2020-01-01", ("kvPages in", "integer")),
        ("7: 3", ("unknown setting 7",)),
        ("uid: {2020-01-01: 1}", ("no setting can have",)),
        ("uid: &itself [*itself]", ("no setting can have",)),
        ("kvPages: [", ("not YAML",)),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_the_key(
    tmp_path: Path, content: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(DecodeConfig, ["--config", str(file)], {})
    assert all(word in str(caught.value) for word in (*words, "wrong.yaml")), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/x\.yaml: No such file"):
        load(DecodeConfig, ["--config", "/nowhere/x.yaml"], {})


def test_an_unknown_variable_is_no_error_but_known_to_be_unknown() -> None:
    environ = {"SEGUE_ROUTER_PORT": "tcp://10.0.0.1:80", "SEGUE_KV_PAGES": "5", "HOME": "/"}
    assert load(DecodeConfig, [], environ).kv_pages == 5
    assert unknown_variables(DecodeConfig, environ) == ["SEGUE_ROUTER_PORT"]


def test_variables_are_in_capitals_as_they_are_written_here() -> None:
    environ = {"SEGUE_UID": "decode-0", "segue_uid": "somebody else's", "Segue_Host": "0.0.0.0"}
    config = load(DecodeConfig, [], environ)
    assert (config.uid, config.host) == ("decode-0", "127.0.0.1")


@pytest.mark.parametrize("text", ["None", "null", "[a]", '{"a": 1}', '"quoted"', "a,b", "007"])
def test_a_text_is_taken_as_it_is_written(text: str) -> None:
    assert load(DecodeConfig, ["--uid", text], {}).uid == text
    assert load(DecodeConfig, [], {"SEGUE_UID": text}).uid == text


def test_choices_are_what_is_implemented() -> None:
    def choices(model: type[ProcessConfig], setting: str) -> set[str]:
        return set(schema_of(model)["properties"][setting]["enum"])

    assert choices(PrefillConfig, "queuePolicy") == set(QUEUE_POLICIES)
    assert choices(DecodeConfig, "radixEvictionPolicy") == set(EVICTION_POLICIES)
    assert choices(RouterConfig, "prefillPolicy") == choices(RouterConfig, "decodePolicy")
    assert choices(RouterConfig, "prefillPolicy") == set(POLICIES)


@pytest.mark.parametrize("model", ROLES)
def test_every_setting_has_a_description_and_a_place_in_the_schema(model: type[ProcessConfig]) -> None:
    schema = schema_of(model)
    assert schema["additionalProperties"] is False
    for name in model.model_fields:
        described = schema["properties"][to_camel(name)]
        assert described["description"].endswith(".")
        assert "default" in described


@pytest.mark.parametrize("model", ROLES)
def test_help_names_every_setting(model: type[ProcessConfig], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load(model, ["--help"], {})
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in shown for name in model.model_fields)
    assert "tuple" not in shown
    places = [shown.index(f"\n{title}:\n") for title in groups_of(model)]
    assert shown.index("\nadvanced:\n") == max(places)


@pytest.mark.parametrize("model", [LocalConfig, *ROLES])
def test_every_setting_is_in_one_group(model: type[Settings]) -> None:
    grouped = [name for names in groups_of(model).values() for name in names]
    assert sorted(grouped) == sorted(model.model_fields)


@pytest.mark.parametrize("role", ROLE_CONFIGS)
def test_help_and_a_wrong_flag_are_answered_without_what_is_heavy(role: str) -> None:
    code = f"""
import runpy, sys
sys.argv = ["{role}/__main__.py", "--help"]
try:
    runpy.run_module("{role}", run_name="__main__", alter_sys=False)
finally:
    heavy = sorted({{"torch", "nixl", "transformers", "fastapi", "numpy"}} & set(sys.modules))
    sys.stderr.write(f"loaded {{heavy}}")
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stderr) == (0, "loaded []")


# ---- every name that was given up is refused wherever it can be written, in a sentence that says what to do ----------


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
