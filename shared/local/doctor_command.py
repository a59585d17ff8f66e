"""`segue doctor`: what this machine lacks for Segue, each finding with what to do about it.

    segue doctor [MODEL] [--port 8000] [--json]

Looks, and changes nothing. With a model, which is fetched if it is not here: whether it fits into memory. The exit
status is 1 where something fails.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from typing import Literal
from urllib.parse import urlsplit

from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.transformers_config import FallbackConfig
from shared.engine.native.build import choose
from shared.local.gpu_links import described, has_slow, links_in, read_topology
from shared.local.model_store import CONVERSION_BYTES, cache_folder, resolve
from shared.local.shapes import built_for_cuda, gpus_of, gpus_to_use, has_driver
from shared.local.up import needed_bytes, require_memory, why_not_ours
from shared.primitives.errors import DoctorError, ModelError, StartError
from shared.process.resources import memory_budget, usable_cores

State = Literal["ok", "warn", "fail"]
HUB_SECONDS_MAX = 3.0
ROUTER_SECONDS_MAX = 3.0
ROUTER_BYTES_MAX = 1 << 16  # of its list of paths
CHILD_SECONDS_MAX = 60.0
SKEW_SECONDS_MAX = 60.0  # of the clock
PACKAGES = ("torch", "transformers", "fastapi", "nixl", "pyzmq")
WORKERS = 2  # of a deployment as `segue up` makes it
PORT_MAX = 65535
ANOTHER_PORT = "segue up --port N takes another"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `remedy` says what to do, unless it is ok."""

    what: str
    state: State
    found: str
    remedy: str = ""


def doctor(model: str, port: int, *, as_json: bool = False) -> None:
    """Print the findings. Raises DoctorError where one fails."""
    findings = []
    for finding in _findings(model, port):
        findings.append(finding)
        if not as_json:
            _write(finding)
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    failed = [finding.what for finding in findings if finding.state == "fail"]
    if failed:
        raise DoctorError(f"Segue cannot run here as it is: {', '.join(failed)}")


def _write(finding: Finding) -> None:
    sys.stdout.write(f"{finding.state:<4}  {finding.what}: {finding.found}\n")
    if finding.remedy:
        sys.stdout.write(f"      {finding.remedy}\n")
    sys.stdout.flush()


def _findings(model: str, port: int) -> Iterator[Finding]:
    checks: list[Callable[[], Finding]] = [packages, compiler, instructions, gpu, lambda: free_port(port)]
    checks += [cache, transfer, hub, lambda: memory(model)]
    for check in checks:
        yield check()


def packages() -> Finding:
    """Whether what Segue is built on is installed."""
    found, missing = [f"Python {sys.version.split()[0]}"], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        remedy = f"make setup, or install {', '.join(missing)}"
        return Finding("packages", "fail", f"without {', '.join(missing)}", remedy)
    return Finding("packages", "ok", ", ".join(found))


def compiler() -> Finding:
    """The CPU engine compiles its kernels once."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        remedy = "install g++ (Debian: apt-get install g++); without it torch computes, several times slower"
        return Finding("compiler", "warn", "none", remedy)
    return Finding("compiler", "ok", path)


def instructions() -> Finding:
    """The best kernels that this CPU can run."""
    chosen, cores = choose(), usable_cores()
    if chosen.needs:
        return Finding("processor", "ok", f"{chosen.name} kernels on {cores} cores")
    return Finding(
        "processor",
        "warn",
        f"{chosen.name} kernels on {cores} cores",
        "a CPU with AVX2 is several times faster",
    )


def gpu() -> Finding:
    """Whether an NVIDIA driver is loaded, and how its GPUs reach each other; none is no fault."""
    if not has_driver():
        return Finding("GPU", "ok", "none: the CPU computes")
    _, why_none = gpus_to_use("auto", gpus_of(os.environ), with_cuda=built_for_cuda())
    if why_none:
        found, _, remedy = why_none.partition("; ")
        return Finding("GPU", "warn", f"the NVIDIA driver is loaded, but {found}", remedy)
    links = links_in(read_topology())
    if not links:
        return Finding("GPU", "ok", "the NVIDIA driver is loaded")
    found = f"the NVIDIA driver is loaded; {described(links)}"
    if not has_slow(links):
        return Finding("GPU", "ok", found)
    remedy = (
        "a worker of several GPUs is slow without NVLink between them: name those that have it in "
        "CUDA_VISIBLE_DEVICES, or give each worker one GPU"
    )
    return Finding("GPU", "warn", found, remedy)


def free_port(port: int) -> Finding:
    """Whether the API's port can be had."""
    if not 0 <= port <= PORT_MAX:
        return Finding("port", "fail", f"{port} is no port", f"name one up to {PORT_MAX}")
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError as error:
            if _is_segue(port):
                return Finding("port", "warn", f"Segue serves at {port} already", ANOTHER_PORT)
            return Finding("port", "fail", why_not_ours(port, "--port", error), ANOTHER_PORT)
    return Finding("port", "ok", f"{port} is free")


