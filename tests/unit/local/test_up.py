"""What `segue up` says before any process runs, and what it makes of a file in the chart's shape."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from pathlib import Path

import pytest
import yaml

from router.config import RouterConfig
from shared.engine.checkpoint.model_impl import read_config
from shared.engine.config import Budget
from shared.local.config import ROLE_CONFIGS, LocalSettings, environment_of, load_local, unknown_everywhere
from shared.local.console import StartupConsole
from shared.local.up import describe_shares, require_servable, router_host, up, why_not_ours
from shared.primitives.errors import ConfigError, StartError
from shared.worker.worker_config import WorkerConfig
from tests.tidy.chart_schema import CHART


def test_only_a_taken_port_is_called_taken() -> None:
    taken, forbidden = (OSError(number, os.strerror(number)) for number in (errno.EADDRINUSE, errno.EACCES))
    assert (
        why_not_ours(80, "--admin-port", taken)
        == "port 80 is not free on 127.0.0.1; choose another --admin-port"
    )
    assert why_not_ours(80, "--admin-port", forbidden) == "cannot listen on 127.0.0.1:80: Permission denied"
    elsewhere = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    assert "10.9.8.7 is no address of this machine" in why_not_ours(
        80, "--router-port", elsewhere, "10.9.8.7"
    )


@pytest.fixture
def values(tmp_path: Path) -> Path:
    return tmp_path / "values.yaml"


def given(values: Path, content: str, *flags: str, **variables: str) -> LocalSettings:
    values.write_text(content)
    return load_local(["--config", str(values), *flags], variables)


def test_settings_of_a_role_become_its_flags(values: Path) -> None:
    content = """
        router: {config: {workers: [prefill=a:1, decode=b:2]}}
        prefill: {config: {queuePolicy: lpm, overlap: false}}
        decode: {config: {kvPages: 3}}
    """
    settings = given(values, content, SEGUE_MAX_RUNNING_REQUESTS="5")
    assert settings.roles["decode"].flags == ["--kv-pages=3"]
    assert settings.roles["prefill"].flags == ["--queue-policy=lpm", "--overlap=false"]
    assert settings.roles["router"].flags == ["--workers=prefill=a:1,decode=b:2"]
    assert "max_running_requests=5" in repr(settings.roles["decode"].config)


def test_the_api_is_open_only_where_the_router_is_told_so(values: Path) -> None:
    assert router_host(given(values, "router: {config: {host: 0.0.0.0}}")) == "0.0.0.0"
    assert router_host(given(values, "decode: {config: {host: 0.0.0.0}}")) == "127.0.0.1"
    assert router_host(given(values, "", SEGUE_HOST="0.0.0.0")) == "0.0.0.0"
    assert router_host(given(values, "router: {config: {host: 0.0.0.0}}", "--host", "10.0.0.1")) == "10.0.0.1"


@pytest.mark.parametrize("flags", [["--api-keys-file", "keys"], ["--api-keys-file=keys"]])
def test_a_file_of_keys_is_seen_however_it_is_given(values: Path, flags: list[str]) -> None:
    assert given(values, "", *flags).api_keys_file == "keys"
    assert given(values, "router: {config: {apiKeysFile: keys}}").api_keys_file == "keys"
    assert given(values, "", SEGUE_API_KEYS_FILE="keys").api_keys_file == "keys"
    assert given(values, "").api_keys_file == ""


def test_a_variable_wins_over_the_file_for_a_role_as_it_does_for_its_process(values: Path) -> None:
    settings = given(values, "decode: {config: {kvPages: 3, threads: 2}}", SEGUE_KV_PAGES="5")
    assert settings.roles["decode"].flags == ["--threads=2"]
    assert "kv_pages=5" in repr(settings.roles["decode"].config)


def test_a_variable_reaches_the_processes_that_know_it_and_no_others() -> None:
    environ = {"SEGUE_KV_PAGES": "5", "SEGUE_ROUTER_PORT": "1", "SEGUE_KV_PAGE": "6", "PATH": "/bin"}
    kept = {role: set(environment_of(role, environ)) & set(environ) for role in ROLE_CONFIGS}
    assert kept == {
        "router": {"PATH"},
        "prefill": {"PATH", "SEGUE_KV_PAGES"},
        "decode": {"PATH", "SEGUE_KV_PAGES"},
    }
    assert unknown_everywhere(environ) == ["SEGUE_KV_PAGE is no setting; did you mean SEGUE_KV_PAGES?"]


def test_replicas_are_processes_and_a_flag_wins_over_them(values: Path) -> None:
    content = "{model: org/name, prefill: {replicas: 2}, decode: {replicas: 3}}"
    config = given(values, content, "--decode", "1").config
    assert (config.model, config.prefill, config.decode) == ("org/name", 2, 1)


def test_seconds_that_the_chart_has_outside_of_config_reach_the_processes(values: Path) -> None:
    settings = given(values, "{silenceSeconds: 9, drainSeconds: 8, router: {drainSeconds: 7}}")
    assert settings.roles["router"].flags == ["--silence-seconds=9.0", "--drain-seconds=7.0"]
    assert settings.roles["prefill"].flags == ["--silence-seconds=9.0", "--drain-seconds=8.0"]


def test_a_role_may_drain_for_another_time_and_null_is_what_the_top_says(values: Path) -> None:
    settings = given(values, "{drainSeconds: 8, prefill: {drainSeconds: 3}, decode: {drainSeconds: null}}")
    assert settings.roles["prefill"].flags == ["--drain-seconds=3.0"]
    assert settings.roles["decode"].flags == ["--drain-seconds=8.0"]


def test_the_values_of_the_chart_serve_this_machine_too() -> None:
    settings = load_local(["--config", str(CHART / "values.yaml")], {})
    assert (settings.config.model, settings.config.prefill, settings.config.decode) == ("smollm2", 1, 1)
    assert {"image", "prefill.resources", "router.replicas", "rbac"} <= set(settings.ignored)
    assert not {"router", "prefill", "decode", "silenceSeconds", "prefill.config"} & set(settings.ignored)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_file_made_for_production_serves_as_it_is_or_with_another_device(values: Path, device: str) -> None:
    production = yaml.safe_load((CHART / "ci" / "production.yaml").read_text())
    assert production["device"] == "cuda"
    settings = given(values, yaml.safe_dump(production | {"device": device}))
    assert settings.config.device == device
    decode = settings.roles["decode"].config
    assert isinstance(decode, WorkerConfig)
    assert decode.max_running_requests == 256


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "decode: {config: {kvPagez: 3}}",
            "unknown setting 'kvPagez' in decode.config of FILE; did you mean kvPages?",
        ),
        (
            "decode: {config: {nonsense: 3}}",
            "unknown setting 'nonsense' in decode.config of FILE; --help lists all",
        ),
        ("router: {config: {leaseSeconds: 3}}", "unknown setting 'leaseSeconds' in router.config of FILE"),
        (
            "decode: {config: {kvPages: many}}",
            "kvPages in decode.config of FILE should be a valid integer, got 'many'",
        ),
        (
            "decode: {config: {dtype: float8}}",
            "dtype in decode.config of FILE should be 'auto', 'float32', 'bfloat16' or 'float16', got 'float8'",
        ),
        (
            "decode: {config: {dtype: float16}}",
            "dtype is auto for prefill and float16 for decode, which then could not read each other's pages",
        ),
        (
            "{device: cuda, decode: {config: {kvCacheDtype: fp8_e4m3}}}",
            "kvCacheDtype is auto for prefill and fp8_e4m3 for decode, which then could not read each other's pages",
        ),
        ("prefil: {config: {kvPages: 3}}", "unknown setting 'prefil' in FILE; did you mean prefill?"),
        (
            "prefill: {confg: {kvPages: 3}}",
            "unknown setting 'confg' in prefill of FILE; did you mean config?",
        ),
        (
            "readySeconds: 3",
            "readySeconds in FILE is a setting of the router, in the file of --config: "
            "router: {config: {readySeconds: …}}",
        ),
        (
            "prefill: {kvPagse: 3}",
            "unknown setting 'kvPagse' in prefill of FILE; did you mean kvPages? It is a setting of the "
            "prefill and the decode, in the file of --config: prefill: {config: {kvPages: …}}",
        ),
        ("decode: {replicas: 0}", "decode in FILE should be greater than or equal to 1, got '0'"),
        ("decode: 2", "decode in FILE must be a mapping, got '2'"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(values: Path, content: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        given(values, content)
    assert str(error.value).replace(str(values), "FILE").startswith(sentence)


@pytest.mark.parametrize(
    "content", ["router: {config: {localPrefill: never}}", "decode: {config: {localTokensMax: 0}}"]
)
def test_somebody_has_to_compute_prompts(values: Path, content: str) -> None:
    given(values, content)
    with pytest.raises(ConfigError, match=r"--prefill 0 and --local-.* leave nobody to compute prompts"):
        given(values, content, "--prefill", "0")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("decode: {config: {pageSize: 32}}", "pageSize is 16 for prefill and 32 for decode"),
        (
            "prefill: {config: {kvCacheDtype: float16}}",
            "kvCacheDtype is float16 for prefill and auto for decode",
        ),
        ("decode: {config: {kvTransport: tls}}", "kvTransport is auto for prefill and tls for decode"),
    ],
)
def test_workers_that_could_not_read_each_other_are_refused(
    values: Path, content: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        given(values, content)
    assert str(error.value).startswith(sentence)


def test_workers_may_have_any_kv_format_that_is_the_same(values: Path) -> None:
    content = "{prefill: {config: {pageSize: 32}}, decode: {config: {pageSize: 32}}}"
    assert given(values, content).roles["decode"].flags == ["--page-size=32"]
    assert given(values, "decode: {config: {pageSize: 32}}", SEGUE_PAGE_SIZE="64").roles["decode"].flags == []


def test_a_flag_that_only_roles_know_is_given_to_them(values: Path) -> None:
    content = (
        "{router: {config: {toolCallParser: mistral, readySeconds: 9}}, prefill: {config: {kvPages: 3}}}"
    )
    values.write_text(content)
    words = [
        "--config",
        str(values),
        "--tool-call-parser",
        "hermes",
        "--kv-pages=64",
        "--router-port",
        "9000",
    ]
    settings = load_local(words, {"SEGUE_KV_PAGES": "7"})
    assert settings.config.router_port == 9000
    assert settings.roles["router"].flags == ["--ready-seconds=9.0", "--tool-call-parser", "hermes"]
    assert settings.roles["prefill"].flags == settings.roles["decode"].flags == ["--kv-pages=64"]
    router = settings.roles["router"].config
    assert isinstance(router, RouterConfig)
    assert router.tool_call_parser == "hermes"


def test_the_api_and_the_admin_port_are_two() -> None:
    settings = load_local(["--port", "4321", "--admin-port", "4321", "--device", "cpu"], {})
    with pytest.raises(StartError) as error:
        up(settings, StartupConsole())
    assert str(error.value) == (
        "--router-port (or -p, --port) and --admin-port are both 4321; choose another --admin-port"
    )


def test_a_port_that_is_taken_is_named_as_it_may_have_been_typed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError) as error:
            up(load_local(["--port", str(port), "--device", "cpu"], {}), StartupConsole())
    assert str(error.value) == (
        f"port {port} is not free on 127.0.0.1; choose another --router-port (or -p, --port)"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kv-pages", "many"], "--kv-pages "),
        (["--port", "99999"], "--router-port (or -p, --port) "),
        (["--max-model-len", "long"], "--context-len (or --max-model-len) "),
        (
            ["--max-model-length", "9"],
            "unknown flag --max-model-length; did you mean --max-model-len?",
        ),
        (["--tool-call-parser", "hremes"], "--tool-call-parser "),
        (["--tool-call-parser"], "argument --tool-call-parser"),
        (["--workers=a"], "unknown flag --workers=a"),
        (
            ["--ready-secons=3"],
            "unknown flag --ready-secons=3; did you mean --ready-seconds?",
        ),
        (["--thread=3"], "unknown flag --thread=3; did you mean --threads?"),
        (["--api-key="], "--api-key is empty"),
    ],
)
def test_a_flag_that_is_wrong_is_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_local(words, {})
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


def test_the_example_in_the_help_is_a_file_that_is_accepted(
    values: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_local(["--help"], {})
    shown = " ".join(capsys.readouterr().out.split())
    assert re.match(r"usage: .* \[MODEL\] \[--config FILE\] \[--SETTING VALUE \.\.\.\]", shown), shown[:100]
    example = re.search(r"router: \{.*\}\}", shown)
    assert example
    assert given(values, example[0]).roles["router"].flags == ["--allowed-origins=http://localhost:3000"]


@pytest.mark.parametrize(
    ("content", "flags", "sentence"),
    [
        ("", [], "memory: each worker is given 4.00 GiB, one of 2 equal shares of 8.00 GiB (measured)"),
        ("", ["--prefill", "0"], "memory: the decode worker is given 8.00 GiB (measured)"),
        ("decode: {config: {memoryBytes: 1000000}}", ["--prefill", "0"], ""),
        (
            "decode: {config: {memoryBytes: 1000000}}",
            [],
            "memory: each prefill worker is given 4.00 GiB, one of 2 equal shares of 8.00 GiB (measured)",
        ),
    ],
)
def test_memory_is_told_of_the_workers_that_run(
    values: Path, content: str, flags: list[str], sentence: str
) -> None:
    assert describe_shares(given(values, content, *flags), Budget(8 << 30, "measured")) == sentence


def test_weights_that_lie_in_gpu_memory_are_not_counted_against_the_host(tmp_path: Path) -> None:
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
    }
    llama |= {
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(llama))
    model, settings = read_config(tmp_path), load_local([], {})
    require_servable(model, settings, None)
    with pytest.raises(StartError, match="too little memory"):
        require_servable(model, settings, Budget(1 << 20, "measured"))
