"""The init container of a pod: `python -m shared.model_cache.fetch_model FOLDER hub | claim | finish | wait`.

    hub      fill the folder from the Hub, or wait for the pod that does
    claim    the same lock for a container of the user's image, which comes next
    finish   what that container has fetched becomes the model
    wait     until another pod has filled the folder: a router's pod, which has no memory for a conversion

A folder that is complete is only looked at: neither the Hub nor its library is asked for anything. The last line of a
failure is one sentence, which is also the container's termination message, so `kubectl describe pod` shows it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time, sleep

from shared.model_cache.folder import ModelFolder, read_plan
from shared.model_cache.gguf import convert_in_a_child
from shared.model_cache.hub import (
    DEFAULT_ENDPOINT,
    TOKENIZER_FILES,
    WANTED,
    Download,
    HubModel,
    gigabytes,
    is_wanted,
)
from shared.model_cache.lock import LOOK_SECONDS, Lock
from shared.model_cache.users_container import NOTHING_TO_DO, check, claim, take_back
from shared.primitives.errors import ModelError

REPORT_SECONDS = 10.0
TERMINATION_MESSAGE = Path("/dev/termination-log")
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(slots=True)
class Progress:
    """Says how far something is, every ten seconds and when it has changed."""

    what: str
    bytes_done: Callable[[], int]
    bytes_needed: Callable[[], int | None]
    _said_at: float = -REPORT_SECONDS
    _said: int = -1

    def look(self) -> None:
        """Print a line if it is time to."""
        if monotonic() - self._said_at < REPORT_SECONDS:
            return
        done, needed = self.bytes_done(), self.bytes_needed()
        if done != self._said:
            share = f" of {gigabytes(needed)} ({done / max(needed, 1):.0%})" if needed else ""
            print_line(f"{self.what}: {gigabytes(done)}{share}")
        self._said, self._said_at = done, monotonic()

    def follow(self, ended: threading.Event) -> None:
        """Look until it has ended."""
        while not ended.wait(1.0):
            self.look()


def print_line(line: str) -> None:
    """A line of the container's log."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fail(sentence: str) -> None:
    """Say it where a person looks, and end this process, whatever its threads are at."""
    print_line(f"segue: {sentence}")
    if TERMINATION_MESSAGE.exists():
        TERMINATION_MESSAGE.write_text(sentence[:4000], encoding="utf-8")
    os._exit(1)


def from_hub(folder: ModelFolder, arguments: argparse.Namespace) -> None:
    """Fill the partial folder, which this process holds, and seal it."""
    patterns = (arguments.gguf,) if arguments.gguf else TOKENIZER_FILES if arguments.tokenizer else WANTED
    source = HubModel(
        arguments.model, arguments.revision, tuple(patterns), arguments.endpoint, arguments.token_source
    )
    download = Download(source, folder.partial)
    needed = download.look()
    download.require_room(_bytes_of(arguments.size_limit))
    there = download.bytes_done()
    goes_on = f", {gigabytes(there)} of them are there" if there else ""
    print_line(f"fetching {arguments.model} at {download.commit}: {gigabytes(needed)}{goes_on}")
    ended = threading.Event()
    began_at = monotonic()
    progress = Progress("fetched", download.bytes_done, lambda: needed)
    threading.Thread(target=progress.follow, args=(ended,), daemon=True).start()
    try:
        download.run()
    finally:
        ended.set()
    print_line(f"fetched {gigabytes(needed - there)} in {monotonic() - began_at:.0f} s")
    _seal(folder, arguments.gguf)


def copy_tokenizer(source: ModelFolder, folder: ModelFolder) -> None:
    """Take a router's files from the workers' folder beside it."""
    for path in source.path.iterdir():
        if path.is_file() and is_wanted(path.name, TOKENIZER_FILES):
            shutil.copyfile(path, folder.partial / path.name)
    folder.seal()


def _seal(folder: ModelFolder, gguf: str) -> None:
    if not gguf:
        folder.seal()
        return
    made = folder.path.with_name(f"{folder.path.name}.converted")
    for left in folder.path.parent.glob(f".{made.name}-*"):
        shutil.rmtree(left)  # of a conversion that was killed
    convert_in_a_child(str(folder.partial / gguf), made, print_line)
    folder.seal(made)


