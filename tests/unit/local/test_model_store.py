"""What a user may call a model, and the sentence for each way it can go wrong. The Hub is a server on this machine."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import ClassVar

import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from shared.local import model_store
from shared.local.cli import run
from shared.local.model_store import cache_folder, models, name_of, pull, resolve
from shared.model_cache.hub import UNWANTED, WANTED, is_wanted
from shared.primitives.errors import ConfigError, ModelError, StartError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that passes for a model as long as nobody computes with it."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def refusal(model: str, endpoint: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(model, lambda _line: None, endpoint)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_itself(folder: Path) -> None:
    assert resolve(str(folder), lambda _line: None) == folder


def test_a_folder_is_called_by_its_last_part_and_an_id_by_itself(folder: Path) -> None:
    assert name_of(str(folder)) == folder.name
    assert name_of("org/name") == "org/name"
    assert name_of("smollm2") == "smollm2"


def test_a_folder_of_the_users_home_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert name_of("~/tiny") == "tiny"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docker run --user 12345` gives one: a number without an entry in passwd, and no HOME."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 12345)
    with pytest.raises(StartError, match="this user has no home folder: set HOME, or XDG_CACHE_HOME"):
        cache_folder()


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nothing", "no-such-name", "a/b/c", ""])
def test_what_is_nowhere_is_named(model: str) -> None:
    assert f"there is no model {model}" in refusal(model)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("hf.co/org/name", "is called org/name here"),
        ("https://huggingface.co/org/name/", "is called org/name here"),
        ("org/name:Q4_K_M", "there are no tags here"),
        ("hf.co/org/name:Q4_K_M", "there are no tags here"),
        ("llama3.2:1b", "expected a folder, a .gguf file, a Hub id or smollm2"),
    ],
)
def test_a_name_of_other_servers_is_told_as_it_is_called_here(model: str, words: str) -> None:
    assert words in refusal(model)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "is a LoRA adapter"),
        (["model_index.json"], "is a pipeline of diffusers"),
        (["a-f16.gguf", "a-Q4_K_M.gguf", "mmproj.gguf"], "name one of them, as {}/a-Q4_K_M.gguf"),
    ],
)
def test_a_folder_of_another_kind_is_told_what_it_is(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert words.format(tmp_path) in refusal(str(tmp_path))


def test_one_part_of_a_gguf_file_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    (tmp_path / "x-00001-of-00003.gguf").write_bytes(b"GGUF")
    assert "is one of 3 parts" in refusal(str(tmp_path / "x-00001-of-00003.gguf"))


def test_a_missing_gguf_file_is_named() -> None:
    assert "there is no file /nowhere/x.gguf" in refusal("/nowhere/x.gguf")


def test_a_broken_gguf_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"not GGUF at all")
    assert "is not a GGUF file" in refusal(str(tmp_path / "broken.gguf"))


def test_an_unsupported_architecture_is_named_with_what_is_supported(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["MambaForCausalLM"]}))
    answer = refusal(str(folder))
    assert "MambaForCausalLM" in answer
    assert "Llama" in answer


@pytest.mark.parametrize(
    ("missing", "words"),
    [("config.json", "config.json"), ("model.safetensors", "safetensors"), ("tokenizer.json", "tokenizer")],
)
def test_an_incomplete_folder_says_what_it_lacks(folder: Path, missing: str, words: str) -> None:
    (folder / missing).unlink()
    assert words in refusal(str(folder))


def test_pickled_weights_are_never_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "never loaded" in refusal(str(folder))


def test_a_full_disk_is_said_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the disk is full"):
        model_store._require_room(tmp_path / "deep" / "model", 1 << 60)


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hub does, by the name of the repository."""

    released = threading.Event()
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if "gated" in self.path:
            self._answer(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}, {})
        elif "silent" in self.path:
            self.released.wait(60)
        elif "pickled" in self.path:
            siblings = [{"rfilename": "pytorch_model.bin", "size": 9}]
            self._answer(200, {}, {"id": "org/pickled", "sha": "0" * 40, "siblings": siblings})
        elif "quantized" in self.path:
            siblings = [{"rfilename": "config.json", "size": 9}, {"rfilename": "q8_0.gguf", "size": 9}]
            self._answer(200, {}, {"id": "org/quantized", "sha": "0" * 40, "siblings": siblings})
        elif self.path.startswith("/api/models/org/moving"):
            siblings = [{"rfilename": "model.safetensors", "size": 9}]
            self._answer(200, {}, {"id": "org/moving", "sha": "0" * 40, "siblings": siblings})
        else:
            self._answer(401, {"X-Error-Code": "RepoNotFound"}, {})

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        self._answer(404, {}, {})

    def _answer(self, status: int, headers: dict[str, str], body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Tests look at answers."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.released.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Hub.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_gated_model_says_what_to_do(hub: str) -> None:
    answer = refusal("org/gated", hub)
    assert "gated" in answer
    assert "HF_TOKEN" in answer


def test_an_unknown_id_is_named(hub: str) -> None:
    assert "the Hub has no model org/unknown" in refusal("org/unknown", hub)


def test_an_id_with_pickled_weights_alone_is_refused_before_the_download(hub: str) -> None:
    assert "no safetensors" in refusal("org/pickled", hub)


def test_an_id_with_gguf_files_alone_says_where_one_is(hub: str) -> None:
    answer = refusal("org/quantized", hub)
    assert f"download one of them and name the file, as {hub}/org/quantized/resolve/main/q8_0.gguf" in answer


def test_the_config_that_is_checked_is_of_the_revision_that_is_fetched(hub: str) -> None:
    Hub.asked.clear()
    assert "no readable config.json" in refusal("org/moving", hub)
    assert {path for path in Hub.asked if "config.json" in path} == {
        f"/org/moving/resolve/{'0' * 40}/config.json"
    }


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("original/model-00001-of-00002.safetensors", False),  # gpt-oss: 13 GB in another layout
        ("consolidated.safetensors", False),  # Mistral: all weights in one file beside those in several
        ("metal/model.bin", False),
        ("onnx/config.json", False),
    ],
)
def test_weights_are_not_downloaded_twice(name: str, wanted: bool) -> None:
    taken = filter_repo_objects([name], allow_patterns=WANTED, ignore_patterns=UNWANTED)
    assert is_wanted(name, WANTED) == wanted == bool(list(taken))


