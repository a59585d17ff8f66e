"""A router's process: tokenizer, links, core and HTTP server put together, and taken apart at the end.

Ready means that the tokenizer is loaded and

    discovery kubernetes    EndpointSlices can be listed and watched; they may be empty: requests wait, bounded
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
from starlette.types import ASGIApp

from router.access.key_ring import KeyRing
from router.access.keyed_clients import KeyedClients
from router.admin import RouterPages
from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.effects import RequestFailed
from router.discovery.polling import Pace
from router.discovery.router_peers import RouterPeers
from router.discovery.static import Discovery, StaticDiscovery
from router.discovery.worker_address import static_workers
from router.listener.connections import ClientConnections
from router.listener.server import Server, listen
from router.listener.tls import ServerCertificate, certificate_of
from router.live.endpoint import LiveViews
from router.metrics_publisher import MetricsPublisher
from router.openai.answers.resumable_streams import Resuming
from router.openai.app import make_app
from router.openai.prompts.prompts import Prompts
from router.openai.serving import OpenAIServing
from router.shell import RouterShell
from router.text.folder_trial import try_folder
from router.text.model_folder import read_sampling_defaults
from router.text.tokenizer import Tokenizer, hide_torch
from shared.links.keys import LinkKeys, read_keys
from shared.links.session import LinkSettings
from shared.links.sockets import RouterLinks
from shared.primitives.errors import ConfigError, InvariantError
from shared.process.admin_port import AdminPort
from shared.process.health import Health, probe_pages
from shared.process.logs import write_note
from shared.process.metrics import Metrics
from shared.process.role_main import spare_what_is_loaded
from shared.wire.messages import Hello

Discover = Callable[[RouterLinks, Health], Discovery]

log = structlog.get_logger(__name__)

SHUTTING_DOWN = RequestFailed(503, "this router is shutting down: try again", retry_after_seconds=1.0)


def serve(config: RouterConfig) -> None:
    """Run until SIGINT or SIGTERM; raises `StartError` where it cannot start."""
    if not config.model:
        raise ConfigError("--model is required: the folder with the model's tokenizer")
    if config.port == config.admin_port != 0:
        raise ConfigError(f"--port and --admin-port are both {config.port}; choose another --admin-port")
    discover = _discovery(config)
    keys = read_keys(config.link_keys_file, "router")
    ring = KeyRing(config.api_keys_file) if config.api_keys_file else None
    certificate = certificate_of(config)
    listener = listen(config.host, config.port)
    health, metrics = Health(config.loop_seconds_max), Metrics("router")
    admin = AdminPort(config.admin_host or config.host, config.admin_port, probe_pages(health, metrics))
    hide_torch()
    folder, chat_template = Path(config.model), Path(config.chat_template) if config.chat_template else None
    try_folder(folder, config.template_seconds_max, chat_template)
    tokenizer = Tokenizer(
        folder, config.template_seconds_max, config.tool_call_parser, config.reasoning_parser, chat_template
    )
    if tokenizer.tokens > tokenizer.vocab_size:  # each prompt with one of the others is refused
        log.warning(
            "tokenizer.has_more_tokens", tokenizer_size=tokenizer.tokens, vocab_size=tokenizer.vocab_size
        )
    defaults = _sampling_defaults(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            _serve(
                config,
                discover,
                keys,
                ring,
                certificate,
                listener,
                tokenizer,
                defaults,
                health,
                metrics,
                admin,
            )
        )


def _discovery(config: RouterConfig) -> Discover:
    """How workers are found; raises `StartError` where they cannot be."""
    workers = static_workers(config.workers)
    if config.discovery == "static":
        return lambda links, health: StaticDiscovery(workers, links, health)
    if workers:
        raise ConfigError("--workers is for --discovery static: with kubernetes, pods are the workers")
    if not config.slice_selector:
        raise ConfigError(
            "--slice-selector is required: which EndpointSlices of the namespace are those of this release"
        )
    from router.discovery import kubernetes, slice_api  # 35 MiB that static discovery does not need

    pace = Pace(config.relist_seconds, config.watch_read_seconds)
    namespace = config.namespace or slice_api.own_namespace()
    api = slice_api.SliceApi(slice_api.connect, namespace, config.slice_selector)
    return lambda links, health: kubernetes.KubernetesDiscovery(
        api,
        pace,
        links,
        health,
        partial(write_note, logger="router.discovery"),
        _uid(config),
        config.cell_workers_max,
    )


async def _serve(
    config: RouterConfig,
    discover: Discover,
    keys: LinkKeys,
    ring: KeyRing | None,
    certificate: ServerCertificate | None,
    listener: socket.socket,
    tokenizer: Tokenizer,
    sampling_defaults: dict[str, float],
    health: Health,
    metrics: Metrics,
    admin: AdminPort,
) -> None:
    core = RouterCore(config, asyncio.get_running_loop().time())
    hello, breakage = _hello(config), Breakage()
    links = RouterLinks(
        keys,
        hello,
        _link_settings(config),
        on_ready=lambda: shell.links_ready(),
        write_note=partial(write_note, logger="shared.links"),
    )
    on_paired = health.become_ready if config.discovery == "static" else lambda: None
    shell = RouterShell(core, links, on_paired, breakage.happened)
    prompts = Prompts(tokenizer, config)
    resuming, clients = Resuming(keys.own.secret), ClientConnections(config)
    serving = OpenAIServing(shell, tokenizer, prompts, config, sampling_defaults, resuming)
    discovery = discover(links, health)
    keyed = KeyedClients(ring, config, discovery.routers_ready) if ring else None
    figures = MetricsPublisher(metrics, core, links, discovery, health, clients, serving, keyed, certificate)
    peers = RouterPeers(hello.uid, discovery.routers)
    live = LiveViews(core, shell, peers, hello.uid, discovery.routers, config)
    app = make_app(serving, health, peers.draw_rid, partial(_around, keyed, figures), live.on_api)
    scrape = figures.publish_for_scrape
    admin.answer = RouterPages(admin.answer, scrape, shell, peers, config.prompts_max, live.on_admin).answer
    publishing = asyncio.create_task(figures.publish_for_ever())
    try:
        spare_what_is_loaded()
        discovery.start()
        ports = {"port": listener.getsockname()[1], "admin_port": admin.port}
        log.info("router.listening", **ports, ready=health.ready)

        def become_unready() -> None:
            health.start_draining()
            shell.start_draining()
            live.feed.close()

        end_answers = partial(serving.fail_all, SHUTTING_DOWN)
        server = Server(app, config, clients, become_unready, end_answers, certificate)
        await _serve_until_broken(server, listener, breakage)
    finally:
        publishing.cancel()
        if keyed:
            keyed.close()
        await asyncio.to_thread(admin.close)  # it may wait for an answer of this loop
        await peers.close()
        discovery.close()
        shell.close()
        prompts.close()
        links.close()


def _around(keyed: KeyedClients | None, figures: MetricsPublisher, app: ASGIApp) -> ASGIApp:
    """What stands before the application: the page of metrics needs no key, all else does."""
    return figures.gateway.around(keyed.guard(app) if keyed else app)


class Breakage:
    """The first error after which this process cannot be trusted: its server stops, and the error ends the process."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.stop: Callable[[], None] = lambda: None

    def happened(self, error: BaseException) -> None:
        """Stop serving because of `error`."""
        if self.error is None:
            self.error = error
            self.stop()

    def judge(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take in what nothing on the event loop has caught; a client's broken connection is no breakage."""
        error = context.get("exception")
        if isinstance(error, InvariantError):
            self.happened(error)
        else:
            loop.default_exception_handler(context)


async def _serve_until_broken(server: Server, listener: socket.socket, breakage: Breakage) -> None:
    """Serve until stopped. Raises the error after which this process cannot be trusted, if there was one."""
    breakage.stop = server.stop
    asyncio.get_running_loop().set_exception_handler(breakage.judge)
    await server.serve(sockets=[listener])
    if breakage.error is not None:
        raise breakage.error


def _sampling_defaults(config: RouterConfig) -> dict[str, float]:
    """Sampling defaults of the model's folder, unless they are not wanted."""
    if config.generation_config == "none":
        return {}
    defaults = read_sampling_defaults(Path(config.model))
    if defaults:
        log.info("router.sampling_defaults", **defaults)
    return defaults


def _hello(config: RouterConfig) -> Hello:
    return Hello(session=0, role="router", uid=_uid(config), epoch=secrets.randbits(64))


def _uid(config: RouterConfig) -> str:
    return config.uid or f"{socket.gethostname()}-{os.getpid()}"


def _link_settings(config: RouterConfig) -> LinkSettings:
    return LinkSettings(heartbeat_seconds=config.heartbeat_seconds, silence_seconds=config.silence_seconds)
