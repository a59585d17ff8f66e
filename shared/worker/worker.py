"""A worker's process: loads the model, opens its memory and its links, then turns the loop until it may exit.

What a worker *does* is its scheduler's business; the roles differ only in which one they build here. Readiness means:
weights loaded, a fetch from itself passed, links open, not draining.

SIGTERM makes it drain, a second one or SIGINT ends it at once; `shared/scheduling/drain.py` decides when it may exit.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol

import structlog

from shared.batch.effects import Note
from shared.batch.req import Req
from shared.engine.checkpoint.memory_plan import gib
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.config import EngineConfig
from shared.engine.engine import load
from shared.engine.parallel.shares import HeldHeads, ModelShare, Share
from shared.engine.parts import Engine, EngineDevice, Followers
from shared.kv.kv_memory import KvMemory
from shared.links.keys import read_keys
from shared.links.session import LinkSettings
from shared.links.sockets import WorkerLinks
from shared.primitives.errors import ConfigError
from shared.primitives.state_table import StateName
from shared.process import gauges, logs
from shared.process.admin_port import AdminPort
from shared.process.health import Health, probe_pages
from shared.process.logs import write_note
from shared.process.metrics import Metrics
from shared.process.resources import memory_budget, usable_cores
from shared.process.role_main import YOUNG_OBJECTS_OF_WORKER, spare_what_is_loaded
from shared.scheduling.drain import DrainFacts, DrainStep, WorkerDrain
from shared.scheduling.event_loop import EventLoop, Scheduler
from shared.transfer.fetches import FetchLimits
from shared.transfer.transfer import Transfer, self_fetch
from shared.transfer.transports import KvNetwork
from shared.wire.messages import Hello, Role
from shared.worker import ranks, signals
from shared.worker.grammar_gate import GrammarGate
from shared.worker.page_memory import page_memory
from shared.worker.ranks import RunningRanks, TransferParts
from shared.worker.worker_config import WorkerConfig

FETCHES_PER_SLOT = 4  # those given up count until they have ended; they must not keep new ones out
LAST_READS_SECONDS_MAX = 2.0  # at the end, for reads under way
LAST_READS_PAUSE_SECONDS = 0.001  # between two looks at them

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a scheduler is built from."""

    engine: Engine
    transfer: Transfer
    kv_format: (
        str  # of the pages, and the transport that reads them: workers differing in either are never paired
    )


def serve(
    config: WorkerConfig,
    role: Role,
    build: Callable[[WorkerParts], WorkerScheduler],
    *,
    leases_max: int,
    fetch_seconds_max: float,
    host_fraction: float,
    extend_tokens: int,
) -> None:
    """Run one worker until it may exit. Raises `StartError` when it cannot start."""
    if not config.model:
        raise ConfigError("--model must name a folder with safetensors, config.json and a tokenizer")
    ranks.refuse(config)
    os.nice(config.nice)
    asked = engine_config(config, host_fraction, extend_tokens)
    with ranks.running(config, role, asked) as others:
        _run(config, role, build, (asked, others), leases_max, fetch_seconds_max)


def _run(
    config: WorkerConfig,
    role: Role,
    build: Callable[[WorkerParts], WorkerScheduler],
    engine_of: tuple[EngineConfig, RunningRanks | None],
    leases_max: int,
    fetch_seconds_max: float,
) -> None:
    keys = read_keys(config.link_keys_file, "worker")
    uid, epoch = config.uid or f"{socket.gethostname()}-{secrets.token_hex(4)}", secrets.randbits(64)
    health, metrics = Health(config.loop_seconds_max), Metrics(role)
    admin = AdminPort(config.admin_host or config.host, config.admin_port, probe_pages(health, metrics))
    asked, others = engine_of
    engine = _load_engine(config, asked, others.followers if others else None, health)
    health.doing = "checking the transfer"
    network = _kv_network(config)
    kv_format = f"{engine.kv_format} over {network.name_in_kv_format}"
    pages = page_memory(engine.cache, _held_heads(engine, config))
    parts = TransferParts(network, keys, (uid, epoch), pages, leases_max)
    transfer = _open_transfer(config, parts, others, kv_format, fetch_seconds_max)
    hello = _hello(config, role, uid, epoch, engine, kv_format)
    drain = WorkerDrain(config.drain_seconds)
    signals.listen(drain)
    links = WorkerLinks(
        config.host, config.links_port, keys, hello, _link_settings(config), write_note=_write_note
    )
    for watch in (links.loop_watch, health.loop_watch):
        watch.work_done = lambda: engine.device.work_done
    scheduler = build(WorkerParts(engine, transfer, kv_format))
    loop = EventLoop(
        scheduler,
        engine.device,
        transfer,
        links if engine.grammars is None else GrammarGate(links, engine.grammars),
        monotonic,
        _write_note,
        overlap=config.overlap,
        launches_cost=engine.device.launches_cost,
    )
    _publish_engine(metrics, hello, engine)
    spare_what_is_loaded(YOUNG_OBJECTS_OF_WORKER)
    health.become_ready()
    log.info("worker.ready", links=links.address, admin_port=admin.port)
    scheduler.states.on_step = _write_step if config.log_level == "debug" else None
    publish = partial(_publish, metrics, health, scheduler, loop, links, transfer, engine.device)
    try:
        turn_until_exit(drain, scheduler, loop, health, publish, _write_note)
    finally:
        health.become_unready("ending")
        publish()  # segue_ready is what /readyz says, to the last
        links.close()
        _let_reads_end(transfer)
        transfer.close()
        engine.device.close()
        admin.close()


