"""A router as a process of its own: how it starts, refuses to start, and ends."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.integration.deployments.deployment import free_port
from tests.integration.deployments.thread_stop import stopped
from tests.integration.routers.linked_worker import LinkedWorker
from tests.link_keys import write_new_keys
from tests.unit.router.tiny_model import write_folder
from tests.waiting import soon, until

BODY = {"model": "tiny", "prompt": "fox"}
PIPE_BYTES = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the keys of the links beside it."""
    root = tmp_path_factory.mktemp("router")
    write_new_keys(root / "keys")
    return write_folder(root / "tiny")


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else gets."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def workers(folder: Path) -> Iterator[str]:
    """A prefill and a decode worker that give each stream one token and then nothing; the setting that names them."""
    keys = folder.parent / "keys" / "worker.pem"
    prefill, decode = LinkedWorker("prefill", "p", keys, hands_over=True), LinkedWorker("decode", "d", keys)
    yield f"prefill=127.0.0.1:{prefill.port},decode=127.0.0.1:{decode.port}"
    prefill.close()
    decode.close()


def start(
    folder: Path,
    port: int,
    *flags: str,
    workers: str = "prefill=127.0.0.1:1",
    before: tuple[str, ...] = (),
    program: tuple[str, ...] = ("-m", "router"),
) -> subprocess.Popen[str]:
    """A router; unless `workers` says otherwise its only worker never comes."""
    command = [*before, sys.executable, *program, "--model", str(folder), "--port", str(port)]
    command += ["--admin-port", "0"]
    command += ["--link-keys-file", str(folder.parent / "keys" / "router.pem"), "--workers", workers, *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def readiness(port: int) -> int:
    return httpx2.get(f"http://127.0.0.1:{port}/health", verify=False).status_code


def wait_until_alive(router: subprocess.Popen[str], port: int) -> None:
    def answered() -> bool:
        try:
            return readiness(port) in (200, 503)
        except httpx2.TransportError:
            return False

    until(lambda: router.poll() is not None or answered(), 30, "the router's first answer")
    assert router.poll() is None, router.communicate()[1]


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM] * 2], ids=["SIGINT", "SIGTERM twice"])
def test_a_signal_ends_the_router_at_once_with_an_error_event_for_its_streams(
    folder: Path, port: int, workers: str, numbers: list[signal.Signals]
) -> None:
    router = start(folder, port, workers=workers)
    wait_until_alive(router, port)
    until(lambda: readiness(port) == 200, 10, "readiness")
    body = BODY | {"stream": True}
    with httpx2.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        began = time.monotonic()
        for number in numbers[:-1]:
            router.send_signal(number)
            until(lambda: readiness(port) == 503, soon(1), "unreadiness")
        router.send_signal(numbers[-1])
        rest = list(lines)
    assert any("shutting down" in line for line in rest)
    _, said = router.communicate(timeout=10)
    assert router.returncode == 0
    assert time.monotonic() - began < soon(3)
    assert "Traceback" not in said


CANCELS_WRONGLY = """
import runpy
from router.core.dispatch import RouterCore

def cancel(self, rid, now):
    raise KeyError(rid)

RouterCore.cancel = cancel
runpy.run_module("router", run_name="__main__")
"""


def test_a_router_whose_core_raises_ends_with_status_1_and_tells_its_clients(
    folder: Path, port: int, workers: str
) -> None:
    router = start(folder, port, workers=workers, program=("-c", CANCELS_WRONGLY))
    wait_until_alive(router, port)
    until(lambda: readiness(port) == 200, 10, "readiness")
    url, body = f"http://127.0.0.1:{port}/v1/completions", BODY | {"stream": True}
    with httpx2.stream("POST", url, json=body, timeout=20) as other:
        lines = other.iter_lines()
        assert next(lines).startswith("data: ")
        with httpx2.stream("POST", url, json=body, timeout=20) as leaving:
            assert next(leaving.iter_lines()).startswith("data: ")
        assert any("shutting down" in line for line in lines)
    _, said = router.communicate(timeout=10)
    assert router.returncode == 1
    assert "Traceback" not in said
    assert said.count('"process.failed"') == 1


