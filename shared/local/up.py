"""The whole deployment on this machine: one router, some prefill and decode workers, each a child process.

    segue up ──┬── python -m router  --port 8000 --workers prefill=…,decode=…
               ├── python -m prefill --links-port … --http-port …
               └── python -m decode  --links-port … --http-port …

Ports are reserved without a race: each is bound here, not listened on, for as long as the deployment lives. Linux
lets a child listen on it (both set SO_REUSEADDR), never lends it to anybody who asks for a free one, and a child that
starts again finds its own. Here is decided what runs and with which settings; `children` runs it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.engine.dense.config import read_model_config
from shared.engine.gguf.convert import DEFAULT_MODEL
from shared.engine.memory_plan import RESERVE_BYTES, Budget
from shared.errors import StartError
from shared.links.keys import open_new_seed
from shared.local.child_process import HOST, Child
from shared.local.children import ChildProcesses
from shared.local.console import StartupConsole
from shared.local.model_store import name_of, resolve
from shared.local.role_settings import RoleSettings, settings_by_role
from shared.messages import Role
from shared.process.resources import memory_budget, usable_cores
from shared.process.settings import Count, LogLevel, Port, PositiveInt, variable_of
from shared.process.worker_config import DeviceChoice, WorkerConfig

PREFILL_NICE = 2  # a running stream goes first; more would starve prompts, and decode would run half empty
WEIGHT_BYTES_MIN = 2  # of the smallest dtype; a worker knows its own and checks again, with the KV pages


class LocalConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The whole deployment on this machine: router, prefill and decode, each a process of its own."""

    model: Annotated[
        str, Meta(description="a folder, a .gguf file, a Hub id, or smollm2, which is installed with Segue")
    ] = DEFAULT_MODEL
    served_model_name: Annotated[
        str, Meta(description="what clients call the model; empty: as --model calls it")
    ] = ""
    prefill: Annotated[PositiveInt, Meta(le=64, description="prefill processes")] = 1
    decode: Annotated[PositiveInt, Meta(le=64, description="decode processes")] = 1
    max_total_tokens: Annotated[
        Count,
        Meta(
            description="tokens of KV that each worker keeps, and at least one whole context; 0: what memory allows"
        ),
    ] = 12_288
    router_port: Annotated[Port, Meta(description="OpenAI's API; the other ports are free ones")] = 8000
    device: Annotated[DeviceChoice, Meta(description="auto: cuda where torch finds it, else cpu")] = "auto"
    log_level: Annotated[
        LogLevel, Meta(description="least severe log line of the processes; info is one a state change")
    ] = "warning"
    log_format: Annotated[str, Meta(pattern="^(json|console)$", description="console is for eyes")] = (
        "console"
    )
    set: Annotated[
        tuple[str, ...],
        Meta(description="settings of one role: prefill.pages=64,decode.slots=8; wins over its file"),
    ] = ()
    router_config: Annotated[str, Meta(description="YAML file with settings of the router")] = ""
    prefill_config: Annotated[str, Meta(description="YAML file with settings of prefill processes")] = ""
    decode_config: Annotated[str, Meta(description="YAML file with settings of decode processes")] = ""
    threads: Annotated[
        Count,
        Meta(description="CPU threads of each worker; 0: as many as there are cores, shared by all workers"),
    ] = 0


