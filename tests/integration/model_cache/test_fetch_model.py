"""One copy of a model for all pods of a cache, whatever breaks: real processes, a real web server, real files."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import COMMIT, HubServer, Repository
from tests.integration.deployments.running import ended_within
from tests.integration.model_cache.fetching import (
    MODEL,
    WEIGHTS_BYTES,
    assert_whole,
    begin,
    end,
    fetch,
    files_of_a_model,
    hub_of,
)
from tests.integration.routers.service_account import write_service_account
from tests.unit.engine.checkpoint.tiny_gguf import write_tiny_gguf
from tests.waiting import until

SLOW = 12e6  # bytes a second: two seconds for the weights
WHOLE = WEIGHTS_BYTES + 10_000 + 250  # the weights, tokenizer.json, config.json


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_of() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "owner" / f"name@{COMMIT}"


def kill_in_mid_download(process: subprocess.Popen[str], hub: HubServer) -> int:
    """SIGKILL when a third is there; returns the bytes sent until then."""
    until(lambda: hub.sent_bytes > WHOLE / 3, 30, "a third of the model")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    return hub.sent_bytes


def test_what_a_worker_needs_is_fetched_and_a_second_pod_asks_for_nothing(
    hub: HubServer, folder: Path
) -> None:
    assert "fetched 25.2 MB in" in fetch(folder, hub)
    assert_whole(folder, hub)
    asked, sent = len(hub.asked), hub.sent_bytes
    assert sent <= WHOLE
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "is complete" in fetch(folder, hub)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (len(hub.asked), hub.sent_bytes) == (asked, sent)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_a_complete_folder_loads_no_library_of_the_hub(hub: HubServer, folder: Path) -> None:
    fetch(folder, hub)
    code = (
        "import sys; from shared.model_cache.fetch_model import parse, run; run(parse(sys.argv[1:]));"
        "sys.exit(any(name in sys.modules for name in ('huggingface_hub', 'httpx2', 'torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), "hub"], check=True, timeout=60)


def test_four_pods_at_once_take_one_copy_and_three_say_how_far_it_is(hub: HubServer, folder: Path) -> None:
    hub.bytes_per_second = SLOW
    pods = [begin(folder, "--endpoint", hub.url) for _ in range(4)]
    said = [end(pod) for pod in pods]
    assert_whole(folder, hub)
    assert hub.sent_bytes <= 1.05 * WHOLE
    assert sum("fetching owner/name" in each for each in said) == 1
    assert sum("waiting for another pod" in each for each in said) == 3


def test_who_waits_goes_on_where_a_killed_pod_was(hub: HubServer, folder: Path) -> None:
    hub.bytes_per_second = SLOW
    first = begin(folder, "--endpoint", hub.url)
    until(lambda: hub.sent_bytes > 0, 30, "the first bytes")
    second = begin(folder, "--endpoint", hub.url)
    kill_in_mid_download(first, hub)
    assert "of them are there" in end(second)
    assert_whole(folder, hub)
    assert hub.sent_bytes <= 1.05 * WHOLE + (2 << 20)  # a chunk, and what the kernel held of the connection


def test_a_container_that_is_started_again_goes_on_where_it_was(hub: HubServer, folder: Path) -> None:
    hub.bytes_per_second = SLOW
    kill_in_mid_download(begin(folder, "--endpoint", hub.url), hub)
    assert not folder.exists()
    fetch(folder, hub)
    assert_whole(folder, hub)
    assert hub.sent_bytes <= 1.05 * WHOLE + (2 << 20)


def test_cut_connections_are_taken_up_where_they_broke(hub: HubServer, folder: Path) -> None:
    hub.cut_after_bytes = [5 << 20] * 3
    fetch(folder, hub)
    assert hub.cut_after_bytes == []
    assert_whole(folder, hub)
    assert hub.sent_bytes <= 1.05 * WHOLE + 3 * (1 << 20)


def test_a_server_that_sends_nothing_more_is_left_in_a_sentence(hub: HubServer, folder: Path) -> None:
    hub.cut_after_bytes = [1 << 20] + [0] * 9
    said = fetch(folder, hub, status=1)
    assert "owner/name/model.safetensors cannot be fetched from http://127.0.0.1" in said
    assert "networkPolicy.egress" in said
    assert not folder.exists()


def test_what_a_killed_pod_left_torn_is_fetched_anew(hub: HubServer, folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True)
    (partial / "model.safetensors.incomplete").write_bytes(bytes(1 << 20))
    fetch(folder, hub)
    assert_whole(folder, hub)


def test_a_damaged_folder_is_repaired_by_what_is_missing(hub: HubServer, folder: Path) -> None:
    fetch(folder, hub)
    (folder / "tokenizer.json").unlink()
    sent = hub.sent_bytes
    fetch(folder, hub)
    assert_whole(folder, hub)
    assert hub.sent_bytes - sent == 10_000


def test_of_a_branch_that_has_moved_nothing_old_is_kept(hub: HubServer, folder: Path) -> None:
    hub.bytes_per_second = SLOW
    kill_in_mid_download(begin(folder, "--endpoint", hub.url, "--revision", "main"), hub)
    changed = {"model.safetensors": files_of_a_model()["model.safetensors"][::-1]}  # type: ignore[index]
    hub.repositories[MODEL] = Repository(files_of_a_model() | changed, commit="f" * 40)
    hub.bytes_per_second = float("inf")
    fetch(folder, hub, "--revision", "main")
    assert_whole(folder, hub)


def test_a_router_gets_no_weights_and_takes_its_files_from_the_workers(hub: HubServer, folder: Path) -> None:
    routers = folder.with_name(f"{folder.name}+tokenizer")
    words = ("--tokenizer", "--copy-from", str(folder))
    fetch(routers, hub, *words)
    assert {path.name for path in routers.iterdir()} == {"config.json", "tokenizer.json", ".complete"}
    fetch(folder, hub)
    (routers / ".complete").unlink()
    asked = len(hub.asked)
    fetch(routers, hub, *words)
    assert {path.name for path in routers.iterdir()} == {"config.json", "tokenizer.json", ".complete"}
    assert len(hub.asked) == asked


def test_a_model_that_segue_cannot_compute_is_refused_before_its_weights(folder: Path) -> None:
    files = files_of_a_model() | {"config.json": b'{"architectures": ["MambaForCausalLM"]}'}
    with HubServer({MODEL: Repository(files)}) as hub:
        assert "MambaForCausalLM" in fetch(folder, hub, status=1)
        assert "model.safetensors" not in hub.sent


@pytest.mark.parametrize(
    ("repository", "variables", "words", "sentence"),
    [
        (
            Repository({}, token="hf_right", gated_for=frozenset({""})),
            {},
            (),
            "is gated, and no token is given: accept",
        ),
        (
            Repository({}, token="hf_right", gated_for=frozenset({"hf_new"})),
            {"HF_TOKEN": "hf_new"},
            ("--token-source", "Secret hub-token"),
            "the token in Secret hub-token has no access: accept its licence at http",
        ),
        (
            Repository({}, token="hf_right"),
            {"HF_TOKEN": "hf_wrong"},
            ("--token-source", "Secret hub-token"),
            "the Hub refuses the token in Secret hub-token for owner/other \\(401\\)",
        ),
        (Repository({}, token="hf_right"), {}, (), "has no model owner/other, or it is private"),
        (Repository({}, commit="f" * 40), {}, (), f"has no revision {COMMIT}: give the hash of a commit from http"),
        (Repository({"README.md": b""}), {}, (), r"has no file \*.safetensors"),
        (Repository({"pytorch_model.bin": b"", "config.json": b"{}"}), {}, (), "no safetensors weights"),
        (
            Repository({"model.safetensors": b""}, sizes={"model.safetensors": 10**15}),
            {},
            (),
            r"the disk is too small: 1000000.0 GB of owner/other are still to come, and \S+ has .* GB free: enlarge",
        ),
        (
            Repository({"model.safetensors": b""}, sizes={"model.safetensors": 16 * 10**9}),
            {},
            ("--size-limit", "4Gi"),
            "has 16.0 GB, and modelSource.sizeLimit allows 4.3 GB: raise it to 16Gi",
        ),
    ],
)  # fmt: skip
def test_a_failure_is_one_sentence_that_says_what_to_do(
    repository: Repository, variables: dict[str, str], words: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    with hub_of(other=repository) as hub:
        said = fetch(tmp_path / "model", hub, "--model", "owner/other", *words, status=1, **variables)
    last = said.splitlines()[-1]
    assert last.startswith("segue: ")
    assert re.search(sentence, last)
    assert "Traceback" not in said


def test_a_hub_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    said = end(begin(tmp_path / "model", "--endpoint", "http://127.0.0.1:9"), 1)
    assert "owner/name cannot be fetched from http://127.0.0.1:9" in said.splitlines()[-1]


def test_a_proxy_is_asked_where_the_hub_cannot_be_reached(hub: HubServer, folder: Path) -> None:
    end(begin(folder, "--endpoint", "http://hub.invalid", HTTP_PROXY=hub.url))
    assert_whole(folder, hub)


def test_a_hub_with_a_ca_of_the_companys_own_is_trusted_by_its_file_alone(
    folder: Path, tmp_path: Path
) -> None:
    tls = write_service_account(tmp_path, "here")
    with HubServer({MODEL: Repository(files_of_a_model())}, tls=tls) as hub:
        said = fetch(folder, hub, status=1)
        assert "certificate" in said
        assert "SSL_CERT_FILE in modelSource.extraEnv" in said.splitlines()[-1]
        fetch(folder, hub, SSL_CERT_FILE=str(tmp_path / "ca.crt"))
        assert_whole(folder, hub)


@pytest.mark.skipif(os.getuid() != 0, reason="a disk of its own takes root")
def test_a_disk_that_fills_up_meanwhile_is_one_sentence(hub: HubServer, tmp_path: Path) -> None:
    """The Hub says less than comes: as where another one writes to the same disk."""
    hub.repositories[MODEL].sizes["model.safetensors"] = 8 << 20
    (tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(tmp_path / "disk")], check=True)
    try:
        first = begin(tmp_path / "disk" / "model", "--endpoint", hub.url)
        hub.bytes_per_second = 4e6
        until(lambda: hub.sent_bytes > 1 << 20, 30, "the first bytes")
        (tmp_path / "disk" / "other").write_bytes(bytes(6 << 20))
        assert "the disk is full: owner/name does not fit; enlarge" in end(first, 1).splitlines()[-1]
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_gguf_file_is_converted_once_and_a_router_waits_for_that(tmp_path: Path) -> None:
    router = begin(tmp_path / "model", step="wait")
    write_tiny_gguf(tmp_path / "tiny.Q4_1.gguf", "llama")
    files: dict[str, bytes | Path] = {"tiny.Q4_1.gguf": tmp_path / "tiny.Q4_1.gguf", "other.gguf": b"no"}
    with HubServer({MODEL: Repository(files)}) as hub:
        said = fetch(tmp_path / "model", hub, "--gguf", "tiny.Q4_1.gguf")
        assert "converting:" in said
        waited = end(router)
        assert "waiting for a worker's pod that fetches and converts it" in waited
        assert waited.splitlines()[-1].startswith(f"{tmp_path / 'model'} is complete")
        made = {path.name for path in (tmp_path / "model").iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", ".complete"} <= made
        assert not any(name.endswith(".gguf") for name in made)
        sent = hub.sent_bytes
        assert "is complete" in fetch(tmp_path / "model", hub, "--gguf", "tiny.Q4_1.gguf")
        assert hub.sent_bytes == sent
    assert [
        path.name for path in tmp_path.iterdir() if "partial" in path.name or "converted" in path.name
    ] == []


CONVERTING = """
import signal, sys
from pathlib import Path
from shared.model_cache.gguf import convert_in_a_child
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command `segue` has it
convert_in_a_child(sys.argv[1], Path(sys.argv[2]), print)
"""


def test_a_conversion_ends_with_the_process_that_a_signal_ends(tmp_path: Path) -> None:
    """Else it would compute for minutes, with much memory, for nobody."""
    gguf = tmp_path / "model.gguf"
    os.mkfifo(gguf)
    words = [sys.executable, "-c", CONVERTING, str(gguf), str(tmp_path / "model")]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    with gguf.open("wb"):  # comes when the child reads it, which then waits for its end
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGTERM)
        assert ended_within([process.pid, int(child)], 20)
    assert process.wait() != 0