def _hello(config: WorkerConfig, role: Role, uid: str, epoch: int, engine: Engine, kv_format: str) -> Hello:
    return Hello(
        session=0,
        role=role,
        uid=uid,
        epoch=epoch,
        model_name=config.served_model_name or Path(config.model).name,
        model=engine.model_fingerprint,
        kv_format=kv_format,
        determinism=engine.determinism,
        limits=engine.limits,
        eos_token_ids=tuple(sorted(engine.eos_token_ids)),
        features=tuple(sorted(engine.features)),
    )


def _write_note(note: Note) -> None:
    write_note(note, __name__)


def _write_step(req: Req, before: StateName, event: StateName) -> None:
    """A line for one step of a request, with the id by which its router knows it."""
    fields = {
        "rid": req.rid,
        "attempt": req.attempt,
        "router": req.router,
        "from": before.value,
        "on": event.value,
    }
    after = req.state.value if req.state is not None else ""
    _write_note(Note("request.state", fields | {"to": after}, "debug"))


def _load_engine(
    config: WorkerConfig, asked: EngineConfig, followers: Followers | None, health: Health
) -> Engine:
    def progress(what: str, share: float) -> None:
        health.doing = f"{what} {share:.0%}"

    engine = load(Path(config.model), asked, on_progress=progress, followers=followers)
    health.facts = {"engine": engine.description, "weights": gib(engine.memory["weights"])}
    log.info("worker.loaded", **health.facts, model=engine.model_fingerprint)
    return engine


def engine_config(config: WorkerConfig, host_fraction: float, extend_tokens: int) -> EngineConfig:
    """What the settings ask of an engine; 0 cores, pages, tokens or bytes are what there is."""
    return EngineConfig(
        pages=config.kv_pages or None,
        page_size=config.page_size,
        slots=config.max_running_requests,
        max_total_tokens=config.max_total_tokens,
        host_fraction=host_fraction,
        context_len=config.context_len or None,
        extend_tokens=extend_tokens,
        budget=memory_budget(config.memory_bytes or None),
        device_memory_share=config.device_memory_share,
        device=config.device,
        model_impl=config.model_impl,
        kernels=config.kernels,
        kernels_folder=config.kernels_folder,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        kv_layout=config.kv_layout,
        threads=config.threads or usable_cores(),
        deterministic=config.deterministic,
    )


def _kv_network(config: WorkerConfig) -> KvNetwork:
    return KvNetwork(
        config.kv_transport,
        config.kv_interface,
        config.kv_ports,
        unauthenticated_tcp=config.kv_allow_unauthenticated_tcp,
        devices=tuple(filter(None, config.kv_devices.split(","))),
    )


def _held_heads(engine: Engine, config: WorkerConfig) -> HeldHeads | None:
    """The key-value heads that rank 0 holds; None: all of them."""
    if (ranks := config.tensor_parallel_size) == 1:
        return None
    assert isinstance(engine.config, ModelConfig)
    return ModelShare(engine.config, Share(0, ranks)).held_heads


def _open_transfer(
    config: WorkerConfig,
    parts: TransferParts,
    others: RunningRanks | None,
    kv_format: str,
    fetch_seconds_max: float,
) -> Transfer:
    offer, told = others.offer(parts) if others else (parts.own_offer(), ())
    transfer = Transfer(
        offer,
        parts.pages,
        kv_format,
        limits=FetchLimits(
            fetches_max=FETCHES_PER_SLOT * config.max_running_requests,
            fetch_seconds_max=fetch_seconds_max,
            quarantine_seconds=config.quarantine_seconds,
        ),
        clock=monotonic,
        ranks=told,
    )
    transport = self_fetch(transfer, parts.pages, kv_format)
    log.info("worker.fetched_from_itself", transport=transport)
    return transfer