def up(config: LocalConfig, console: StartupConsole) -> None:
    """Run the deployment until SIGINT or SIGTERM. Raises StartError, one sentence, when it cannot start."""
    environment = _environment()
    files = {"router": config.router_config, "prefill": config.prefill_config, "decode": config.decode_config}
    settings = settings_by_role(files, config.set, environment)
    with contextlib.ExitStack() as stack:
        router_port = stack.enter_context(_reserved(config.router_port))
        model = resolve(config.model, console.print_line)
        budget = memory_budget()
        _require_memory(model, config.prefill + config.decode, budget)
        seed = open_new_seed()
        stack.callback(os.close, seed)
        name = config.served_model_name or name_of(config.model)
        common = ["--model", str(model), "--served-model-name", name, "--link-seed-file", f"/dev/fd/{seed}"]
        common += ["--host", HOST, "--log-level", config.log_level, "--log-format", config.log_format]
        if shares := _describe_shares(config, budget, settings):
            console.print_line(shares)
        given = [*common, *_share_of_machine(config, budget)]
        behind = [*given, "--nice", str(PREFILL_NICE)]
        workers = [_worker("prefill", number, behind, stack) for number in range(config.prefill)]
        workers += [_worker("decode", number, given, stack) for number in range(config.decode)]
        addresses = ",".join(f"{child.role}={HOST}:{_links_port(child)}" for child in workers)
        router = Child(
            "router", "router", router_port, [*common, "--port", str(router_port), "--workers", addresses]
        )
        children = [router, *workers]
        for child in children:
            child.arguments += ["--uid", child.name, *settings[child.role].flags]
        ChildProcesses(children, environment, console, inherited=[seed]).run(name)


def _worker(role: Role, number: int, given: list[str], stack: contextlib.ExitStack) -> Child:
    http_port, links_port = (stack.enter_context(_reserved(0)) for _ in range(2))
    arguments = [*given, "--http-port", str(http_port), "--links-port", str(links_port)]
    return Child(f"{role}-{number}", role, http_port, arguments)


def _share_of_machine(config: LocalConfig, budget: Budget) -> list[str]:
    """What each worker is given: all cores and an equal share of memory; settings of its role may say otherwise."""
    threads = config.threads or usable_cores()
    memory_bytes = budget.memory_bytes // (config.prefill + config.decode)
    share = ["--threads", str(threads), "--memory-bytes", str(memory_bytes)]
    return ["--device", config.device, *share, "--max-total-tokens", str(config.max_total_tokens)]


def _describe_shares(config: LocalConfig, budget: Budget, settings: Mapping[str, RoleSettings]) -> str:
    """How the memory is divided, for those workers whose settings leave it to us; empty: for none."""
    configs = {role: told.config for role, told in settings.items()}
    ours = [
        role for role, told in configs.items() if isinstance(told, WorkerConfig) and not told.memory_bytes
    ]
    count = config.prefill + config.decode
    whose = "worker" if len(ours) > 1 else f"{ours[0]} worker" if ours else ""
    return whose and (
        f"memory: each {whose} is given {_gib(budget.memory_bytes // count)}, one of {count} equal shares of "
        f"{_gib(budget.memory_bytes)} ({budget.origin})"
    )


def _require_memory(model: Path, workers: int, budget: Budget) -> None:
    """Refuse at once what can never fit, before each worker has loaded its libraries to say the same."""
    needed = read_model_config(model).parameters * WEIGHT_BYTES_MIN + RESERVE_BYTES
    if budget.memory_bytes < workers * needed:
        raise StartError(
            f"too little memory: {_gib(budget.memory_bytes)} ({budget.origin}) for {workers} workers that "
            f"need at least {_gib(needed)} each; use a smaller model or fewer workers"
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _links_port(child: Child) -> str:
    return child.arguments[child.arguments.index("--links-port") + 1]


@contextlib.contextmanager
def _reserved(port: int) -> Iterator[int]:
    """Hold a port (0: a free one) that only a child will listen on."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((HOST, port))
        except OSError as error:
            raise StartError(why_not_ours(port, error)) from None
        yield holder.getsockname()[1]


def why_not_ours(port: int, error: OSError) -> str:
    """Why we cannot have this port, in one sentence."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is not free on {HOST}; choose another --router-port"
    return f"cannot listen on {HOST}:{port}: {error.strerror}"


def _environment() -> dict[str, str]:
    """Ours, without our own settings, and with the working folder never imported from."""
    ours = {variable_of(setting.name) for setting in msgspec.structs.fields(LocalConfig)}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
