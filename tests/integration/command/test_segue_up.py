"""`segue up` as a user meets it: one sentence for what is wrong, one line when it is ready, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import httpx2
import pytest

from shared.local.children import GRACE_SECONDS
from tests.integration.deployments.aggregated import AGGREGATED
from tests.integration.deployments.cut_model import cut_model
from tests.integration.deployments.deployment import RoleConfigs, segue_up
from tests.integration.deployments.ranked import RANKED, config_of_ranks, flags_of_ranks, followers_of
from tests.integration.deployments.running import Running, ended_within
from tests.integration.model_cache.fetching import files_of_a_model
from tests.waiting import soon

TINY = {"kvPages": 64, "maxRunningRequests": 4}
SMALL = {"router": {"silenceSeconds": 10}, "prefill": TINY, "decode": TINY}
ROLES = ["decode", "router"] if AGGREGATED else ["decode", "prefill", "router"]
KEY = "sk-of-a-test"


@contextlib.contextmanager
def segue(
    *flags: str, config: RoleConfigs | None = None, environment: dict[str, str] | None = None
) -> Iterator[Running]:
    running = segue_up(*flags, config=config, environment=environment)
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def served(*flags: str, environment: dict[str, str] | None = None) -> Iterator[Running]:
    """A small deployment that starts; ranks serve the model that they can share."""
    config: RoleConfigs = SMALL
    if RANKED:
        flags, config = flags_of_ranks((*flags, "--model", str(cut_model()))), config_of_ranks(SMALL)
    with segue(*flags, config=config, environment=environment) as running:
        yield running


def processes(running: Running) -> list[int]:
    """All processes of the deployment but the command itself; of ranks also those that workers started."""
    children = list(running.children())
    return children + [follower for child in children for follower in followers_of(child)]


def roles(running: Running) -> list[str]:
    """The role of each child, from its command line."""
    found = (re.search(r" -m (router|prefill|decode) ", line) for line in running.children().values())
    return sorted(match.group(1) for match in found if match)


def refused(*flags: str, environment: dict[str, str] | None = None) -> str:
    """The one sentence of a start that must fail, within 15 s."""
    began_at = monotonic()
    with segue(*flags, environment=environment) as running:
        assert running.process.wait(15) != 0
    assert monotonic() - began_at < 15
    assert not [line for line in running.lines if "Traceback" in line], running.lines
    assert len(running.lines[-1]) > 10
    return running.lines[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--modell", "x"), ("unknown flag --modell", "did you mean --model?")),
        (("--decode", "0"), ("--decode should be greater than or equal to 1",)),
        (("--device", "tpu"), ("--device", "'cuda-on-cpu'", "'tpu'")),
        (("--model", "/nowhere"), ("there is no model /nowhere",)),
        (("--config", "/nowhere.yaml"), ("cannot read the config file /nowhere.yaml",)),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    sentence = refused("--router-port", "0", *flags)
    assert sentence.startswith("segue up: ")
    assert all(word in sentence for word in words), sentence


def test_a_wrong_setting_of_a_role_is_said_before_any_process_starts() -> None:
    with segue("--router-port", "0", config={"decode": {"kvPagse": 3}}) as running:
        assert running.process.wait(15) == 1
    assert len(running.lines) == 1
    assert "unknown setting 'kvPagse' in decode.config of" in running.lines[0]
    assert "did you mean kvPages?" in running.lines[0]


def test_weights_that_are_not_whole_are_said_before_any_process_starts(tmp_path: Path) -> None:
    for name, content in files_of_a_model().items():
        if name in ("config.json", "tokenizer.json"):
            assert isinstance(content, bytes)
            (tmp_path / name).write_bytes(content)
    header = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    whole = len(header).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with segue("--router-port", "0", "--model", str(tmp_path)) as running:
        assert running.process.wait(15) == 1
    [said] = [line for line in running.lines if "safetensors" in line]
    assert re.search(r"model\.safetensors is not a complete safetensors file .*: fetch it again$", said)
    assert not [line for line in running.lines if line.startswith(("decode-0", "prefill-0", "router"))]


def test_a_hub_without_a_network_is_said_in_one_sentence(tmp_path: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    sentence = refused("--router-port", "0", "--model", "org/name", environment=nowhere)
    assert "the Hub cannot be reached for org/name" in sentence


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    sentence = refused("--router-port", "0", "--model", str(tmp_path))
    assert "MambaForCausalLM" in sentence
    assert " Llama," in sentence


def test_too_little_memory_is_said_with_the_figures(tmp_path: Path) -> None:
    huge = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10**6,
        "hidden_size": 10**6,
        "intermediate_size": 10**6,
    }
    huge |= {
        "num_attention_heads": 8,
        "num_hidden_layers": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(huge))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    sentence = refused("--router-port", "0", "--model", str(tmp_path))
    assert re.search(r"too little memory: [\d.]+ GiB .* at least [\d.]+ GiB each", sentence), sentence


def test_a_longer_context_than_the_models_is_refused_before_any_worker_starts(tmp_path: Path) -> None:
    sentence = refused("--router-port", "0", "--max-model-len", "1000000")
    flags = "--context-len (or --max-model-len)"
    assert sentence == f"segue up: {flags} must be between 1 and the model's 8192, got 1000000"
    file = tmp_path / "values.yaml"
    file.write_text("decode: {config: {contextLen: 8193}}")
    assert "contextLen of decode must be between 1 and the model's 8192, got 8193" in refused(
        "--router-port", "0", "--config", str(file)
    )


def test_a_port_in_use_is_said_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is not free" in refused("--router-port", str(port))
        sentence = refused("--router-port", "0", "--admin-port", str(port))
        assert f"port {port} is not free on 127.0.0.1; choose another --admin-port" in sentence


def test_an_interruption_before_anything_runs_is_said_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # accepts, and never answers
        silent = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        with segue("--router-port", "0", "--model", "org/name", environment=silent) as running:
            hub.settimeout(15)
            connection, _ = hub.accept()
            with connection:
                running.process.send_signal(signal.SIGINT)
                assert running.process.wait(soon(5)) == 130
    assert running.lines[-1] == "segue up: interrupted"
    assert "Traceback" not in "".join(running.lines)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A deployment whose API asks for a key, ready; the last test that uses it ends it."""
    temporary = str(tmp_path_factory.mktemp("temporary"))
    variables = {"SEGUE_API_KEY": KEY, "SEGUE_ROUTER_PROT": "9", "TMPDIR": temporary}
    with served("--port", "0", environment=variables) as running:
        running.line(lambda line: line.startswith("ready in "), 120)
        yield running
    assert not list(Path(temporary).glob("*segue*")), "kill -9 may leave nothing behind"


