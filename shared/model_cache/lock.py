"""A lock between processes of several nodes, in a folder that they share: who holds it may fill the model's folder.

A lock is a row of files `NAME.lock.1`, `NAME.lock.2`, …: whoever makes the next one (O_EXCL) holds the lock, until
there is a higher one. The highest is never removed, so two that take over from a dead holder cannot both succeed, and a
holder that was frozen sees that it has lost. Signs lie beside it as files of their own, which are there or not:

    NAME.lock.3            its holder touches it every 10 s; within is who that is
    NAME.lock.3.handed     the holder's process has ended, and a later container of its pod goes on
    NAME.lock.3.started    that container has started, and touches the lock
    NAME.lock.3.released   the next one may take it

A holder is dead when nothing has changed for 60 s by the clock of who waits (so nodes need not agree on the time), or
sooner when the kernel says so: it also holds a `flock`, which is believed by processes of the same kernel on the same
mount alone. Over NFS or FUSE, `flock` may well succeed and mean nothing beyond the node.

    held ──hand()──▶ handed ──started──▶ … ──resume()──▶ held ──release()──▶ released

What it cannot do: stop the writes of a holder that was frozen for more than 60 s and wakes up. That one ends at its
next touch; until then it may write beside its successor, which is why what was continued is compared with its hash.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

TOUCH_SECONDS = 10.0
SILENCE_SECONDS = (
    60.0  # six touches: a node that is out of memory or loses its volume for a while is late by some
)
HANDED_SECONDS = 600.0  # until a later container of the pod has started: its image has to be pulled
LOOK_SECONDS = 2.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def waiting_forever() -> None:
    """Say nothing while another one holds the lock."""


def dying(reason: str) -> None:
    """End this process at once: it must write nothing more."""
    del reason
    os._exit(1)


@dataclass(slots=True)
class Lock:
    """A lock called `path`. `on_lost` is called on a thread of its own if another one has taken it over."""

    path: Path
    owner: str
    on_lost: Callable[[str], None] = dying
    touch_seconds: float = TOUCH_SECONDS
    silence_seconds: float = SILENCE_SECONDS
    handed_seconds: float = HANDED_SECONDS
    number: int = 0  # of the file that this process holds
    _file: int = -1
    _ended: threading.Event = field(default_factory=threading.Event)

    def acquire(self, on_wait: Callable[[], None] = waiting_forever) -> None:
        """Return when this process holds the lock. Calls `on_wait()` every two seconds until then."""
        seen: object = None
        since = monotonic()
        while True:
            highest = max(self._numbers(), default=0)
            if highest == 0 or self._is_free(highest):
                if self._take(highest + 1):
                    return
                continue
            signs = self._signs(highest)
            if signs != seen:
                seen, since = signs, monotonic()
            patience = self.handed_seconds if self._waits_for_a_container(highest) else self.silence_seconds
            if monotonic() - since > patience:
                if self._take(highest + 1):
                    return
                continue
            on_wait()
            sleep(min(LOOK_SECONDS, self.silence_seconds / 4))

    def hand(self) -> None:
        """Leave the lock to a later container of this pod, which calls `resume`."""
        self._mark("handed")
        self._stop()

    def resume(self, number: int) -> bool:
        """Hold again what was handed over; False if another one has taken it meanwhile."""
        self.number = number
        try:
            self._file = os.open(self._name(number), os.O_RDWR)
        except FileNotFoundError:
            return False
        if not self.is_held():
            self._stop()
            return False
        self._hold()
        self._sign("handed").unlink(missing_ok=True)
        return True

    def release(self) -> None:
        """Let the next one have it."""
        if self.is_held():
            self._mark("released")
        self._stop()

    def is_held(self) -> bool:
        """Whether no other one has taken this lock over."""
        return max(self._numbers(), default=0) == self.number

    def _take(self, number: int) -> bool:
        """Make the next file. Whoever lists an old state and makes an old file finds a higher one afterwards."""
        try:
            self._file = os.open(self._name(number), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o664)
        except FileExistsError:
            return False
        self.number = number
        if not self.is_held():
            self._stop()
            self._name(number).unlink(missing_ok=True)
            return False
        self._hold()
        for old in self._numbers():
            if old < number:
                self._remove(old)
        return True

    def _hold(self) -> None:
        """Hold the flock, say so in the file, and begin to touch it."""
        place = "-"
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            place = self._place(self._file)
        except OSError:
            pass  # not on this file system
        os.pwrite(self._file, f"{self.owner}\n{place}\n".encode(), 0)
        self._ended = threading.Event()
        threading.Thread(target=self._touch, args=(self._file, self._ended), daemon=True).start()

    def _touch(self, file: int, ended: threading.Event) -> None:
        while not ended.wait(self.touch_seconds):
            try:
                if not self.is_held():
                    self.on_lost(
                        f"another pod has taken over {self.path}, since nothing was heard of this one"
                    )
                    return
                os.utime(file)
            except OSError:
                pass  # the volume is away: when it is back, the next touch says whether this still holds the lock

    def _stop(self) -> None:
        self._ended.set()
        os.close(self._file)  # and with it goes the flock
        self._file = -1

    def _is_free(self, number: int) -> bool:
        """Whether it was released, or this node's kernel knows that its holder has ended, or this very pod had it."""
        if self._sign("released", number).exists() or self._owner_of(number) == self.owner:
            return True
        if self._sign("handed", number).exists():
            return False
        try:
            file = os.open(self._name(number), os.O_RDWR)
        except OSError:
            return False  # removed by who holds a higher one
        try:
            if os.pread(file, 4096, 0).decode(errors="replace").splitlines()[1:] != [self._place(file)]:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(file)
        return not self._sign("handed", number).exists()  # it may have been handed over meanwhile

    def _owner_of(self, number: int) -> str:
        try:
            return self._name(number).read_text(errors="replace").partition("\n")[0]
        except OSError:
            return ""

    def _signs(self, number: int) -> object:
        """What changes as long as its holder lives. An opened file's time is fresh on NFS, too."""
        try:
            with self._name(number).open("rb") as file:
                touched = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            touched = 0
        return number, touched, self._sign("handed", number).exists(), self._sign("started", number).exists()

    def _waits_for_a_container(self, number: int) -> bool:
        return self._sign("handed", number).exists() and not self._sign("started", number).exists()

    def _numbers(self) -> list[int]:
        pattern = re.compile(re.escape(self.path.name) + r"\.lock\.(\d+)")
        found = (pattern.fullmatch(name) for name in os.listdir(self.path.parent))
        return [int(match[1]) for match in found if match]

    def _name(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.lock.{number}")

    def _sign(self, sign: str, number: int | None = None) -> Path:
        name = self._name(self.number if number is None else number)
        return name.with_name(f"{name.name}.{sign}")

    def _mark(self, sign: str) -> None:
        self._sign(sign).touch()

    def _remove(self, number: int) -> None:
        """The file first: with its signs alone it would seem to be held."""
        for path in (
            self._name(number),
            *(self._sign(sign, number) for sign in ("handed", "started", "released")),
        ):
            path.unlink(missing_ok=True)

    def _place(self, file: int) -> str:
        """The running kernel and the mount, within which a flock is to be believed."""
        return f"{_BOOT_ID.read_text().strip()} {os.fstat(file).st_dev}"