def test_a_hub_that_is_not_there_is_said_at_once() -> None:
    began_at = monotonic()
    assert "cannot be reached for org/name" in refusal("org/name", "http://127.0.0.1:9")
    assert monotonic() - began_at < 15


def test_a_hub_that_never_answers_is_left_within_fifteen_seconds(hub: str) -> None:
    began_at = monotonic()
    assert "cannot be reached for org/silent" in refusal("org/silent", hub)
    assert monotonic() - began_at < 15


@pytest.mark.torch
def test_a_conversion_runs_no_module_of_the_folder_that_it_is_called_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("import os\nos.write(2, b'code of the folder\\n')\nos._exit(7)\n")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="is not a GGUF file of version 2 or 3"):
        resolve("./x.gguf", lambda _line: None)


# ---- `segue pull` says where a model lies, `segue models` lists what is there ----------------------------------------


def test_a_pulled_model_is_listed_by_the_name_that_up_takes(capsys: pytest.CaptureFixture[str]) -> None:
    pull("smollm2")
    folder = capsys.readouterr().out.strip()
    assert (Path(folder) / "config.json").exists()
    models()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (line,) = (line for line in lines if line[0] == "smollm2")
    assert float(line[1]) > 0.05
    assert line[-1] == folder


def test_an_empty_cache_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    models()
    assert "segue pull MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["pull"], "arguments are required: MODEL"),
        (["pull", "a", "b"], "unknown argument b"),
        (["pull", "a", "--all"], "unknown flag --all"),
        (["models", "a"], "unknown argument a"),
    ],
)
def test_pull_takes_one_model_and_models_takes_none(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run(words)


def test_a_model_that_is_nowhere_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="there is no model"):
        pull("/nowhere/model")