def run(arguments: argparse.Namespace) -> None:
    """One step. Raises ModelError."""
    os.umask(0o002)  # the group of a shared volume may go on with what this user began
    folder = ModelFolder(arguments.folder)
    if arguments.step == "claim":
        arguments.script.write_text(NOTHING_TO_DO, encoding="utf-8")
    if folder.is_complete():
        print_line(f"{folder.path} is complete ({process_time():.2f} s of CPU time)")
        return
    if arguments.step == "wait":
        _wait(folder)
        return
    try:
        folder.path.parent.mkdir(parents=True, exist_ok=True)
        _run_locked(folder, arguments)
    except PermissionError as error:
        raise ModelError(
            f"user {os.getuid()} may not write {error.filename or folder.path}: give the folder to that user (chown "
            f"{os.getuid()}), or set runAsUser in modelSource.securityContext"
        ) from None
    except OSError as error:
        raise ModelError(f"{folder.path} cannot be filled: {error.strerror or error}") from None


def _wait(folder: ModelFolder) -> None:
    """Return when the folder is complete. What fails is said by the pod that fills it."""
    progress = Progress(
        "waiting for a worker's pod that fetches and converts it", folder.bytes_so_far, _planned(folder)
    )
    while not folder.is_complete():
        progress.look()
        sleep(LOOK_SECONDS)
    print_line(f"{folder.path} is complete ({process_time():.2f} s of CPU time)")


def _run_locked(folder: ModelFolder, arguments: argparse.Namespace) -> None:
    lock = Lock(folder.path, os.environ.get("SEGUE_UID") or f"{socket.gethostname()}-{os.getpid()}", fail)
    if arguments.step == "finish":
        take_back(lock, arguments.script)
    else:
        lock.acquire(
            Progress("waiting for another pod that fetches it", folder.bytes_so_far, _planned(folder)).look
        )
    try:
        if folder.is_complete():
            print_line(f"{folder.path} is complete ({process_time():.2f} s of CPU time)")
        elif arguments.step == "claim":
            claim(folder, lock, arguments.script, TERMINATION_MESSAGE)
            return
        elif arguments.step == "finish":
            if not arguments.gguf:
                check(folder)
            _seal(folder, arguments.gguf)
        else:
            folder.begin()
            beside = ModelFolder(arguments.copy_from) if arguments.copy_from else None
            if beside is not None and beside.is_complete():
                copy_tokenizer(beside, folder)
            else:
                from_hub(folder, arguments)
    except BaseException:
        if arguments.step == "finish":
            lock.hand()  # this container is started again, and goes on; if not, another pod does after the silence
        else:
            lock.release()
        raise
    lock.release()


def _planned(folder: ModelFolder) -> Callable[[], int | None]:
    def look() -> int | None:
        plan = read_plan(folder.partial)
        return plan.size_bytes if plan else None

    return look


def _bytes_of(quantity: str) -> int | None:
    """A quantity of Kubernetes, as 4Gi; empty: no limit."""
    if not quantity:
        return None
    match = re.fullmatch(r"([0-9.]+)([kMGT]i?|Ki)?", quantity)
    if match is None:
        raise ModelError(f"modelSource.sizeLimit is {quantity}: expected a size as 40Gi")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """What the chart passes."""
    parser = argparse.ArgumentParser(prog="python -m shared.model_cache.fetch_model")
    parser.add_argument("folder", type=Path, help="the model's folder, under the mount of a cache")
    parser.add_argument("step", choices=["hub", "claim", "finish", "wait"])
    parser.add_argument("--model", default="", help="its id on the Hub")
    parser.add_argument("--revision", default="main", help="the hash of a commit")
    parser.add_argument("--endpoint", default=DEFAULT_ENDPOINT, help="the address of the Hub")
    parser.add_argument("--token-source", default="", help="where the token comes from, for a person")
    parser.add_argument("--size-limit", default="", help="what the volume may hold, as 40Gi")
    parser.add_argument("--tokenizer", action="store_true", help="what a router needs, without weights")
    parser.add_argument("--copy-from", type=Path, help="a folder that may have it")
    parser.add_argument("--gguf", default="", help="the GGUF file to convert")
    parser.add_argument("--script", type=Path, help="of the container between claim and finish")
    return parser.parse_args(words)


def main() -> None:
    """The command; one sentence and status 1 on a `ModelError`, 143 when its pod is deleted."""
    signal.signal(
        signal.SIGTERM, lambda *_: os._exit(143)
    )  # the first process of a container is not ended without
    try:
        run(parse())
    except ModelError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
