"""The whole deployment on this machine: one router, some prefill and decode workers, each a child process.

    segue up ──┬── python -m router  --port 8000 --workers prefill=…,decode=…
               ├── python -m prefill --links-port … --admin-port …
               └── python -m decode  --links-port … --admin-port …

Ports are reserved without a race: each is bound here, not listened on, for as long as the deployment lives. Linux
lets a child listen on it (both set SO_REUSEADDR), but gives it to no process that asks for any free port. A child that
starts again gets its own port back. This file decides what runs and with which settings; `children` runs it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shared.engine.checkpoint.memory_plan import RESERVE_BYTES, context_bound
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.transformers_config import FallbackConfig
from shared.engine.checkpoint.weight_files import require_whole
from shared.engine.config import Budget
from shared.links.keys import LinkRole, new_key_files, open_in_memory
from shared.local.children import HOST, Child, ChildProcesses
from shared.local.config import LocalConfig, LocalSettings, environment_of, unknown_everywhere
from shared.local.console import Service, StartupConsole
from shared.local.model_store import hub_id_of, name_of, resolve
from shared.local.shapes import (
    Shape,
    built_for_cuda,
    described,
    gpus_for,
    gpus_of,
    gpus_to_use,
    has_driver,
    require_gpus,
    shape_of,
)
from shared.primitives.errors import ConfigError, StartError
from shared.process.api_keys import key_line
from shared.process.listening import is_loopback
from shared.process.resources import memory_budget, usable_cores
from shared.process.settings import flags_of
from shared.wire.messages import Role
from shared.worker.worker_config import WorkerConfig

KEY_NAME = "default"  # of --api-key, in metrics and logs
PREFILL_NICE = 2  # a running stream goes first; more would starve prompts, and decode would run half empty
WORKERS: tuple[Role, ...] = ("prefill", "decode")
KILL_TOKEN_BYTES = 24
WEIGHT_BYTES_MIN = 2  # of the smallest dtype; a worker knows its own and checks again, with the KV pages


def up(settings: LocalSettings, console: StartupConsole) -> None:
    """Run the deployment until SIGINT or SIGTERM. Raises StartError, one sentence, when it cannot start."""
    gpus, why_none = gpus_to_use(settings.config.device, gpus_of(os.environ), with_cuda=built_for_cuda())
    settings, shape = shaped(settings, len(gpus))
    config = settings.config
    require_gpus(len(gpus), Shape(config.prefill, config.decode), settings.gpus_each)
    if config.device == "cuda" and not has_driver():
        raise StartError(
            "--device cuda needs an NVIDIA GPU and its driver; this machine has none: leave it out"
        )
    if settings.ignored:
        console.print_line(f"no use on one machine: {', '.join(settings.ignored)}")
    for sentence in unknown_everywhere(os.environ):
        console.print_line(sentence)
    if shape or why_none:
        console.print_line(shape or why_none)
    with contextlib.ExitStack() as stack:
        host, budget = router_host(settings), memory_budget()
        router_port, admin_port = _ports(config, host, stack)
        model = _servable_folder(settings, console, None if gpus else budget)
        keys = _keys_in_memory(stack)
        name = config.served_model_name or name_of(config.model)
        common = ["--model", str(model), "--served-model-name", name]
        common += ["--host", HOST, "--admin-host", HOST]
        common += ["--log-level", config.log_level, "--log-format", config.log_format]
        if shares := describe_shares(settings, budget):
            console.print_line(shares)
        counts: dict[Role, int] = {"prefill": config.prefill, "decode": config.decode}
        workers = [
            _worker(role, number, [*common, *_worker_flags(role, settings, budget)], stack)
            for role, count in counts.items()
            for number in range(count)
        ]
        addresses = ",".join(f"{child.role}={HOST}:{_links_port(child)}" for child in workers)
        ports = ["--port", str(router_port), "--admin-port", str(admin_port)]
        router = Child(
            "router",
            "router",
            admin_port,
            [*common, *ports, *_alias_flags(config.model, name), "--workers", addresses],
            environment_of("router", os.environ),
        )
        sizes = [getattr(settings.gpus_each, worker.role) for worker in workers]
        for worker, own in zip(workers, gpus_for(gpus, sizes), strict=True):
            worker.environment = {**worker.environment, **own}
        children = [router, *workers]
        for child in children:
            descriptor = keys["router" if child is router else "worker"]
            child.inherited = (descriptor,)
            child.arguments += ["--link-keys-file", f"/dev/fd/{descriptor}", "--uid", child.name]
            child.arguments += settings.roles[child.role].flags
        router.arguments += ["--host", host]
        has_keys = _require_key(router, settings, stack)
        if not (is_loopback(host) or has_keys):
            console.print_line("the API is open to the network, without authentication: see --api-key")
        kills, kill_token = _live_page(router, host, stack)
        address = f"{_reachable(host)}:{router_port}"
        service = Service(address, router.admin_address, name, has_keys, settings.has_tls, kill_token)
        ChildProcesses(children, console, service, kills_fd=kills).run()


def shaped(settings: LocalSettings, gpus: int) -> tuple[LocalSettings, str]:
    """The settings with the numbers of processes for so many GPUs, and what to say of them; empty: nothing."""
    config, given = settings.config, settings.config.model_fields_set
    shape = shape_of(
        gpus,
        config.prefill if "prefill" in given else None,
        config.decode if "decode" in given else None,
        whole=settings.decode_computes_prompts and not config.prefill_gpus,
        each=settings.gpus_each,
    )
    chosen = config.model_copy(update=shape._asdict())
    described_here = described(gpus, shape) if gpus and not given >= {"prefill", "decode"} else ""
    return replace(settings, config=chosen), described_here


def _servable_folder(settings: LocalSettings, console: StartupConsole, budget: Budget | None) -> Path:
    """The model's folder, which is fetched if need be. Raises StartError."""
    folder = resolve(
        settings.config.model,
        console.print_line,
        require=lambda read: require_servable(read, settings, budget),
    )
    require_whole(folder)
    return folder