def answer_to_printed_command(running: Running, key: str) -> str:
    """What the command answers that the deployment has printed, with this key in the environment."""
    assert shutil.which("curl"), "the ready line is for curl"
    command = line_of(running, "ready in ").partition("try: ")[2]
    return subprocess.run(
        ["bash", "-c", command.replace('"max_tokens": 64', '"max_tokens": 4')],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "SEGUE_API_KEY": key},
    ).stdout.rstrip()


def test_the_key_that_is_given_is_asked_for_and_stands_in_no_command_line(keyed: Running) -> None:
    assert answer_to_printed_command(keyed, KEY).endswith("data: [DONE]")
    assert "invalid_api_key" in answer_to_printed_command(keyed, "sk-other")
    assert not [line for line in keyed.children().values() if KEY in line]
    assert KEY not in "".join(keyed.read_lines())
    assert [line for line in keyed.lines if "PROT" in line] == [
        "SEGUE_ROUTER_PROT is no setting; did you mean SEGUE_ROUTER_PORT?"
    ]


def test_the_live_page_kills_a_worker_which_comes_back(keyed: Running) -> None:
    url, _, token = line_of(keyed, "in a browser: ").partition(": ")[2].rstrip().partition("/#")
    assert len(token) == 32
    assert token not in httpx2.get(url, headers={"accept": "text/html"}).raise_for_status().text
    headers = {"authorization": f"Bearer {KEY}", "x-segue-live-token": token}

    def kill(name: str, **other: str) -> int:
        return httpx2.post(f"{url}/live/kill", json={"worker": name}, headers=headers | other).status_code

    assert kill("decode-0", authorization="Bearer sk-other") == 401
    assert kill("decode-0", **{"x-segue-live-token": "x"}) == 403
    assert kill("decode-7") == 202, "nobody has this name, and nothing happens"
    assert kill("decode-0") == 202
    keyed.line(lambda line: line == "decode-0: killed from the live page", 10)
    keyed.line(lambda line: line.startswith("decode-0: ready"), 120)
    assert roles(keyed) == ROLES
    assert not [line for line in keyed.children().values() if token in line]


