"""A command that runs beside a test: its lines as they come, its children, and the certainty that it has ended."""

from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[3]


def ended_within(pids: list[int], seconds: float) -> bool:
    """Whether all these processes end within `seconds`. They need not be children of this one (pidfd)."""
    deadline = monotonic() + seconds
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], max(0.0, deadline - monotonic()))[0]:
                return False
        finally:
            os.close(descriptor)
    return True


class Running:
    """A command whose stdout and stderr are read line by line."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None):
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        self.lines: list[str] = []
        self._reading = threading.Event()
        self._reading.set()
        self._unread: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._unread.put(line.rstrip("\n"))
            self._reading.wait()
        self._unread.put(None)

    def line(self, wanted: Callable[[str], bool], seconds: float) -> str:
        """The next line that is wanted; fails with all that was read when it does not come."""
        deadline = monotonic() + seconds
        while True:
            try:
                line = self._unread.get(timeout=max(0.0, deadline - monotonic()))
            except queue.Empty:
                raise AssertionError(f"not within {seconds} s; so far: {self.lines}") from None
            if line is None:
                self._unread.put(None)
                raise AssertionError(f"the command ended; so far: {self.lines}")
            self.lines.append(line)
            if wanted(line):
                return line

    def read_lines(self) -> list[str]:
        """All lines so far."""
        while not self._unread.empty():
            line = self._unread.get()
            if line is None:
                self._unread.put(None)
                break
            self.lines.append(line)
        return self.lines

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Nobody reads what the command writes, so that its pipe fills up."""
        self._reading.clear()
        try:
            yield
        finally:
            self._reading.set()

    def children(self) -> dict[int, str]:
        """Command lines of the direct children, by pid."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        pids = [int(pid) for task in tasks for pid in _read(task / "children").split()]
        lines = {pid: _command_line(pid) for pid in pids}
        return {pid: line for pid, line in lines.items() if line}

    def close(self) -> None:
        """End it, gently if possible, and read the rest; a second time does nothing."""
        assert self.process.stdout is not None
        if self.process.stdout.closed:
            return
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        self.process.stdout.close()
        while (line := self._unread.get()) is not None:
            self.lines.append(line)


def _command_line(pid: int) -> str:
    """Empty for a process that has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _read(file: Path) -> str:
    """The file, or nothing: a thread may end between being listed and being read."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
