"""Converts a GGUF file by a child process, because that needs torch, which this process does not load."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shared.primitives.errors import ModelError

_STAGE = re.compile(r" *\d+% ")  # as the conversion begins a line that says how far it is

PrintLine = Callable[[str], None]
END_SECONDS_MAX = 1.0  # for each of the ways


def convert_in_a_child(source: str, target: Path, print_line: PrintLine) -> None:
    """Make the folder `target`; prints the stages. Raises ModelError with the last thing that the child says."""
    if importlib.util.find_spec("torch") is None:
        raise ModelError(f"{source} cannot be converted here: that needs torch, which the worker image has")
    last = ""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "shared.engine.gguf.convert", source, str(target)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    ) as child:
        assert child.stderr is not None
        try:
            for line in child.stderr:
                last = line.strip() or last
                if _STAGE.match(line):
                    print_line(f"converting: {last}")
        except BaseException:  # this process is to end, and it would go on alone
            _end(child)
            raise
    if child.returncode == -signal.SIGXCPU:
        raise ModelError(f"the conversion of {source} takes more time than a file of its size explains")
    if child.returncode == -signal.SIGKILL:
        raise ModelError(
            f"the conversion of {source} was killed, most likely for its memory: it takes up to 24 bytes for each byte "
            "of the file; in a pod, raise modelSource.resources.limits.memory"
        )
    if child.returncode != 0:
        raise ModelError(last or f"its conversion ended with status {child.returncode}")


def _end(child: subprocess.Popen[str]) -> None:
    """Ctrl-C at a terminal has reached it, a signal to this process has not. By SIGINT it removes what it made."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            child.wait(END_SECONDS_MAX)
            return
        except subprocess.TimeoutExpired:
            child.send_signal(number)