def test_two_deployments_serve_side_by_side_and_the_printed_command_works(
    tmp_path: Path, keyed: Running
) -> None:
    with served("--router-port", "0", environment={"TMPDIR": str(tmp_path)}) as one:
        one.line(lambda line: line.startswith("ready in "), 120)
        assert roles(one) == roles(keyed) == ROLES
        for running in (one, keyed):
            answer = answer_to_printed_command(running, KEY)
            assert answer.endswith("data: [DONE]")
            assert '"content"' in answer
        keys = [keys_in_memory(running) for running in (one, keyed)]
        assert [len(each) for each in keys] == [2, 2], "one file for routers, one for workers"
        assert not keys[0] & keys[1]
        pids = [*processes(one), one.process.pid]
        one.process.send_signal(signal.SIGINT)
        assert ended_within(pids, soon(GRACE_SECONDS))
        left = processes(keyed)
        keyed.process.kill()
        assert ended_within(left, soon(5))
    keyed.close()
    assert not list(tmp_path.glob("*segue*")), "a signal may leave nothing behind"
    said = "".join(one.lines + keyed.lines)
    assert "Traceback" not in said
    assert "work left" not in said
    assert "did not end within" not in said
    assert KEY not in said


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[Running]:
    """A deployment whose API is open to the network, ready; the last test that uses it ends it."""
    with served("--port", "0", "--host", "0.0.0.0") as running:
        running.line(lambda line: line.startswith("ready in "), 120)
        yield running


def line_of(running: Running, start: str) -> str:
    """The line that began so before the deployment was ready."""
    return next(line for line in running.lines if line.startswith(start))


def test_a_worker_says_how_many_gib_of_weights_it_holds(open_to_all: Running) -> None:
    said = re.search(r": ready, engine .*, weights (\d+\.\d\d) GiB, admin port", "\n".join(open_to_all.lines))
    assert said
    assert 0 < float(said[1]) < 2


def reaches(host: str, port: int) -> bool:
    with contextlib.closing(socket.socket()) as client:
        return client.connect_ex((host, port)) == 0


def test_an_api_that_is_open_to_the_network_leaves_the_admin_port_on_loopback(open_to_all: Running) -> None:
    assert line_of(open_to_all, "the API is open to the network, without")
    lines = [line_of(open_to_all, "ready in "), line_of(open_to_all, "router: ready")]
    ports = [int(match.group(1)) for line in lines if (match := re.search(r"127.0.0.1:(\d+)", line))]
    assert [reaches("127.0.0.2", port) for port in ports] == [True, False]
    assert reaches("127.0.0.1", ports[1])


def keys_in_memory(running: Running) -> set[bytes]:
    """The link keys that the processes inherited and closed; their command lines say only where they were."""
    found = set()
    for pid, line in running.children().items():
        match = re.search(r" --link-keys-file /dev/fd/(\d+) ", line)
        assert match
        keys = Path(f"/proc/{running.process.pid}/fd/{match.group(1)}").read_bytes()
        in_memory = [
            each for each in Path(f"/proc/{pid}/fd").iterdir() if "memfd:segue" in str(each.readlink())
        ]
        assert keys not in [each.read_bytes() for each in in_memory], (
            "no process keeps the file after reading"
        )
        found.add(keys)
    return found


@pytest.mark.parametrize("stage", ["starting", "loading weights|checking the transfer|ready"])
def test_a_deployment_that_is_still_loading_ends_at_once(stage: str) -> None:
    with served("--router-port", "0") as running:
        running.line(lambda line: re.match(f"decode-0: ({stage})", line) is not None, 60)
        pids = [*processes(running), running.process.pid]
        running.process.send_signal(signal.SIGINT)
        assert ended_within(pids, soon(GRACE_SECONDS))
    assert "killed" not in "".join(running.lines)
    assert "Traceback" not in "".join(running.lines)


def test_a_killed_process_comes_back_under_its_address(open_to_all: Running) -> None:
    seconds = line_of(open_to_all, "ready in ").split()[2]
    assert RANKED or int(seconds) < 60  # with other tests around it; alone it is under 20
    for role in ROLES:
        kill_and_await(open_to_all, role)


def kill_and_await(running: Running, role: str) -> None:
    """`kill -9` the process of this role; another one takes its place with the same command line."""
    before = running.children()
    victim = next(pid for pid, line in before.items() if f" -m {role} " in line)
    others = followers_of(victim)
    os.kill(victim, signal.SIGKILL)
    assert ended_within(others, soon(5))
    running.line(lambda line: line.startswith(role) and "killed by signal 9" in line, 10)
    running.line(lambda line: line.startswith(role) and ": ready" in line, 120)
    after = running.children()
    again = next(pid for pid, line in after.items() if f" -m {role} " in line)
    assert again != victim
    assert after[again] == before[victim]
    assert roles(running) == ROLES


def test_an_interruption_of_all_processes_at_once_warns_of_nothing(open_to_all: Running) -> None:
    """As a terminal does it: every process of the group gets the signal. The last test of this deployment."""
    open_to_all.read_lines()
    before = len(open_to_all.lines)
    for pid in [*open_to_all.children(), open_to_all.process.pid]:
        os.kill(pid, signal.SIGINT)
    assert open_to_all.process.wait(soon(5)) == 0
    open_to_all.close()
    assert not [line for line in open_to_all.lines[before:] if "role_" in line], open_to_all.lines
