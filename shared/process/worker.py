"""A worker's process: loads the model, opens its memory and its links, then turns the loop until told to end.

What a worker *does* is its scheduler's business; the roles differ only in which one they build here. Readiness means:
weights loaded, a fetch from itself passed, links open, not leaving.

SIGTERM lets it leave: it takes nothing new, and ends when nothing here is anybody's any more, or after
`drain_seconds`. A second SIGTERM ends it at once, and so does SIGINT.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Protocol

import structlog

from shared.engine.engine import Engine, Sizes, load
from shared.errors import ConfigError
from shared.kv.kv_memory import KvMemory
from shared.links.keys import read_seed
from shared.links.session import LinkSettings
from shared.links.sockets import WorkerLinks
from shared.messages import Hello, Role
from shared.process.metrics import Metrics
from shared.process.probes import Health, Probes
from shared.process.resources import usable_cores
from shared.process.settings import ProcessConfig
from shared.process.worker_config import WorkerConfig
from shared.scheduling.event_loop import EventLoop, Scheduler
from shared.transfer.fetches import FetchLimits
from shared.transfer.memory import PageMemory
from shared.transfer.nixl import NixlTransfer
from shared.transfer.protocol import KvLink
from shared.transfer.self_fetch import self_fetch

FETCHES_PER_SLOT = 4  # those given up count until they have ended; they must not keep new ones out
LAST_READS_SECONDS_MAX = 2.0  # at the end, for reads under way
PUBLISH_SECONDS = 0.05  # between two refreshes of /metrics

log = structlog.get_logger(__name__)


class WorkerScheduler(Scheduler, Protocol):
    """A scheduler with the figures every worker shows."""

    memory: KvMemory

    @property
    def counters(self) -> object: ...
    @property
    def slots_used(self) -> int: ...
    @property
    def leases_held(self) -> int: ...
    @property
    def empty(self) -> bool: ...
    def leave(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a scheduler is built from."""

    engine: Engine
    transfer: NixlTransfer


def serve(
    config: WorkerConfig,
    role: Role,
    build: Callable[[WorkerParts], WorkerScheduler],
    *,
    leases_max: int,
    fetch_seconds_max: float,
    host_share: float,
) -> None:
    """Run one worker until it is told to end, and has. Raises `StartError` when it cannot start."""
    if not config.model:
        raise ConfigError("--model must name a folder with safetensors, config.json and a tokenizer")
    os.nice(config.nice)
    uid = config.uid or f"{socket.gethostname()}-{secrets.token_hex(4)}"
    epoch = secrets.randbits(64)
    health, metrics = Health(config.loop_seconds_max), Metrics(role)
    probes = Probes(config.host, config.http_port, health, metrics)
    engine = _load_engine(config, health, host_share)
    health.doing = "checking the transfer"
    transfer = _open_transfer(config, engine, uid, epoch, leases_max, fetch_seconds_max)
    hello = Hello(
        session=0,
        role=role,
        uid=uid,
        epoch=epoch,
        model_name=config.served_model_name or Path(config.model).name,
        model=engine.model_fingerprint,
        kv_format=engine.kv_format,
        determinism=engine.determinism,
        limits=engine.limits,
        eos_token_ids=tuple(sorted(engine.eos_token_ids)),
    )
    seed = read_seed(Path(config.link_seed_file))
    ending = ShutdownSignals(config.drain_seconds)
    links = WorkerLinks(config.host, config.links_port, seed, hello, _link_settings(config))
    scheduler = build(WorkerParts(engine, transfer))
    loop = EventLoop(scheduler, engine.device, transfer, links, monotonic, overlap=config.overlap)
    health.become_ready()
    log.info("ready", links=links.address, probes=probes.port)
    try:
        metrics.set("segue_ready", 1)
        publish = partial(_publish, metrics, role, scheduler, links, transfer)
        _turn_until_empty(ending, scheduler, loop, health, publish)
    finally:
        health.become_unready("ending")
        links.close()
        _let_reads_end(transfer)
        transfer.close()
        engine.device.close()
        probes.close()


class ShutdownSignals:
    """What signals have asked for, from now on. Before there are links nobody waits for a goodbye: they just end."""

    def __init__(self, drain_seconds: float):
        self.at_once = False
        self.deadline: float | None = None  # monotonic seconds; None: nobody has asked
        self._drain_seconds = drain_seconds
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, self._end)

    def _leave(self, *_: object) -> None:
        if self.deadline is not None:
            self.at_once = True
        self.deadline = monotonic() + self._drain_seconds

    def _end(self, *_: object) -> None:
        self.at_once = True