def _link_settings(config: WorkerConfig) -> LinkSettings:
    return LinkSettings(
        heartbeat_seconds=config.heartbeat_seconds,
        silence_seconds=config.silence_seconds,
        step_seconds_max=config.step_seconds_max,
    )


def _let_reads_end(transfer: Transfer) -> None:
    """Wait a little for reads under way: over UCX's TCP, the holder may abort when its reader exits in one."""
    deadline = monotonic() + LAST_READS_SECONDS_MAX
    while transfer.outstanding and monotonic() < deadline:
        transfer.poll()
        sleep(LAST_READS_PAUSE_SECONDS)


def _publish_engine(metrics: Metrics, hello: Hello, engine: Engine) -> None:
    """Show what does not change."""
    metrics.set_all(gauges.MEMORY_BYTES, {(kind,): size for kind, size in engine.memory.items()})
    metrics.set(gauges.SLOTS, engine.limits.slots)
    metrics.set(
        gauges.MODEL_INFO,
        1,
        model=hello.model_name,
        fingerprint=hello.model,
        kv_format=hello.kv_format,
        dtype=engine.dtype,
        device=engine.cache.store.device.type,
        page_size=str(engine.limits.page_size),
        context_len=str(engine.limits.context_len),
    )


def _publish(
    metrics: Metrics,
    health: Health,
    scheduler: WorkerScheduler,
    loop: EventLoop,
    links: WorkerLinks,
    transfer: Transfer,
    device: EngineDevice,
) -> None:
    publish_scheduler(metrics, health, scheduler)
    metrics.publish(loop.counters)
    metrics.publish(links.counters)
    metrics.publish(logs.counters)
    metrics.publish(transfer.counters)
    if device.counters is not None:
        metrics.publish(device.counters)
    metrics.set(gauges.KV_LINKS_SLOW, transfer.kv_links.slow_links)
    metrics.set_all(
        gauges.KV_LINK_BYTES_PER_SECOND,
        {(peer, link.transport): link.bytes_per_second for peer, link in transfer.kv_links.links.items()},
    )


# ---- the loop turns until it may exit; what the scheduler counts and holds is shown meanwhile ------------------------
# `shared.scheduling.drain` decides, the event loop works. Nothing here knows engine, links or signals.


PUBLISH_SECONDS = 0.05  # between two refreshes of /metrics


class StepListener(Protocol):
    """The states of a scheduler's requests, as far as the log wants to hear of them."""

    on_step: Callable[[Req, StateName, StateName], None] | None


class WorkerScheduler(Scheduler, DrainFacts, Protocol):
    """A scheduler with the figures every worker shows."""

    memory: KvMemory

    @property
    def states(self) -> StepListener: ...
    @property
    def counters(self) -> object: ...
    def start_draining(self) -> None: ...


def turn_until_exit(
    drain: WorkerDrain,
    scheduler: WorkerScheduler,
    loop: EventLoop,
    health: Health,
    publish: Callable[[], None],
    write_note: Callable[[Note], None],
) -> None:
    """Turn the loop until `drain` says that the process may exit.

    `publish` refreshes /metrics: each PUBLISH_SECONDS, and once after the last step before the loop rests, so that who
    has an answer finds in /metrics what it has cost.
    """
    next_publish, settled = 0.0, False
    while True:
        decision = drain.decide(monotonic(), scheduler)
        if decision.note:
            write_note(decision.note)
        if decision.step is DrainStep.EXIT:
            return
        if decision.step is DrainStep.START_DRAINING:
            health.start_draining()
            scheduler.start_draining()
            next_publish = 0.0
        loop.begin()
        health.beat()
        rests = settled and loop.patience_seconds() > 0
        if rests or monotonic() >= next_publish:
            publish()  # before a step is waited for, so that /metrics shows what it works on
            next_publish, settled = monotonic() + PUBLISH_SECONDS, False
        settled = settled or loop.awaits is not None
        loop.finish()


def publish_scheduler(metrics: Metrics, health: Health, scheduler: WorkerScheduler) -> None:
    """Show what the scheduler counts and holds, and whether the worker is ready: as /readyz says it."""
    metrics.set(gauges.READY, int(health.ready))
    metrics.publish(scheduler.counters)
    for state, count in scheduler.memory.pool.counts().items():
        metrics.set(gauges.PAGES, count, state=state.value)
    metrics.set(gauges.LEASES, scheduler.leases_held)
    metrics.set(gauges.SLOTS_USED, scheduler.slots_used)
    pool = scheduler.memory.pool
    metrics.set(gauges.KV_USED_RATIO, 1 - scheduler.memory.available_pages / max(1, pool.total))
