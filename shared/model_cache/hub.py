"""Downloads a commit of the Hub into a folder, and goes on where a download has broken off.

huggingface_hub says what there is, and who may have it; it would begin every file anew, under a name of the process, so
the bytes are fetched here: a file grows as NAME.incomplete, is asked for from its end on (`Range`), and gets its name
when it is as large as the Hub says. What an earlier process began is compared with its SHA-256, too: it may have ended
in mid-write. Four files at a time.

Only safetensors, JSON and tokenizer files are fetched: no pickled weights, no code.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from time import sleep
from typing import BinaryIO

from shared.engine.checkpoint.model_impl import read_config
from shared.model_cache.folder import Plan, read_plan, write_plan
from shared.primitives.errors import ModelError

# What a router needs of a model; workers need the weights, too.
TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
WANTED = ["*.safetensors", *TOKENIZER_FILES]
# The same weights once more: in another layout (`original/` of gpt-oss and Llama), or as one file of Mistral's.
UNWANTED = ["*/*", "consolidated*"]
DEFAULT_ENDPOINT = "https://huggingface.co"
INFO_SECONDS_MAX = 30.0
FILES_AT_ONCE = 4
ATTEMPTS = 4  # in a row without a byte
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of the commit."""

    name: str
    size_bytes: int
    sha256: str | None  # of large files


@dataclass(frozen=True, slots=True)
class HubModel:
    """What to fetch. `token_source` says to a person where the token comes from; empty: there is none."""

    model: str
    revision: str
    patterns: tuple[str, ...]
    endpoint: str = DEFAULT_ENDPOINT
    token_source: str = ""


@dataclass(slots=True)
class Download:
    """A commit on its way into `folder`."""

    source: HubModel
    folder: Path
    commit: str = ""
    files: list[HubFile] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def look(self) -> int:
        """Ask the Hub what there is; the bytes of it. Raises ModelError with what to do."""
        from huggingface_hub import HfApi

        source = self.source
        try:
            info = HfApi(endpoint=source.endpoint).model_info(
                source.model, revision=source.revision, files_metadata=True, timeout=INFO_SECONDS_MAX
            )
        except Exception as error:
            raise ModelError(sentence_of(error, source)) from None
        self.commit = info.sha or source.revision
        self.files = [
            HubFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else None)
            for each in info.siblings or []
            if is_wanted(each.rfilename, source.patterns)
        ]
        if not self.files:
            raise ModelError(f"{source.model} has no file {' or '.join(source.patterns)}")
        if "*.safetensors" in source.patterns and not any(
            file.name.endswith(".safetensors") for file in self.files
        ):
            raise ModelError(
                f"{source.model} has no safetensors weights, and others (.bin, .pt) are never loaded: choose a "
                "repository that has them, or one with a GGUF file, which modelSource.gguf names"
            )
        return sum(file.size_bytes for file in self.files)

    def require_room(self, size_limit_bytes: int | None) -> None:
        """Raise ModelError unless what is still to come fits on the disk, and all of it within the limit."""
        needed = sum(file.size_bytes for file in self.files)
        if size_limit_bytes is not None and needed > size_limit_bytes:
            raise ModelError(
                f"{self.source.model} has {gigabytes(needed)}, and modelSource.sizeLimit allows "
                f"{gigabytes(size_limit_bytes)}: raise it to {-(-needed // (1 << 30)) + 1}Gi"
            )
        there = sum(self._bytes_of(file) for file in self.files)
        free = shutil.disk_usage(self.folder).free
        if needed - there > free:
            raise ModelError(
                f"the disk is too small: {gigabytes(needed - there)} of {self.source.model} are still to come, and "
                f"{self.folder.parent} has {gigabytes(free)} free: enlarge the volume of modelSource.cache or choose a "
                "node with more disk"
            )

    def bytes_done(self) -> int:
        """How much of it is there."""
        return sum(self._bytes_of(file) for file in self.files)

    def run(self) -> None:
        """Fetch what is not there yet, the configuration first. Raises ModelError with what to do."""
        self._forget_other_commits()
        configs = [file for file in self.files if file.name == "config.json"]
        for file in configs:
            self._fetch(file)
            read_config(self.folder)  # refuses what Segue cannot compute, before gigabytes of it
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            futures = [pool.submit(self._fetch, file) for file in self.files if file not in configs]
            done, unfinished = wait(futures, return_when=FIRST_EXCEPTION)
            if unfinished:
                self.stopped.set()
                for future in unfinished:
                    future.cancel()
            for future in done:
                future.result()

    def _forget_other_commits(self) -> None:
        """A branch has moved since this folder was begun: of another commit nothing is kept."""
        needed = sum(file.size_bytes for file in self.files)
        begun = read_plan(self.folder)
        if begun is not None and begun.commit != self.commit:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        write_plan(self.folder, Plan(self.commit, needed))

    def _bytes_of(self, file: HubFile) -> int:
        for path in (self.folder / file.name, self._incomplete(file)):
            if path.exists():
                return min(path.stat().st_size, file.size_bytes)
        return 0

    def _incomplete(self, file: HubFile) -> Path:
        return self.folder / f"{file.name}.incomplete"

    def _fetch(self, file: HubFile) -> None:
        target, growing = self.folder / file.name, self._incomplete(file)
        if target.exists() and target.stat().st_size == file.size_bytes:
            return
        begun_earlier = growing.exists() and growing.stat().st_size > 0
        self._grow(file, growing)
        if begun_earlier and file.sha256 is not None and _sha256(growing) != file.sha256:
            growing.unlink()
            self._grow(file, growing)
        growing.replace(target)

    def _grow(self, file: HubFile, growing: Path) -> None:
        """Fetch from the file's end on until it is whole; a cut connection costs what was under way."""
        attempts = 0
        with growing.open("ab") as out:
            if out.tell() > file.size_bytes:
                out.truncate(0)
            while (begun := out.seek(0, os.SEEK_END)) < file.size_bytes:
                failure = self._attempt(file, out, begun) or OSError("the answer ended before the file did")
                grown = out.seek(0, os.SEEK_END)
                attempts = 1 if grown > begun else attempts + 1
                if grown >= file.size_bytes:
                    continue
                if attempts > ATTEMPTS or self.stopped.is_set() or _is_final(failure):
                    raise ModelError(sentence_of(failure, self.source, file.name))
                sleep(min(2.0**attempts / 4, 8.0))
            if begun > file.size_bytes:
                raise ModelError(
                    f"{self.source.model}/{file.name} has more than the {file.size_bytes} bytes that the Hub says"
                )

    def _attempt(self, file: HubFile, out: BinaryIO, begun: int) -> Exception | None:
        """What ended one request for the rest of the file before its end; None: nothing."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        url = hf_hub_url(self.source.model, file.name, revision=self.commit, endpoint=self.source.endpoint)
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if begun:
            headers["Range"] = f"bytes={begun}-"
        try:
            with get_session().stream("GET", url, headers=headers, timeout=INFO_SECONDS_MAX) as response:
                hf_raise_for_status(response)
                if begun and response.status_code == 200:
                    out.truncate(0)
                for chunk in response.iter_bytes(CHUNK_BYTES):
                    if self.stopped.is_set():
                        return OSError("another file failed")
                    out.write(chunk)
            out.flush()
        except Exception as error:  # whatever the HTTP library of the day raises
            return error
        return None


def is_wanted(name: str, patterns: Iterable[str]) -> bool:
    """As the Hub's library reads these patterns, in which a star takes slashes as well."""
    return any(fnmatch(name, each) for each in patterns) and not any(fnmatch(name, each) for each in UNWANTED)