def _is_segue(port: int) -> bool:
    """Whether what listens there says so, as a router's `/` does to everyone."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ROUTER_SECONDS_MAX)
    try:
        connection.request("GET", "/")
        said = json.loads(connection.getresponse().read(ROUTER_BYTES_MAX))
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
    return isinstance(said, dict) and said.get("name") == "segue"


def cache() -> Finding:
    """Whether models can be kept."""
    folder = cache_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Finding(
            "cache", "fail", f"{existing} cannot be written", "set XDG_CACHE_HOME to a folder that can"
        )
    if free < CONVERSION_BYTES:
        remedy = "make room, or set XDG_CACHE_HOME to another disk"
        return Finding("cache", "warn", f"{folder} has {free / 1e9:.1f} GB left", remedy)
    return Finding("cache", "ok", f"{folder}, {free / 1e9:.0f} GB left")


def transfer() -> Finding:
    """A process fetches KV pages from itself."""
    words = [sys.executable, "-P", "-m", "shared.local.transfer_check"]
    try:
        ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=CHILD_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        return Finding(
            "KV transfer", "fail", f"nothing for {CHILD_SECONDS_MAX:g} s", "see docs/troubleshooting.md"
        )
    if ended.returncode == 0:
        return Finding("KV transfer", "ok", ended.stdout.strip())
    last = (ended.stderr.strip().splitlines() or [f"its process ended with status {ended.returncode}"])[-1]
    remedy = "UCX_LOG_LEVEL=info python -m shared.local.transfer_check says more"
    return Finding("KV transfer", "fail", last, remedy)


def hub() -> Finding:
    """Whether the Hub can be reached; its answer also tells the time."""
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("expected one like https://huggingface.co")
    except ValueError as error:
        return Finding(
            "Hub", "warn", f"HF_ENDPOINT is {url}, which is no URL ({error})", "correct it, or unset it"
        )
    try:
        said = parsedate_to_datetime(_date_of(url))
        skew = abs(time.time() - said.timestamp())
    except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
        remedy = (
            "models that are here are served all the same; HF_ENDPOINT names another Hub, HTTPS_PROXY a proxy"
        )
        why = getattr(error, "reason", error) or type(error).__name__
        return Finding("Hub", "warn", f"{url} cannot be reached ({why})", remedy)
    if skew > SKEW_SECONDS_MAX:
        return Finding(
            "Hub",
            "warn",
            f"its clock and ours are {skew:.0f} s apart",
            "set the clock: certificates depend on it",
        )
    return Finding("Hub", "ok", f"{url} answers, and the clocks agree")


def _date_of(url: str) -> str:
    """The date in an answer of any status, by way of the proxy that the environment names, as downloads go."""
    question = urllib.request.Request(url, method="HEAD")
    opener = urllib.request.build_opener()  # it reads the environment now; the module's own did once
    try:
        with opener.open(question, timeout=HUB_SECONDS_MAX) as answer:
            return str(answer.headers["Date"])
    except urllib.error.HTTPError as refused:
        with refused:
            return str(refused.headers["Date"])


def memory(model: str) -> Finding:
    """Whether a deployment of the model fits."""
    budget = memory_budget()
    found = f"{budget.memory_bytes / 2**30:.1f} GiB ({budget.origin})"
    if not model:
        return Finding("memory", "ok", found)
    needed = 0
    on_gpus, _ = gpus_to_use("auto", gpus_of(os.environ), with_cuda=built_for_cuda())

    def require(config: ModelConfig | FallbackConfig) -> None:
        nonlocal needed
        needed = WORKERS * needed_bytes(config)
        if not on_gpus:
            require_memory(config, WORKERS, budget)

    try:
        resolve(model, lambda _line: None, require=require)
    except ModelError as error:
        return Finding("model", "fail", str(error), "segue models lists those that are here")
    except StartError as error:
        return Finding("memory", "fail", str(error), "segue models lists those that are here")
    if on_gpus:
        return Finding("memory", "ok", f"{found}; {model} lies in GPU memory, of which a worker tells")
    return Finding(
        "memory", "ok", f"{found}; {model} with two workers needs at least {needed / 2**30:.1f} GiB"
    )
