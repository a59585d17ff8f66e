"""A worker's process: loads the model, opens its memory and its links, then turns the loop until told to end.

What a worker *does* is its scheduler's business; the roles differ only in which one they build here. Readiness means:
weights loaded, a fetch from itself passed, links open.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol

import structlog

from shared.config import ProcessConfig
from shared.engine.engine import Engine, Sizes, load
from shared.errors import ConfigError
from shared.event_loop import EventLoop, Scheduler
from shared.kv_memory import KvMemory
from shared.link_keys import read_seed
from shared.link_session import LinkSettings
from shared.links import WorkerLinks
from shared.machine import usable_cores
from shared.messages import Hello, Role
from shared.metrics import Metrics
from shared.probes import Health, Probes
from shared.transfer.fetches import FetchLimits
from shared.transfer.memory import PageMemory
from shared.transfer.nixl import NixlTransfer
from shared.transfer.self_fetch import self_fetch
from shared.worker_config import WorkerConfig

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


@dataclass(frozen=True, slots=True)
class Parts:
    """What a scheduler is built from."""

    engine: Engine
    transfer: NixlTransfer
    epoch: int


def serve(
    config: WorkerConfig,
    role: Role,
    build: Callable[[Parts], WorkerScheduler],
    *,
    leases_max: int,
    fetch_seconds_max: float,
    host_share: float,
) -> None:
    """Run one worker until SIGTERM or SIGINT. Raises `StartError` when it cannot start."""
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
    )
    seed = read_seed(Path(config.link_seed_file))
    stop = _stop_on_signals()
    links = WorkerLinks(config.host, config.links_port, seed, hello, _link_settings(config))
    scheduler = build(Parts(engine, transfer, epoch))
    loop = EventLoop(scheduler, engine.device, transfer, links, monotonic, overlap=config.overlap)
    health.become_ready()
    log.info("ready", links=links.address, probes=probes.port)
    try:
        metrics.set("segue_ready", 1)
        _turn_until(stop, loop, health, lambda: _publish(metrics, role, scheduler, links, transfer))
    finally:
        health.become_unready("ending")
        links.close()
        _let_reads_end(transfer)
        transfer.close()
        engine.device.close()
        probes.close()


def _stop_on_signals() -> threading.Event:
    """Set by SIGTERM or SIGINT from now on. Until there are links nobody waits for a goodbye: a signal just ends."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


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
    pages = PageMemory(engine.cache.address, engine.cache.page_bytes, engine.limits.pages)
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
    speed = self_fetch(transfer, pages, engine.kv_format)
    log.info("fetched a page from itself", bytes_per_second=round(speed))
    return transfer


def _link_settings(config: ProcessConfig) -> LinkSettings:
    return LinkSettings(heartbeat_seconds=config.heartbeat_seconds, silence_seconds=config.silence_seconds)


def _turn_until(stop: threading.Event, loop: EventLoop, health: Health, publish: Callable[[], None]) -> None:
    next_publish = 0.0
    while not stop.is_set():
        loop.begin()
        health.turned()
        if monotonic() >= next_publish:
            publish()  # before a step is waited for, so that /metrics shows what it works on
            next_publish = monotonic() + PUBLISH_SECONDS
        loop.finish()


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
    speeds = transfer.bytes_per_second
    if speeds:
        transport = transfer.transport
        metrics.set_all(
            "segue_kv_link_bytes_per_second", {(peer, transport): speed for peer, speed in speeds.items()}
        )