def gigabytes(size_bytes: int) -> str:
    """As people say it."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 5e7 else f"{size_bytes / 1e6:.1f} MB"


def sentence_of(error: Exception, source: HubModel, file: str = "") -> str:
    """What went wrong and what to do about it, in one sentence for a person who reads a pod's status."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    model, endpoint = source.model, source.endpoint
    token = f"the token in {source.token_source}" if source.token_source else ""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if isinstance(error, GatedRepoError):
        who = f"{token} has no access" if token else "no token is given"
        return (
            f"{model} is gated, and {who}: accept its licence at {endpoint}/{model}, and give a token of that account "
            "in the Secret modelSource.hub.existingSecret"
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{model} has no revision {source.revision}: give the hash of a commit from "
            f"{endpoint}/{model}/commits/main as modelSource.hub.revision"
        )
    if status in (401, 403) and token:
        return f"the Hub refuses {token} for {model} ({status}): put a valid token with the right to read it there"
    if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
        return (
            f"{endpoint} has no model {model}, or it is private and needs a token, which the Secret "
            "modelSource.hub.existingSecret holds"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: {model} does not fit; enlarge the volume of modelSource.cache or choose another node"
    what = f"{model}/{file}" if file else model
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return (
        f"{what} cannot be fetched from {endpoint} ({reason}): let the pods reach it (networkPolicy.egress), or set "
        "HTTPS_PROXY or SSL_CERT_FILE in modelSource.extraEnv"
    )


def _is_final(error: Exception) -> bool:
    """Whether another attempt would end alike."""
    response = getattr(error, "response", None)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return True
    return response is not None and 400 <= response.status_code < 500 and response.status_code != 429


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
