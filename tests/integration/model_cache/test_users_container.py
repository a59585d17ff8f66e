"""A command of the user's under the lock: three processes one after the other, as the containers of a pod."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from shared.model_cache.folder import ModelFolder
from shared.model_cache.lock import Lock
from shared.model_cache.users_container import claim
from tests.integration.model_cache.fetching import begin, end, files_of_a_model
from tests.waiting import until


class Pod:
    """One pod: its scratch folder, and the cache that it shares."""

    def __init__(self, tmp_path: Path, name: str) -> None:
        self.name, self.folder = name, tmp_path / "cache" / "llama"
        self.scratch = tmp_path / name
        self.scratch.mkdir()
        self.script = self.scratch / "fetch.sh"

    def container(self, step: str) -> subprocess.Popen[str]:
        return begin(self.folder, "--script", str(self.script), step=step, SEGUE_UID=self.name)

    def command(self, *words: str) -> subprocess.Popen[str]:
        """The user's container: nothing but sh and what the command needs."""
        return subprocess.Popen(
            ["sh", str(self.script), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket"
    folder.mkdir()
    for name, content in files_of_a_model().items():
        if "/" not in name:
            assert isinstance(content, bytes)
            (folder / name).write_bytes(content[: 1 << 20])
    return folder


def test_a_command_fills_the_folder_and_a_second_pod_runs_none(tmp_path: Path, bucket: Path) -> None:
    for name, copies in ("one", True), ("two", False):
        pod = Pod(tmp_path, name)
        end(pod.container("claim"))
        log = tmp_path / f"{name}.log"
        end(pod.command("sh", "-c", f"echo copied >{log}; cp {bucket}/* ."))
        said = end(pod.container("finish"))
        assert log.exists() == copies
        assert "is complete" in said or copies
    assert (pod.folder / "model.safetensors").read_bytes() == (bucket / "model.safetensors").read_bytes()
    assert not pod.folder.with_name("llama.partial").exists()


def test_a_second_pod_waits_for_the_command_of_the_first(tmp_path: Path, bucket: Path) -> None:
    one, two = Pod(tmp_path, "one"), Pod(tmp_path, "two")
    end(one.container("claim"))
    waiting = two.container("claim")
    command = one.command("sh", "-c", f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; cp {bucket}/* .")
    assert waiting.stdout is not None
    assert "waiting for another pod" in waiting.stdout.readline()
    (tmp_path / "go").touch()
    end(command)
    end(one.container("finish"))
    assert "is complete" in end(waiting)
    end(two.command("false"))
    end(two.container("finish"))


def test_who_waits_counts_while_folders_come_and_go(tmp_path: Path) -> None:
    """As a command of the user's makes and removes them, and as the partial folder gets its name."""
    folder = ModelFolder(tmp_path / "llama")
    folder.begin()
    (folder.partial / "weights").write_bytes(b"1234")
    coming = [folder.partial / str(number) for number in range(50)]
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            for path in coming:
                path.mkdir()
            for path in coming:
                path.rmdir()

    busy = threading.Thread(target=come_and_go)
    busy.start()
    try:
        assert {folder.bytes_so_far() for _ in range(200)} == {4}
    finally:
        ended.set()
        busy.join()


def test_a_pod_that_is_deleted_while_it_waits_ends_at_once(tmp_path: Path) -> None:
    """By a handler (143, not -15): as the first process of its container no signal ends it without one."""
    one, two = Pod(tmp_path, "one"), Pod(tmp_path, "two")
    end(one.container("claim"))
    waiting = two.container("claim")
    assert waiting.stdout is not None
    assert "waiting for another pod" in waiting.stdout.readline()
    waiting.send_signal(signal.SIGTERM)
    end(waiting, 143)


def test_a_pod_that_is_deleted_while_its_successor_fetches_ends_at_once(tmp_path: Path) -> None:
    pod = Pod(tmp_path, "one")
    end(pod.container("claim"))
    (lock,) = tmp_path.rglob("*.lock.1")
    lock.with_suffix(".2").touch()
    command = pod.command("true")
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    until(lambda: bool(children.read_text(encoding="utf-8")), 10, "its sleep")
    command.send_signal(signal.SIGTERM)
    end(command, 143)


def test_a_command_that_fails_says_where_to_look_and_may_be_run_again(tmp_path: Path, bucket: Path) -> None:
    pod = Pod(tmp_path, "one")
    end(pod.container("claim"))
    said = end(pod.command("sh", "-c", "echo no such bucket; exit 3"), 3)
    assert "no such bucket" in said
    assert "the command of modelSource.fetch ended with status 3: see kubectl logs -c model" in said
    end(pod.command("sh", "-c", f"cp {bucket}/* ."))
    end(pod.container("finish"))
    assert (pod.folder / "config.json").exists()


def test_a_command_that_ends_at_once_leaves_no_process(tmp_path: Path) -> None:
    """Else that process would touch the lock for ever, where no container ends it."""
    pod = Pod(tmp_path, "one")
    end(pod.container("claim"))
    for _ in range(60):
        end(pod.command("true"))
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(pod.script) in _text(path)]
    assert running == []


def _text(path: Path) -> str:
    """Empty for a process that has ended meanwhile."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def test_a_sleep_that_takes_whole_seconds_alone_is_enough(tmp_path: Path) -> None:
    """As POSIX has it: otherwise the lock would be touched as fast as the machine can."""
    pod, tools, touches = Pod(tmp_path, "one"), tmp_path / "tools", tmp_path / "touches"
    tools.mkdir()
    (tools / "sleep").write_text('#!/bin/sh\ncase $1 in *[!0-9]*) exit 1 ;; esac\nexec /bin/sleep "$1"\n')
    (tools / "touch").write_text(f'#!/bin/sh\necho >>{touches}\nexec /usr/bin/touch "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    end(pod.container("claim"))
    command = ["sh", str(pod.script), "sleep", "1"]
    subprocess.run(command, check=True, timeout=30, env={"PATH": f"{tools}:{os.environ['PATH']}"})
    assert len(touches.read_text().splitlines()) == 2  # as the command began, and as it ended


def test_a_command_that_leaves_no_model_is_told_so(tmp_path: Path) -> None:
    pod = Pod(tmp_path, "one")
    end(pod.container("claim"))
    end(pod.command("sh", "-c", "mkdir llama; touch llama/config.json"))
    said = end(pod.container("finish"), 1)
    assert "left no config.json in its working directory, but .plan" not in said
    assert "left no config.json in its working directory, but llama: let it copy" in said


def test_a_command_whose_lock_another_pod_has_taken_is_killed(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "llama")
    lock = Lock(folder.path, "one", touch_seconds=0.1, handed_seconds=2)
    lock.acquire()
    message = tmp_path / "message"
    claim(folder, lock, tmp_path / "fetch.sh", message)
    command = subprocess.Popen(
        ["sh", str(tmp_path / "fetch.sh"), "sleep", "600"], stderr=subprocess.PIPE, text=True
    )
    until(lambda: (tmp_path / "llama.lock.1.started").exists(), 10, "the command")
    (tmp_path / "llama.lock.2").touch()
    assert command.wait(30) == 1
    assert message.read_text().startswith("another pod has taken over this fetch")
    again = subprocess.run(
        ["sh", str(tmp_path / "fetch.sh"), "false"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (again.returncode, "delete this pod" in again.stderr) == (1, True)
    command.communicate()


def test_a_touch_that_comes_late_makes_no_lock_anew(tmp_path: Path) -> None:
    """Two pods have taken it over since the shell looked, so it would seem to hold that lock again, for ever."""
    pod, tools = Pod(tmp_path, "one"), tmp_path / "tools"
    end(pod.container("claim"))
    (mine,) = tmp_path.rglob("*.lock.1")
    tools.mkdir()
    late = f'#!/bin/sh\nrm -f {mine}; : >{mine.with_suffix(".3")}; exec /usr/bin/touch "$@"\n'
    (tools / "touch").write_text(late)
    (tools / "touch").chmod(0o755)
    command = ["sh", str(pod.script), "sleep", "1"]
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    ended = subprocess.run(command, check=False, timeout=60, env=path, capture_output=True, text=True)
    assert (ended.returncode, mine.exists()) == (1, False)
    assert "another pod has taken over this fetch" in ended.stderr


def test_a_conversion_that_is_tried_again_is_left_to_its_pod(tmp_path: Path) -> None:
    """The first attempt failed, and a pod that comes during the second one must not run its command meanwhile."""
    one, two = Pod(tmp_path, "one"), Pod(tmp_path, "two")
    gguf = one.folder.with_name("llama.partial") / "model.gguf"
    end(one.container("claim"))
    end(one.command("sh", "-c", "echo none >model.gguf"))
    finish = ["--script", str(one.script), "--gguf", gguf.name]
    said = end(begin(one.folder, *finish, step="finish", SEGUE_UID="one"), 1)
    assert "is not a GGUF file" in said
    gguf.unlink()
    os.mkfifo(gguf)
    again = begin(one.folder, *finish, step="finish", SEGUE_UID="one")
    with gguf.open("wb"):  # comes when it is read; until its end the conversion goes on
        waiting = two.container("claim")
        assert waiting.stdout is not None
        assert "waiting for another pod" in waiting.stdout.readline()
        waiting.send_signal(signal.SIGTERM)
        end(waiting, 143)
    assert "is not a GGUF file" in end(again, 1)


def test_a_pod_that_is_deleted_ends_its_command(tmp_path: Path) -> None:
    pod = Pod(tmp_path, "one")
    end(pod.container("claim"))
    command = pod.command("sh", "-c", f"trap 'exit 9' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done")
    until((tmp_path / "up").exists, 30, "the command")
    command.send_signal(signal.SIGTERM)
    assert command.wait(30) != 0
    command.communicate()
