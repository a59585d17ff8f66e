"""What a user meets before the weights of a model of the Hub are fetched, and while they are.

The Hub is a server on this machine that answers as the real one does: everybody may list a gated repository, and none
of its files may be read without a token.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants

from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.transformers_config import FallbackConfig
from shared.local.model_store import resolve
from shared.primitives.errors import ModelError, StartError
from tests.waiting import until

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
SHA = "0" * 40
WEIGHTS = "model.safetensors"


class Hub(BaseHTTPRequestHandler):
    """Repositories by name. The weights of all come to half, and no further before `released`."""

    released = threading.Event()
    asked: ClassVar[list[str]] = []
    sizes: ClassVar[dict[str, int]] = {WEIGHTS: 1000}

    def do_GET(self) -> None:
        """Answer with the list of files, or with a file."""
        self.asked.append(self.path)
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": n, "size": s, "oid": n} for n, s in self._files().items()]
            self._begin(200, {}, json.dumps(tree).encode())
        elif self.path.startswith("/api/models/"):
            siblings = [{"rfilename": name, "size": size} for name, size in self._files().items()]
            self._begin(200, {}, json.dumps({"id": "org/x", "sha": SHA, "siblings": siblings}).encode())
        elif "/resolve/" not in self.path:
            self._begin(404, {}, b"")
        elif self._head() and self.path.endswith(WEIGHTS):
            self.wfile.write(bytes(self._size() // 2))
            self.wfile.flush()
            self.released.wait(60)
        elif not self.path.endswith(WEIGHTS):
            self.wfile.write(json.dumps(LLAMA).encode())

    def do_HEAD(self) -> None:
        """Answer for a file."""
        self._head()

    def _files(self) -> dict[str, int]:
        return {"config.json": len(json.dumps(LLAMA)), "tokenizer.json": len(json.dumps(LLAMA)), **self.sizes}

    def _size(self) -> int:
        return self._files()[self.path.rpartition("/")[2]]

    def _head(self) -> bool:
        if "gated" in self.path:
            self._begin(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}, b"")
            return False
        self.send_response(200)
        name = self.path.rpartition("/")[2]
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": SHA, "Content-Length": str(self._size())}
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        return True

    def _begin(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Tests look at answers."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(Hub, "sizes", {WEIGHTS: 1000})
    Hub.released.clear()
    Hub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Hub.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


def weights_asked_for() -> bool:
    return any(path.endswith(".safetensors") for path in Hub.asked)


def test_a_gated_model_that_everybody_may_list_says_what_to_do(hub: str) -> None:
    with pytest.raises(ModelError, match=r"org/gated is gated: accept its terms .* set HF_TOKEN"):
        resolve("org/gated", lambda _line: None, hub)


def test_a_model_that_is_unfit_is_refused_before_its_weights_are_fetched(hub: str) -> None:
    def refuse(config: ModelConfig | FallbackConfig) -> None:
        raise StartError(f"a context of {config.context_len} is too short")

    with pytest.raises(StartError, match="a context of 64 is too short"):
        resolve("org/x", lambda _line: None, hub, require=refuse)
    assert not weights_asked_for()


def test_a_model_that_the_disk_has_no_room_for_is_refused_before_its_weights_are_fetched(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_thirds = shutil.disk_usage(tmp_path).free * 2 // 3  # each file alone would fit
    monkeypatch.setattr(Hub, "sizes", {f"model-0000{n}-of-00002.safetensors": two_thirds for n in (1, 2)})
    with pytest.raises(ModelError, match=r"the disk is full: .* GB free, .* GB are needed"):
        resolve("org/x", lambda _line: None, hub)
    assert not weights_asked_for()


def test_ctrl_c_ends_a_download_at_once(hub: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home")}
    with subprocess.Popen(
        [sys.executable, "-m", "shared.local.cli", "pull", "org/x"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            until(weights_asked_for, 60, "the download")
            child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=20)
        finally:
            child.kill()
    assert child.returncode == 130
    assert said.endswith("segue pull: interrupted\n")