def _load_engine(config: WorkerConfig, health: Health, host_share: float) -> Engine:
    def progress(what: str, share: float) -> None:
        health.doing = f"{what} {share:.0%}"

    sizes = Sizes(
        pages=config.pages or None,
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
        slots=config.slots,
        host_share=host_share,
        context_len=config.context_len or None,
        memory_bytes=config.memory_bytes or None,
    )
    engine = load(
        Path(config.model),
        sizes,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        kernels=config.kernels,
        kernels_folder=config.kernels_folder,
        threads=config.threads or usable_cores(),
        on_progress=progress,
    )
    health.facts = {"engine": engine.description}
    log.info("loaded", engine=engine.description, model=engine.model_fingerprint)
    return engine


def _open_transfer(
    config: WorkerConfig, engine: Engine, uid: str, epoch: int, leases_max: int, fetch_seconds_max: float
) -> NixlTransfer:
    cache = engine.cache
    pages = PageMemory(cache.address, cache.page_bytes, cache.pages, probe_pages=cache.probe_pages)
    transfer = NixlTransfer(
        uid,
        epoch,
        pages,
        leases_max,
        engine.kv_format,
        interface=config.kv_interface,
        ports=config.kv_ports,
        limits=FetchLimits(
            fetches_max=FETCHES_PER_SLOT * config.slots,
            fetch_seconds_max=fetch_seconds_max,
            fence_seconds=config.quarantine_seconds,
        ),
        clock=monotonic,
    )
    link = self_fetch(transfer, pages, engine.kv_format)
    figures = {} if link is None else _figures(link)
    log.info("fetched a page from itself", **figures)
    return transfer


def _figures(link: KvLink) -> dict[str, object]:
    return {"transport": link.transport, "megabytes_per_second": round(link.bytes_per_second / 1e6)}


def _link_settings(config: ProcessConfig) -> LinkSettings:
    return LinkSettings(heartbeat_seconds=config.heartbeat_seconds, silence_seconds=config.silence_seconds)


def _turn_until_empty(
    ending: ShutdownSignals,
    scheduler: WorkerScheduler,
    loop: EventLoop,
    health: Health,
    publish: Callable[[], None],
) -> None:
    """Turn the loop until told to end at once, or to leave and nothing is left, or the time to drain is over."""
    next_publish, leaving = 0.0, False
    while not ending.at_once:
        if ending.deadline is not None:
            if not leaving:
                leaving = True
                health.leave()
                scheduler.leave()
                log.info("leaving", slots_used=scheduler.slots_used, leases=scheduler.leases_held)
            if scheduler.empty:
                log.info("left: nothing was held any more")
                return
            if monotonic() >= ending.deadline:
                break
        loop.begin()
        health.turned()
        if monotonic() >= next_publish:
            publish()  # before a step is waited for, so that /metrics shows what it works on
            next_publish = monotonic() + PUBLISH_SECONDS
        loop.finish()
    if scheduler.slots_used or scheduler.leases_held:
        log.warning("ended with work left", slots_used=scheduler.slots_used, leases=scheduler.leases_held)


def _let_reads_end(transfer: NixlTransfer) -> None:
    """A reader that goes away in the middle of a read can take its holder with it (over TCP): wait a little."""
    deadline = monotonic() + LAST_READS_SECONDS_MAX
    while transfer.outstanding and monotonic() < deadline:
        transfer.poll()


def _publish(
    metrics: Metrics, role: Role, scheduler: WorkerScheduler, links: WorkerLinks, transfer: NixlTransfer
) -> None:
    metrics.publish(role, scheduler.counters)
    metrics.publish("links", links.counters)
    for state, count in scheduler.memory.pool.counts().items():
        metrics.set("segue_pages", count, state=state.value)
    metrics.set("segue_leases", scheduler.leases_held)
    metrics.set("segue_slots_used", scheduler.slots_used)
    probe = transfer.link_probe
    metrics.set("segue_kv_links_slow", probe.slow_links)
    metrics.set_all(
        "segue_kv_link_bytes_per_second",
        {(peer, link.transport): link.bytes_per_second for peer, link in probe.links.items()},
    )