def require_servable(
    model: ModelConfig | FallbackConfig, settings: LocalSettings, budget: Budget | None
) -> None:
    """Refuse a model of which its configuration alone tells that workers would. Raises StartError.

    `budget` None: the weights lie in GPU memory, of which a worker knows.
    """
    _require_context(model, settings)
    if budget:
        require_memory(model, settings.config.prefill + settings.config.decode, budget)


def _alias_flags(model: str, name: str) -> list[str]:
    """The model's Hub id is a name of it, too, unless it is the first already."""
    hub_id = hub_id_of(model)
    return [] if hub_id in (None, name) else [f"--model-aliases={hub_id}"]


def router_host(settings: LocalSettings) -> str:
    """Where the router's API listens: as `--host` or the file's section of the router says, else on loopback."""
    flags = settings.roles["router"].flags
    of_file = next((flag.removeprefix("--host=") for flag in flags if flag.startswith("--host=")), HOST)
    return settings.config.host or of_file


def _reachable(host: str) -> str:
    """An address of this machine at which a router that listens on `host` is found."""
    address = {"0.0.0.0": HOST, "::": "::1"}.get(host, host)
    return f"[{address}]" if ":" in address else address


def _require_key(router: Child, settings: LocalSettings, stack: contextlib.ExitStack) -> bool:
    """Make the router ask for `--api-key`: whether it asks for any key. Raises ConfigError for both ways."""
    key, file = settings.config.api_key, settings.api_keys_file
    if key and file:
        raise ConfigError("--api-key and the router's apiKeysFile are given: leave out one of them")
    if key:
        descriptor = open_in_memory(f"{key_line(KEY_NAME, key)}\n".encode())
        stack.callback(os.close, descriptor)
        router.inherited = (*router.inherited, descriptor)
        router.arguments += ["--api-keys-file", f"/dev/fd/{descriptor}"]
    return bool(key or file)


def _live_page(router: Child, host: str, stack: contextlib.ExitStack) -> tuple[int, str]:
    """Let the router show the live page. Out of this end of a pipe come the names of workers that it kills.

    And the token that the page needs for it. -1 and none: it kills no worker, for others than this machine see it.
    """
    router.arguments += ["--live-page", "true"]
    if not is_loopback(host):
        return -1, ""
    token = secrets.token_urlsafe(KILL_TOKEN_BYTES)
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    token_file = open_in_memory(token.encode())  # command lines are read by everybody
    for descriptor in (reading, writing, token_file):
        stack.callback(os.close, descriptor)
    router.inherited = (*router.inherited, writing, token_file)
    router.arguments += ["--kill-worker-fd", str(writing), "--kill-token-file", f"/dev/fd/{token_file}"]
    return reading, token


def _keys_in_memory(stack: contextlib.ExitStack) -> dict[LinkRole, int]:
    """A descriptor of each role's link keys, which only the children of that role inherit."""
    keys = {role: open_in_memory(content) for role, content in new_key_files().items()}
    for descriptor in keys.values():
        stack.callback(os.close, descriptor)
    return keys


