"""Settings: where they come from, in which order, and how a wrong one is answered."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.config import RouterConfig
from shared.errors import ConfigError
from shared.process.settings import ProcessConfig, description_of, load, schema_of, unknown_variables

ROLES: list[type[ProcessConfig]] = [RouterConfig, PrefillConfig, DecodeConfig]


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "prefill.yaml"
    file.write_text("pages: 10\nslots: 10\nquarantineSeconds: 10\n")
    environ = {"SEGUE_PAGES": "20", "SEGUE_SLOTS": "20"}
    config = load(PrefillConfig, ["--config", str(file), "--pages=30"], environ)
    assert (config.pages, config.slots, config.quarantine_seconds) == (30, 20, 10.0)
    assert config.page_size == 16


@pytest.mark.parametrize("overlap", ["false", "0"])
def test_the_normal_loop_is_a_flag(overlap: str) -> None:
    assert load(DecodeConfig, ["--overlap", overlap], {}).overlap is False


def test_a_list_is_separated_by_commas() -> None:
    config = load(RouterConfig, ["--workers", "prefill=127.0.0.1:1, decode=127.0.0.1:2"], {})
    assert config.workers == ("prefill=127.0.0.1:1", "decode=127.0.0.1:2")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pagess", "3"], ("--pagess", "did you mean --pages?")),
        (["--zzz"], ("--zzz", "--help")),
        (["--page", "3"], ("--page", "did you mean")),
        (["--pages", "many"], ("--pages", "int", "'many'")),
        (["--pages", "-1"], ("--pages", ">= 0", "'-1'")),
        (["--page-size", "2000"], ("--page-size", "<= 1024")),
        (["--silence-seconds", "nan"], ("--silence-seconds", "> 0")),
        (["--device", "tpu"], ("--device", "'tpu'")),
        (["--kv-ports", "all"], ("--kv-ports", "'all'")),
        (["--pages"], ("--pages", "expected one argument")),
        (["more"], ("more",)),
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
        ("pagse: 3", ("'pagse'", "did you mean pages?")),
        ("page_size: 16", ("'page_size'", "did you mean pageSize?")),
        ("pages: '3'", ("pages in", "int")),
        ("pages: -3", ("pages in", ">= 0")),
        ("- pages", ("mapping",)),
        ("pages: [", ("not YAML",)),
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
    environ = {"SEGUE_ROUTER_PORT": "tcp://10.0.0.1:80", "SEGUE_PAGES": "5", "HOME": "/"}
    assert load(DecodeConfig, [], environ).pages == 5
    assert unknown_variables(DecodeConfig, environ) == ["SEGUE_ROUTER_PORT"]


@pytest.mark.parametrize("struct", ROLES)
def test_every_setting_has_a_reason_and_a_place_in_the_schema(struct: type[ProcessConfig]) -> None:
    schema = schema_of(struct)["$defs"][struct.__name__]
    assert schema["additionalProperties"] is False
    for field in msgspec.structs.fields(struct):
        assert description_of(struct, field.name)
        assert field.encode_name in schema["properties"]


@pytest.mark.parametrize("struct", ROLES)
def test_help_names_every_setting(struct: type[ProcessConfig], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load(struct, ["--help"], {})
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all("--" + field.name.replace("_", "-") in shown for field in msgspec.structs.fields(struct))