def test_a_router_whose_loop_hangs_is_not_alive_until_it_turns_again(folder: Path, port: int) -> None:
    admin_port = free_port()
    router = start(folder, port, "--admin-port", str(admin_port), "--loop-seconds-max", "1")
    wait_until_alive(router, port)

    def liveness() -> int:
        return httpx2.get(f"http://127.0.0.1:{admin_port}/livez", verify=False).status_code

    until(lambda: liveness() == 200, 5, "a loop that turns")
    try:
        with stopped(router.pid):
            until(lambda: liveness() == 503, 10, "the end of liveness")
    except PermissionError:
        pytest.skip("this system does not let a test stop a thread")
    finally:
        until(lambda: liveness() == 200, 10, "liveness")
        router.kill()
        router.communicate()


def test_a_draining_router_takes_requests_for_a_while_and_waits_for_its_streams(
    folder: Path, port: int, workers: str
) -> None:
    flags = ("--keepalive-seconds", "0.1", "--endpoint-lag-seconds", "3", "--drain-seconds", "2")
    router = start(folder, port, *flags, workers=workers)
    wait_until_alive(router, port)
    until(lambda: readiness(port) == 200, 10, "readiness")
    url = f"http://127.0.0.1:{port}"
    with (
        httpx2.Client() as pooled,
        httpx2.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=20) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert "connection" not in pooled.get(f"{url}/v1/models").headers
        began = time.monotonic()
        router.send_signal(signal.SIGTERM)
        until(lambda: pooled.get(f"{url}/health").status_code == 503, soon(1), "unreadiness")
        late: list[tuple[int, str | None]] = []

        def ask() -> bool:
            answer = pooled.get(f"{url}/v1/models")
            late.append((answer.status_code, answer.headers.get("connection")))
            return time.monotonic() - began > 2

        until(ask, 3, "the time that load balancers are left")
        assert set(late) == {(200, "close")}
        until(lambda: refuses(port), 5, "the end of listening")
        assert router.poll() is None
        assert any(next(lines).startswith(":") for _ in range(100)), "the stream lives on"
        rest = list(lines)
    assert any("shutting down" in line for line in rest)
    assert 5 <= time.monotonic() - began < 5 + soon(4)
    router.communicate(timeout=10)
    assert router.returncode == 0


def test_a_router_with_listed_workers_is_ready_once_a_pair_of_them_can_serve(folder: Path, port: int) -> None:
    """Before that a request would wait for workers that still load, and be refused."""
    keys = folder.parent / "keys" / "worker.pem"
    prefill = LinkedWorker("prefill", "p", keys)
    with socket.socket() as later:
        later.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        later.bind(("127.0.0.1", 0))
        decode_port = later.getsockname()[1]
    router = start(folder, port, workers=f"prefill=127.0.0.1:{prefill.port},decode=127.0.0.1:{decode_port}")
    wait_until_alive(router, port)
    until(lambda: prefill.routers == 1, 10, "the link to the prefill worker")
    answer = httpx2.get(f"http://127.0.0.1:{port}/health")
    assert answer.status_code == 503
    assert answer.json()["doing"] == "waiting for workers"
    decode = LinkedWorker("decode", "d", keys, port=decode_port)
    until(lambda: readiness(port) == 200, 10, "readiness")
    assert httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY).status_code == 200
    decode.close()
    prefill.close()
    assert readiness(port) == 200, "a pair that was lost is waited for"
    router.send_signal(signal.SIGINT)
    router.communicate(timeout=10)


def test_a_router_that_is_process_1_and_still_loads_ends_by_sigterm(folder: Path, port: int) -> None:
    """Process 1 of a container has no default action for SIGTERM, and a pod gets only one, whatever it is doing."""
    isolated = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace for processes can be made here")
    router = start(folder, port, before=isolated)
    children = Path(f"/proc/{router.pid}/task/{router.pid}/children")
    until(children.read_text, 10, "the child of unshare")
    first = int(children.read_text())
    until(lambda: b"router" in Path(f"/proc/{first}/cmdline").read_bytes(), 10, "the router's beginning")

    def ended() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGTERM)
        return router.poll() is not None

    until(ended, 10, "the end of a router that loads")
    _, said = router.communicate()
    assert "listening" not in said, "it came to serve before it ended"
    assert "Traceback" not in said


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_router_never_loads_torch_even_where_it_is_installed(folder: Path, port: int) -> None:
    router = start(folder, port)
    wait_until_alive(router, port)
    counted = httpx2.post(f"http://127.0.0.1:{port}/tokenize", json={"prompt": "fox"}).json()["count"]
    loaded = Path(f"/proc/{router.pid}/maps").read_text()
    router.terminate()
    _, said = router.communicate(timeout=10)
    assert counted > 0
    assert "libtorch" not in loaded
    assert "PyTorch" not in said


