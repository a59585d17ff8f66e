"""A router's process: tokenizer, links, core and HTTP server put together, and taken apart at the end.

Ready means that the tokenizer is loaded and

    discovery kubernetes    pods can be listed and watched; there need not be any: requests wait for them, bounded
    discovery static        a prefill and a decode worker of the list have been up that can serve together

After that the router stays ready, even when no worker is up.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvloop

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.effects import RequestFailed
from router.discovery.polling import Pace
from router.discovery.router_peers import RouterPeers
from router.discovery.static import Discovery, StaticDiscovery
from router.discovery.worker_address import static_workers
from router.http.app import make_app
from router.http.client_connections import ClientConnections
from router.http.completions import OpenAIServing
from router.http.prompts import Prompts
from router.http.server import Server, listen
from router.shell import RouterShell
from router.text.tokenizer import Tokenizer, hide_torch
from shared.errors import ConfigError, InvariantError
from shared.links.keys import LinkKeys, read_keys
from shared.links.session import LinkSettings
from shared.links.sockets import RouterLinks
from shared.messages import WORKER_ROLES, Hello
from shared.process import gauges
from shared.process.health import Health
from shared.process.logs import write_note
from shared.process.metrics import Metrics

Discover = Callable[[RouterLinks, Health], Discovery]

PUBLISH_SECONDS = 0.2  # between two refreshes of /metrics

log = structlog.get_logger(__name__)

SHUTTING_DOWN = RequestFailed(503, "this router is shutting down: try again", retry_after_seconds=1.0)


def serve(config: RouterConfig) -> None:
    """Run until SIGINT or SIGTERM; raises `StartError` where it cannot start."""
    if not config.model:
        raise ConfigError("--model is required: the folder with the model's tokenizer")
    discover = _discovery(config)
    keys = read_keys(config.link_keys_file, "router")
    listener = listen(config.host, config.port)
    hide_torch()
    tokenizer = Tokenizer(Path(config.model))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, discover, keys, listener, tokenizer))


def _discovery(config: RouterConfig) -> Discover:
    """How workers are found; raises `StartError` where they cannot be."""
    workers = static_workers(config.workers)
    if config.discovery == "static":
        return lambda links, health: StaticDiscovery(workers, links, health)
    if workers:
        raise ConfigError("--workers is for --discovery static: with kubernetes, pods are the workers")
    if not config.pod_selector:
        raise ConfigError(
            "--pod-selector is required: which pods of the namespace are workers of this release"
        )
    from router.discovery import kubernetes, pod_api  # 35 MiB that static discovery does not need

    pace = Pace(config.relist_seconds, config.watch_read_seconds)
    namespace = config.namespace or pod_api.own_namespace()
    api = pod_api.PodApi(pod_api.connect(), namespace, config.pod_selector)
    return lambda links, health: kubernetes.KubernetesDiscovery(
        api, pace, links, health, partial(write_note, logger="router.discovery")
    )


async def _serve(
    config: RouterConfig,
    discover: Discover,
    keys: LinkKeys,
    listener: socket.socket,
    tokenizer: Tokenizer,
) -> None:
    core = RouterCore(config, asyncio.get_running_loop().time())
    health = Health(config.loop_seconds_max)
    hello = _hello(config)
    links = RouterLinks(
        keys,
        hello,
        _link_settings(config),
        on_ready=lambda: shell.links_ready(),
        write_note=partial(write_note, logger="shared.links"),
    )
    listed = config.discovery == "static"
    shell = RouterShell(core, links, health.become_ready if listed else lambda: None)
    prompts = Prompts(tokenizer, config)
    serving = OpenAIServing(shell, tokenizer, prompts, config)
    discovery = discover(links, health)
    clients = ClientConnections(config)
    figures = MetricsPublisher(core, links, discovery, health, clients)
    peers = RouterPeers(hello.uid, discovery.routers)
    app = make_app(serving, shell, peers, health, figures.render)
    publishing = asyncio.create_task(figures.publish_for_ever())
    try:
        discovery.start()
        log.info("router.listening", port=listener.getsockname()[1], ready=health.ready)
        server = Server(app, config, clients, health.start_draining, lambda: serving.fail_all(SHUTTING_DOWN))
        await _serve_until_broken(server, listener)
    finally:
        publishing.cancel()
        await peers.close()
        discovery.close()
        shell.close()
        prompts.close()
        links.close()


async def _serve_until_broken(server: Server, listener: socket.socket) -> None:
    """Serve until stopped. A core that met a state it excludes cannot be trusted: close the links, and raise that."""
    broken: list[InvariantError] = []

    def judge(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if isinstance(error := context.get("exception"), InvariantError):
            broken.append(error)
            server.stop()

    asyncio.get_running_loop().set_exception_handler(judge)
    await server.serve(sockets=[listener])
    if broken:
        raise broken[0]


class MetricsPublisher:
    """What /metrics and /readyz show: refreshed at each scrape, and between them so that nothing piles up."""

    def __init__(
        self,
        core: RouterCore,
        links: RouterLinks,
        discovery: Discovery,
        health: Health,
        clients: ClientConnections,
    ):
        self._metrics = Metrics("router")
        self._core = core
        self._links = links
        self._discovery = discovery
        self._health = health
        self._clients = clients

    def render(self) -> bytes:
        """The text of /metrics, as of now."""
        self._publish()
        return self._metrics.render()

    async def publish_for_ever(self) -> None:
        """Refresh every `PUBLISH_SECONDS`."""
        while True:
            self._publish()
            await asyncio.sleep(PUBLISH_SECONDS)

    def _publish(self) -> None:
        self._metrics.publish(self._core.counters)
        self._metrics.publish(self._links.counters)
        self._metrics.publish(self._clients.counters)
        self._metrics.set(gauges.CONNECTIONS, len(self._clients))
        self._discovery.publish(self._metrics)
        self._metrics.set(gauges.READY, self._health.ready)
        for state, count in self._core.requests_by_state.items():
            self._metrics.set(gauges.REQUESTS_RUNNING, count, state=state)
        workers = {role: len(self._core.fleet.of_role(role)) for role in WORKER_ROLES}
        for role, count in workers.items():
            self._metrics.set(gauges.WORKERS, count, worker_role=role)
        self._health.facts = {"workers_up": sum(workers.values())}


def _hello(config: RouterConfig) -> Hello:
    uid = config.uid or f"{socket.gethostname()}-{os.getpid()}"
    return Hello(session=0, role="router", uid=uid, epoch=secrets.randbits(64))


def _link_settings(config: RouterConfig) -> LinkSettings:
    return LinkSettings(heartbeat_seconds=config.heartbeat_seconds, silence_seconds=config.silence_seconds)
