"""A prefill and a decode worker in one process, with everything real but the sockets, turned by hand.

Real: both schedulers, the event loop, the engine with pages of its own for each, the page-by-page transfer of real
bytes, and messages that cross as bytes. All KV memory is filled with NaN at the start, so a read of a cell that was
never written shows. The clock advances with the turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decode.config import DecodeConfig
from decode.scheduler import DecodeScheduler
from prefill.config import PrefillConfig
from prefill.scheduler import PrefillScheduler
from shared.batch.effects import Note
from shared.engine.config import EngineConfig
from shared.engine.engine import load
from shared.engine.parts import Engine
from shared.kv.page_pool import PagePool, PageState
from shared.scheduling.event_loop import EventLoop, Scheduler
from shared.transfer.fetches import FetchLimits
from shared.transfer.transfer import Transfer
from shared.wire.messages import UNDERSTOOD, FinishReason, Hello, Role
from shared.worker.page_memory import page_memory
from shared.worker.worker_config import WorkerConfig
from tests.doubles.in_process_transfer import InProcessFabric, InProcessOffer
from tests.doubles.memory_links import MemoryLinks
from tests.integration.models.desk import Desk, DeskRequest, DeskStream
from tests.integration.models.recording_device import Logbook, RecordingDevice

TURN_SECONDS = 0.001
TURNS_MAX = 200_000  # while the device's thread waits for a core, the loop turns many times for one copy
# One client, who may take every slot: a crowd of 16 is one batch.
PREFILL = PrefillConfig(
    kv_pages=256,
    max_running_requests=16,
    chunked_prefill_size=2048,  # a prompt alone is one step
    lease_seconds=3600.0,
    tenant_share_max=1.0,
)
FETCH_LIMITS = FetchLimits(fetches_max=64, fetch_seconds_max=10.0, quarantine_seconds=5.0)
DECODE = DecodeConfig(kv_pages=320, max_running_requests=16, host_fraction=0.0, tenant_share_max=1.0)


@dataclass(frozen=True)
class CollectedAnswer:
    """Output tokens, and the logits of each place in the output that was computed here, once or more often."""

    token_ids: tuple[int, ...]
    finish: FinishReason
    logits: dict[int, list[Tensor]]


@dataclass(slots=True)
class SteadyClock:
    """A clock that changes only when `now` is set."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class ProcessParts:
    """What a worker has beside its scheduler and its loop."""

    def __init__(
        self,
        role: Role,
        config: WorkerConfig,
        folder: Path,
        host_fraction: float,
        fabric: InProcessFabric,
        clock: SteadyClock,
    ) -> None:
        self.logbook = Logbook()
        self.engine: Engine = load(
            folder,
            EngineConfig(
                config.kv_pages,
                config.page_size,
                config.max_running_requests,
                host_fraction=host_fraction,
                threads=2,
            ),
            on_logits=self.logbook.write,
        )
        assert "torch" not in self.engine.description, "the kernels that are shipped are to be tested"
        cache = self.engine.cache
        cache.store.fill_(torch.nan)
        cache.host.fill_(torch.nan)
        self.device = RecordingDevice(self.engine.device, self.logbook)
        pages = page_memory(cache)
        offer = InProcessOffer(fabric, role, 1, pages, 64)
        self.transfer = Transfer(offer, pages, self.engine.kv_format, limits=FETCH_LIMITS, clock=clock)
        self.links = MemoryLinks(Hello(session=1, role=role, uid=role, epoch=1, understands=UNDERSTOOD[role]))

    def close(self) -> None:
        """End the device's thread and all reads."""
        self.transfer.close()
        self.device.close()


