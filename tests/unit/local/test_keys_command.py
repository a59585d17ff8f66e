"""`segue keys`: a key is shown once, its hash goes into the file, and a file that routers would refuse is not made."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.local.cli import run as segue
from shared.primitives.errors import ConfigError
from shared.process.api_keys import digest_of, key_line, new_key, parse_keys
from tests.waiting import until

Keys = Callable[[list[str]], str]


@pytest.fixture
def keys(capsys: pytest.CaptureFixture[str]) -> Keys:
    """Carry out the command: what it prints."""

    def run(words: list[str]) -> str:
        segue(["keys", *words])
        return capsys.readouterr().out

    return run


def key_in(text: str) -> str:
    (key,) = (word for word in text.split() if word.startswith("sk-segue-"))
    return key


def test_a_new_key_is_shown_once_with_its_line(keys: Keys) -> None:
    said = keys(["new", "shop", "rpm=60", "models=smollm2"])
    (line,) = (line for line in said.splitlines() if line.startswith("  shop "))
    (read,) = parse_keys(line.encode()).values()
    assert read.digest == digest_of(key_in(said).encode())
    assert (read.rpm, read.models) == (60, ("smollm2",))


def test_the_line_is_appended_and_the_key_is_not_in_the_file(tmp_path: Path, keys: Keys) -> None:
    file = tmp_path / "keys"
    first = key_in(keys(["new", "shop", "rpm=60", "--file", str(file)]))
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    file.write_text(file.read_text().rstrip("\n"))  # as some editors leave it
    second = key_in(keys(["new", "batch", "--file", str(file)]))
    read = parse_keys(file.read_bytes())
    assert [read[digest_of(key.encode())].name for key in (first, second)] == ["shop", "batch"]
    assert "sk-segue" not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [file]
    assert keys(["check", str(file)]).splitlines()[1:] == ["  batch", "  shop"]


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file to another user")
def test_the_file_stays_that_of_who_reads_it(tmp_path: Path, keys: Keys) -> None:
    """A router that is another user would keep its old keys: root draws, the router reads."""
    file = tmp_path / "keys"
    keys(["new", "shop", "--file", str(file)])
    os.chown(file, 10_001, 10_002)
    file.chmod(0o440)
    keys(["new", "batch", "--file", str(file)])
    now = file.stat()
    assert (now.st_uid, now.st_gid, now.st_mode & 0o777) == (10_001, 10_002, 0o440)


def test_a_file_that_cannot_be_exchanged_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    shop = (tmp_path / "keys" / "shop").resolve()
    program = (
        "import resource, signal, sys; from pathlib import Path; from shared.local.keys_command import new\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "new('shop', [], Path(sys.argv[1]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(shop)], capture_output=True, text=True, check=False
    )
    assert f"{shop} cannot be written: File too large" in ended.stderr
    assert list(shop.parent.iterdir()) == []


def test_a_link_that_somebody_laid_where_it_writes_first_is_not_followed(tmp_path: Path, keys: Keys) -> None:
    file, other = tmp_path / "keys", tmp_path / "of another"
    other.write_text("kept")
    (tmp_path / f".keys.{os.getpid()}").symlink_to(other)
    keys(["new", "shop", "--file", str(file)])
    assert other.read_text() == "kept"
    assert len(parse_keys(file.read_bytes())) == 1


def waited_for(descriptor: int) -> bool:
    """Whether somebody waits for the lock of the open file."""
    inode = f":{os.fstat(descriptor).st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_two_that_add_a_key_at_once_lose_none(tmp_path: Path, keys: Keys) -> None:
    file = tmp_path / "keys"
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # another command is at work here
    adds = threading.Thread(target=keys, args=(["new", "shop", "--file", str(file)],))
    adds.start()
    until(lambda: waited_for(folder), 30, "that the second one waits")
    file.write_text(key_line("clinic", new_key(), "") + "\n")
    os.close(folder)
    adds.join()
    assert sorted(key.name for key in parse_keys(file.read_bytes()).values()) == ["clinic", "shop"]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["new"], "arguments are required: NAME"),
        (["new", "--file", "x"], "arguments are required: NAME"),
        (["new", "shop", "rpm=none"], "no key was drawn: rpm must be"),
        (["new", "shop", "--rpm=3"], "unknown flag --rpm=3"),
        (["new", "sh op"], "no key was drawn: the name must be"),
        (["check", "/nowhere/keys"], "/nowhere/keys cannot be read: No such file"),
        (["revoke", "shop"], "invalid choice: 'revoke' .choose from '?new'?, '?check"),
    ],
)
def test_a_mistake_is_one_sentence(argv: list[str], complaint: str, keys: Keys) -> None:
    with pytest.raises(ConfigError, match=complaint):
        keys(argv)


def test_a_file_that_routers_would_refuse_is_left_as_it_is(tmp_path: Path, keys: Keys) -> None:
    file = tmp_path / "keys"
    keys(["new", "shop", "rpm=60", "--file", str(file)])
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="is wrong in line 2: line 1 has the same name and other limits"):
        keys(["new", "shop", "rpm=61", "--file", str(file)])
    assert file.read_bytes() == before


def test_the_command_draws_and_refuses() -> None:
    def command(*argv: str) -> subprocess.CompletedProcess[str]:
        code = "from shared.local.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60, check=False
        )

    assert key_in(command("keys", "new", "shop").stdout)
    refused = command("keys", "new", "9")
    assert refused.returncode == 1
    assert refused.stderr.startswith("segue keys: no key was drawn")
    assert refused.stdout == ""