def test_help_is_answered_without_loading_anything_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "router", "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--stream-backlog-bytes" in answer.stdout
    assert "transformers" not in answer.stderr
    assert "fastapi" not in answer.stderr


WRONG = {
    "no model": (["--model", ""], "--model is required"),
    "a folder that does not exist": (["--model", "/nowhere"], "/nowhere is not a folder"),
    "a folder without a model": (["--model", os.path.dirname(__file__)], "holds no config.json"),
    "workers that are no addresses": (["--workers", "prefill=here"], "prefill=HOST:PORT"),
    "a worker of an unknown role": (["--workers", "router=127.0.0.1:1"], "prefill=HOST:PORT"),
    "no keys": (["--link-keys-file", ""], "--link-keys-file is required"),
    "an unknown flag": (["--colour", "red"], "--colour"),
    "a port out of range": (["--port", "70000"], "--port"),
    "one port for both": (["--port", "4321", "--admin-port", "4321"], "choose another --admin-port"),
}


@pytest.mark.parametrize(("flags", "sentence"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_is_one_sentence_and_status_1(
    folder: Path, port: int, flags: list[str], sentence: str
) -> None:
    router = start(folder, port, *flags)
    _, said = router.communicate(timeout=15)
    assert router.returncode == 1
    assert sentence in said
    assert len(said.strip().splitlines()) == 1


def test_a_port_in_use_is_one_sentence_and_status_1(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        router = start(folder, taken)
        _, said = router.communicate(timeout=15)
    assert router.returncode == 1
    assert f"cannot listen on 127.0.0.1:{taken}" in said
    assert len(said.strip().splitlines()) == 1


def unread_bytes(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    count = array.array("i", [0])
    fcntl.ioctl(process.stderr, termios.FIONREAD, count)
    return count[0]


def send_malformed(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"NO HTTP AT ALL\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_a_router_whose_stderr_nobody_reads_serves_on_and_keeps_its_links(folder: Path, port: int) -> None:
    keys = folder.parent / "keys" / "worker.pem"
    prefill, decode = LinkedWorker("prefill", "p", keys), LinkedWorker("decode", "d", keys)
    workers, admin_port = f"prefill=127.0.0.1:{prefill.port},decode=127.0.0.1:{decode.port}", free_port()
    router = start(folder, port, "--admin-port", str(admin_port), workers=workers)
    assert router.stderr is not None
    fcntl.fcntl(router.stderr, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    wait_until_alive(router, port)
    until(lambda: readiness(port) == 200, 10, "readiness")
    url = f"http://127.0.0.1:{port}"

    def serve() -> None:
        answer = httpx2.post(f"{url}/v1/completions", json=BODY, timeout=10)
        assert answer.status_code == 200

    for _ in range(50):
        serve()
    until(lambda: unread_bytes(router) > PIPE_BYTES - 1024, 10, "a full pipe")
    for _ in range(30):
        send_malformed(port)
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 4, 10, "more than the links' limit of silence")
    serve()
    assert (prefill.routers, decode.routers) == (1, 1), "no link was dialed again"
    page = httpx2.get(f"http://127.0.0.1:{admin_port}/metrics").text
    refused = page.partition('segue_http_connections_ended_total{cause="not_http",role="router"} ')[2]
    assert float(refused.split()[0]) == 30, "they are counted, and no line is written for any"
    router.send_signal(signal.SIGINT)
    assert router.wait(10) == 0
    with router:  # closes the pipes
        pass
    prefill.close()
    decode.close()
