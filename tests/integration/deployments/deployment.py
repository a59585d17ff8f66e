"""A real deployment for tests: `segue up` as a child process, found out about only as an operator could.

Processes are found among the children of the command (`running`) by their command lines, figures are read from
`/metrics`. Nothing here knows the inside of any process.
"""

from __future__ import annotations

import itertools
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import yaml

from tests.integration.deployments.aggregated import AGGREGATED, at_prefill, config_of_shape, flags_of_shape
from tests.integration.deployments.cut_model import cut_model
from tests.integration.deployments.ranked import RANKED, config_of_ranks, flags_of_ranks, require_ranks
from tests.integration.deployments.running import Running
from tests.metric_pages import held_in, samples_of
from tests.waiting import until

START_SECONDS_MAX = 120.0
_FOLDER = tempfile.TemporaryDirectory(prefix="roles-")  # gone when the tests end
_NUMBERS = itertools.count()
RoleConfigs = Mapping[str, Mapping[str, object]]  # role → settings, in camelCase


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """One process of the deployment."""

    pid: int
    role: str
    uid: str
    admin_port: int
    pages: int  # of its pool, where its command line tells; else 0


@dataclass
class LocalDeployment:
    """A running `segue up`."""

    command: Running
    router_port: int
    client: openai.OpenAI  # OpenAI's own, which must not paper over a failure by trying again
    workers: int  # as many as were ready in the beginning

    @property
    def url(self) -> str:
        """Where the router listens."""
        return f"http://127.0.0.1:{self.router_port}"

    @property
    def admin_url(self) -> str:
        """Where the router answers probes, scrapes and questions about a request."""
        return f"http://127.0.0.1:{self.processes('router')[0].admin_port}"

    def processes(self, role: str | None = None) -> list[RunningProcess]:
        """The live children of `segue up`, by uid."""
        found = [
            process for pid, words in self.command.children().items() if (process := _describe(pid, words))
        ]
        return sorted((p for p in found if role in (None, p.role)), key=lambda p: p.uid)

    def metrics(self, process: RunningProcess) -> dict[str, float]:
        """Everything at `/metrics`, as `name{label=value,…}` without the role."""
        url = f"http://127.0.0.1:{process.admin_port}/metrics"
        return samples_of(httpx2.get(url, timeout=10.0, verify=False).text)  # certificates take 50 ms to read

    def total(self, role: str, name: str) -> float:
        """A metric summed over the processes of a role."""
        return sum(self.metrics(process).get(name, 0.0) for process in self.processes(role))

    def held(self) -> dict[str, float]:
        """What requests still hold anywhere, or what is lost; empty when all is as before the first request.

        A process that does not listen yet, as after a kill, counts as if it held something.
        """
        held: dict[str, float] = {}
        for process in self.processes():
            try:
                metrics = self.metrics(process)
            except httpx2.ConnectError:
                held[f"{process.uid} does not listen"] = 1.0
                continue
            held.update({f"{process.uid} {name}": value for name, value in held_in(metrics).items()})
            pages = sum(value for name, value in metrics.items() if name.startswith("segue_pages{"))
            if process.pages and pages != process.pages:
                held[f"{process.uid} pages of {process.pages}"] = pages
        return held

    def all_linked(self) -> bool:
        """Whether the router sees every worker up."""
        (router,) = self.processes("router")
        up = [value for name, value in self.metrics(router).items() if name.startswith("segue_workers{")]
        return sum(up) == self.workers

    def live_requests(self, state: str) -> float:
        """Requests that the router has in this state."""
        return self.total("router", f"segue_requests_running{{state={state}}}")


@contextmanager
def deployment(
    *flags: str,
    as_shipped: bool = False,
    config: RoleConfigs | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[LocalDeployment]:
    """`segue up` with these flags and settings of roles, ready, and gone afterwards.

    It serves the model that is cut, and a worker computes on one thread: several wait for each other by spinning, which
    costs a quarter more CPU time where cores are few. `as_shipped`: the whole model, on all cores.
    """
    port = free_port()
    cheap = () if as_shipped or "--model" in flags else ("--model", str(cut_model()), "--threads", "1")
    config = config if as_shipped else at_prefill(config)
    if ranked := RANKED and bool(cheap) and "--device" not in flags:
        flags, config = flags_of_ranks(flags), config_of_ranks(config)
    command = segue_up("--router-port", str(port), *cheap, *flags, config=config, environment=environment)
    base_url = f"http://127.0.0.1:{port}/v1"
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=180.0)
    try:
        command.line(lambda line: line.startswith("ready in "), START_SECONDS_MAX)
        running = LocalDeployment(command, port, client, workers=0)
        running.workers = len(running.processes()) - 1
        yield running
        if AGGREGATED:
            _require_local_prompts(running)
        if ranked:
            until(running.all_linked, 120, "the return of all workers")
            require_ranks(running)
    finally:
        client.close()
        command.close()


def segue_up(
    *flags: str, config: RoleConfigs | None = None, environment: dict[str, str] | None = None
) -> Running:
    """The command as a user gives it; the settings of roles go through a file in the chart's shape."""
    flags, config = flags_of_shape(flags), config_of_shape(config)
    file = Path(_FOLDER.name, f"{next(_NUMBERS)}.yaml")
    file.write_text(yaml.safe_dump({role: {"config": settings} for role, settings in (config or {}).items()}))
    program = str(Path(sys.executable).with_name("segue"))
    return Running(program, "up", "--config", str(file), *flags, environment=environment)


def _require_local_prompts(running: LocalDeployment) -> None:
    """No prefill worker was there, and whatever was generated began with a prompt that a decode worker computed."""
    assert not running.processes("prefill")
    until(running.all_linked, 60, "the return of all workers")
    prompts, tokens = (
        running.total("decode", f"segue_{name}_total") for name in ("local_prompts", "sampled_tokens")
    )
    assert prompts or not tokens


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _describe(pid: int, command_line: str) -> RunningProcess | None:
    words = command_line.replace("=", " ").split()
    if "-m" not in words:
        return None

    def flag(name: str) -> str:
        return words[words.index(name) + 1] if name in words else ""

    role, ports, pages = words[words.index("-m") + 1], flag("--admin-port"), flag("--kv-pages")
    return RunningProcess(pid, role, flag("--uid"), int(ports or 0), int(pages or 0))