def _ports(config: LocalConfig, host: str, stack: contextlib.ExitStack) -> tuple[int, int]:
    """Hold the router's ports, the API's and that of /metrics. Two sockets could be bound to one, one would listen."""
    if config.router_port == config.admin_port != 0:
        flags = flags_of(LocalConfig, "router_port")
        raise StartError(
            f"{flags} and --admin-port are both {config.admin_port}; choose another --admin-port"
        )
    api = stack.enter_context(_reserved(config.router_port, flags_of(LocalConfig, "router_port"), host))
    return api, stack.enter_context(_reserved(config.admin_port, "--admin-port"))


def _worker(role: Role, number: int, given: list[str], stack: contextlib.ExitStack) -> Child:
    admin_port, links_port = (stack.enter_context(_reserved(0)) for _ in range(2))
    arguments = [*given, "--admin-port", str(admin_port), "--links-port", str(links_port)]
    return Child(f"{role}-{number}", role, admin_port, arguments, environment_of(role, os.environ))


def _worker_flags(role: Role, settings: LocalSettings, budget: Budget) -> list[str]:
    """What each worker is given: all cores and an equal share of memory. Settings of its role come later and win."""
    config = settings.config
    flags = ["--device", config.device, "--threads", str(config.threads or usable_cores())]
    flags += ["--max-total-tokens", str(config.max_total_tokens)]
    if config.context_len:
        flags += ["--context-len", str(config.context_len)]
    if role in _roles_that_share(settings):
        flags += ["--memory-bytes", str(budget.memory_bytes // (config.prefill + config.decode))]
    return [*flags, "--nice", str(PREFILL_NICE)] if role == "prefill" else flags


def _roles_that_share(settings: LocalSettings) -> list[Role]:
    """The roles that run here and whose settings name no memory size: they share what the machine has."""
    configs = _worker_configs(settings).items()
    return [role for role, each in configs if not each.memory_bytes and getattr(settings.config, role)]


def _worker_configs(settings: LocalSettings) -> dict[Role, WorkerConfig]:
    configs = {role: settings.roles[role].config for role in WORKERS}
    return {role: each for role, each in configs.items() if isinstance(each, WorkerConfig)}


def describe_shares(settings: LocalSettings, budget: Budget) -> str:
    """How the memory is divided, for the workers that share; empty: none does."""
    sharing = _roles_that_share(settings)
    count = settings.config.prefill + settings.config.decode
    if sharing and count == 1:
        return f"memory: the {sharing[0]} worker is given {_gib(budget.memory_bytes)} ({budget.origin})"
    whose = "worker" if len(sharing) > 1 else f"{sharing[0]} worker" if sharing else ""
    return whose and (
        f"memory: each {whose} is given {_gib(budget.memory_bytes // count)}, one of {count} equal shares of "
        f"{_gib(budget.memory_bytes)} ({budget.origin})"
    )


def _require_context(model: ModelConfig | FallbackConfig, settings: LocalSettings) -> None:
    """Raise ConfigError for a context that the model was not made for; the workers would each say the same, later."""
    asked = {flags_of(LocalConfig, "context_len"): settings.config.context_len}
    asked |= {f"contextLen of {role}": each.context_len for role, each in _worker_configs(settings).items()}
    for setting, context_len in asked.items():
        context_bound(model, context_len or None, setting)


def require_memory(model: ModelConfig | FallbackConfig, workers: int, budget: Budget) -> None:
    """Refuse at once what can never fit, before it is fetched and each worker has loaded its libraries to say so."""
    needed = needed_bytes(model)
    if budget.memory_bytes < workers * needed:
        raise StartError(
            f"too little memory: {_gib(budget.memory_bytes)} ({budget.origin}) for {workers} workers that "
            f"need at least {_gib(needed)} each; use a smaller model or fewer workers"
        )


def needed_bytes(config: ModelConfig | FallbackConfig) -> int:
    """What a worker of this model needs at least, without its KV pages."""
    if isinstance(config, ModelConfig):
        return config.weight_bytes(WEIGHT_BYTES_MIN) + RESERVE_BYTES
    return config.parameters * WEIGHT_BYTES_MIN + RESERVE_BYTES


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _links_port(child: Child) -> str:
    return child.arguments[child.arguments.index("--links-port") + 1]


@contextlib.contextmanager
def _reserved(port: int, flag: str = "", host: str = HOST) -> Iterator[int]:
    """Hold a port (0: a free one) that only a child will listen on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, port))
        except OSError as error:
            raise StartError(why_not_ours(port, flag, error, host)) from None
        yield holder.getsockname()[1]


def why_not_ours(port: int, flag: str, error: OSError, host: str = HOST) -> str:
    """Why we cannot have this port, in one sentence."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is not free on {host}; choose another {flag}"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{host} is no address of this machine; choose another --host, such as 0.0.0.0 for all"
    return f"cannot listen on {host}:{port}: {error.strerror}"