class OneProcess:
    """The two workers, fresh, and the desk between them."""

    def __init__(
        self,
        folder: Path,
        *,
        prefill: PrefillConfig = PREFILL,
        decode: DecodeConfig = DECODE,
        overlap: bool = True,
        shuffle_pages: bool = False,
        whole: bool = False,
    ) -> None:
        self._clock = SteadyClock()
        fabric = InProcessFabric()
        at_prefill = ProcessParts("prefill", prefill, folder, 0.0, fabric, self._clock)
        at_decode = ProcessParts("decode", decode, folder, decode.host_fraction, fabric, self._clock)
        self._parts = at_prefill, at_decode
        self.prefill_device, self.decode_device = at_prefill.device, at_decode.device
        self.prefill = _prefill_scheduler(prefill, at_prefill)
        self.decode = _decode_scheduler(decode, at_decode)
        if shuffle_pages:
            for pool in (self.prefill.memory.pool, self.decode.memory.pool, self.decode.host):
                _shuffle(pool)
        self.notes: list[Note] = []
        self._loops = [
            EventLoop(
                scheduler,
                parts.device,
                parts.transfer,
                parts.links,
                self._clock,
                self.notes.append,
                overlap=overlap,
            )
            for scheduler, parts in ((self.prefill, at_prefill), (self.decode, at_decode))
        ]
        self.desk = Desk(at_prefill.links, at_decode.links, whole=whole)

    def answers(self, requests: Sequence[DeskRequest]) -> list[CollectedAnswer]:
        """Serve these requests, sent at once, to their end."""
        for request in requests:
            self.desk.submit(request)
        self.finish()
        return [self.answer(request) for request in requests]

    def finish(self) -> None:
        """Turn until all that was submitted has ended; nothing is held any more then."""
        self.turn_until(lambda: all(stream.finish for stream in self.desk.streams.values()))
        self.turn_until(
            lambda: self.prefill.leases_held == self.prefill.slots_used == self.decode.slots_used == 0
        )

    def turn_until(self, done: Callable[[], bool]) -> None:
        """Turn both loops and the desk; all books must be right after every turn."""
        schedulers: tuple[Scheduler, ...] = self.prefill, self.decode
        for _ in range(TURNS_MAX):
            if done():
                return
            for loop, scheduler in zip(self._loops, schedulers, strict=True):
                loop.turn()
                scheduler.check()
            self.desk.turn()
            self._clock.now += TURN_SECONDS
        raise AssertionError(f"still busy after {TURNS_MAX} turns")

    def stream(self, request: DeskRequest) -> DeskStream:
        """The request as the desk sees it."""
        return self.desk.streams[request.rid]

    def answer(self, request: DeskRequest) -> CollectedAnswer:
        """What the request got, and from which logits."""
        stream = self.stream(request)
        assert stream.finish is not None
        logits: dict[int, list[Tensor]] = {}
        for parts in self._parts:
            for (seed, index), rows in parts.logbook.logits.items():
                if seed == request.params.seed and index < stream.output_len:
                    logits.setdefault(index, []).extend(rows)
        return CollectedAnswer(tuple(stream.token_ids[len(request.prompt) :]), stream.finish, logits)

    def close(self) -> None:
        """End both workers."""
        for parts in self._parts:
            parts.close()


def _prefill_scheduler(config: PrefillConfig, parts: ProcessParts) -> PrefillScheduler:
    return PrefillScheduler(
        config,
        pages=parts.engine.limits.pages,
        context_len=parts.engine.limits.context_len,
        holder=parts.transfer.holder,
        words=parts.transfer.words,
        kv_format=parts.engine.kv_format,
        vocab_size=parts.engine.limits.vocab_size,
        eos_token_ids=parts.engine.eos_token_ids,
    )


def _decode_scheduler(config: DecodeConfig, parts: ProcessParts) -> DecodeScheduler:
    return DecodeScheduler(
        config,
        pages=parts.engine.limits.pages,
        host_pages=parts.engine.host_pages,
        context_len=parts.engine.limits.context_len,
        holder=parts.transfer.holder,
        words=parts.transfer.words,
        kv_format=parts.engine.kv_format,
        vocab_size=parts.engine.limits.vocab_size,
        eos_token_ids=parts.engine.eos_token_ids,
    )


def _shuffle(pool: PagePool) -> None:
    """Let the pool hand out its pages in a random order, always the same."""
    pages = pool.allocate(pool.total, PageState.OWNED)
    random.Random(5).shuffle(pages)
    pool.retire(pages, PageState.OWNED, after_step=0)
