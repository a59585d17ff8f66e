"""Who holds the lock, shown by processes that are killed, frozen and run at once in one folder."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from shared.model_cache.lock import Lock
from tests.waiting import soon, until

SILENCE_SECONDS = 2.0
# Holds the lock until its input ends; says so. Within, a file that must not be there yet.
HOLDER = """
import sys
from pathlib import Path
from shared.model_cache.lock import Lock
lock = Lock(Path(sys.argv[1]), sys.argv[2], touch_seconds=0.2, silence_seconds=2.0)
if "far" in sys.argv:  # on another node, as others see it
    Lock._place = lambda self, file: "another kernel " + sys.argv[2]
lock.acquire()
inside = Path(sys.argv[1] + ".inside")
if "alone" in sys.argv:
    inside.touch(exist_ok=False)
print("held", lock.number, flush=True)
sys.stdin.read()
if "alone" in sys.argv:
    inside.unlink()
lock.release()
print("released", flush=True)
"""


def hold(path: Path, owner: str, *words: str, stdin: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), owner, *words],
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(30)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "name@commit"


def own(path: Path) -> Lock:
    return Lock(
        path, "me", touch_seconds=0.2, silence_seconds=SILENCE_SECONDS, handed_seconds=3 * SILENCE_SECONDS
    )


def test_on_one_node_a_killed_holder_is_followed_at_once(path: Path) -> None:
    holder = hold(path, "other")
    assert line(holder) == "held 1"
    end(holder)
    began_at = monotonic()
    lock = own(path)
    lock.acquire()
    assert monotonic() - began_at < soon(1)
    assert lock.number == 2
    lock.release()


def test_from_another_node_a_killed_holder_is_followed_after_its_silence(path: Path) -> None:
    holder = hold(path, "other", "far")
    assert line(holder) == "held 1"
    end(holder)
    began_at = monotonic()
    lock = own(path)
    lock.acquire()
    assert SILENCE_SECONDS < monotonic() - began_at < SILENCE_SECONDS + soon(2)
    lock.release()


def test_a_holder_that_touches_keeps_it_for_longer_than_the_silence(path: Path) -> None:
    holder = hold(path, "other", "far")
    assert line(holder) == "held 1"
    waiter = hold(path, "waiter")
    with pytest.raises(subprocess.TimeoutExpired):
        waiter.wait(2 * SILENCE_SECONDS)
    assert holder.stdin is not None
    holder.stdin.close()
    assert (line(holder), line(waiter)) == ("released", "held 2")
    end(waiter)
    end(holder)


def test_a_frozen_holder_that_was_followed_ends_itself_when_it_wakes(path: Path) -> None:
    holder = hold(path, "other", "far")
    assert line(holder) == "held 1"
    holder.send_signal(signal.SIGSTOP)
    lock = own(path)
    lock.acquire()
    holder.send_signal(signal.SIGCONT)
    assert holder.wait(30) == 1
    assert lock.is_held()
    lock.release()
    end(holder)


def test_a_holder_whose_volume_was_away_still_sees_that_it_was_followed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[OSError] = []
    lost: list[str] = []
    looks = Lock.is_held

    def is_held(self: Lock) -> bool:
        try:
            return looks(self)
        except OSError as error:
            failed.append(error)
            raise

    lock = own(path)
    lock.on_lost = lost.append
    lock.acquire()
    monkeypatch.setattr(Lock, "is_held", is_held)
    away = path.parent.rename(path.parent.with_name("away"))
    until(lambda: bool(failed), 10, "a touch fails")
    away.rename(path.parent)
    path.with_name(f"{path.name}.lock.2").touch()
    until(lambda: bool(lost), 10, "it sees the other one's file")
    lock.release()


@pytest.mark.parametrize("where", ["near", "far"])
def test_of_many_that_follow_a_dead_holder_one_holds_it_at_a_time(path: Path, where: str) -> None:
    """Each makes a file that must not be there, so two at once would fail; all have their turn."""
    holder = hold(path, "dead", where)
    assert line(holder) == "held 1"
    end(holder)
    crowd = [hold(path, f"pod-{number}", where, "alone", stdin=subprocess.DEVNULL) for number in range(6)]
    said = [process.communicate(timeout=120)[0].split() for process in crowd]
    assert sorted(words[1] for words in said) == [str(number) for number in range(2, 8)]
    assert [process.returncode for process in crowd] == [0] * 6
    assert sorted(found.name for found in path.parent.iterdir()) == [
        f"{path.name}.lock.7",
        f"{path.name}.lock.7.released",
    ]


def test_what_is_handed_over_waits_for_the_pods_next_container(path: Path) -> None:
    first = own(path)
    first.acquire()
    first.hand()
    waiter = hold(path, "waiter")
    with pytest.raises(subprocess.TimeoutExpired):
        waiter.wait(1.5 * SILENCE_SECONDS)
    second = own(path)
    assert second.resume(first.number)
    second.release()
    assert line(waiter) == "held 2"
    end(waiter)


def test_a_container_that_never_starts_is_followed_and_cannot_take_it_back(path: Path) -> None:
    first = own(path)
    first.acquire()
    first.hand()
    waiter = own(path)
    waiter.owner = "other"
    began_at = monotonic()
    waiter.acquire()
    assert monotonic() - began_at > 3 * SILENCE_SECONDS
    assert not own(path).resume(first.number)
    waiter.release()


def test_a_pod_whose_containers_all_start_again_has_its_own_lock_at_once(path: Path) -> None:
    first = own(path)
    first.acquire()
    first.hand()
    again = own(path)
    began_at = monotonic()
    again.acquire()
    assert monotonic() - began_at < soon(0.5)
    again.release()
