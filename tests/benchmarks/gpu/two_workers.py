"""A prefill and a decode worker on one device, in one process: schedulers, loops and leases as in service.

What is left out are sockets and the router: requests all come at once, and KV is copied from pool to pool.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from decode.config import DecodeConfig
from decode.scheduler import DecodeScheduler
from prefill.config import PrefillConfig
from prefill.scheduler import PrefillScheduler
from shared.batch.effects import Note
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.memory import FittedPool
from shared.scheduling.event_loop import EventLoop, Scheduler
from shared.transfer.fetches import FetchLimits
from shared.transfer.reader import Span
from shared.transfer.transfer import Transfer
from shared.wire.messages import Hello, Role
from shared.wire.sampling_params import SamplingParams
from shared.worker.page_memory import page_memory
from tests.doubles.in_process_transfer import InProcessFabric, InProcessOffer
from tests.doubles.memory_links import MemoryLinks
from tests.integration.models.desk import Desk, DeskRequest

KV_FORMAT = "offline"
Part = tuple[CudaDevice, KVCache, FittedPool]


class _Worker:
    """One role: everything that its loop turns."""

    def __init__(
        self, role: Role, part: Part, requests: int, chunk: int, vocab_size: int, fabric: InProcessFabric
    ) -> None:
        self.device, cache, room = part
        pages, leases = page_memory(cache), requests
        limits = FetchLimits(fetches_max=4 * requests, fetch_seconds_max=60.0, quarantine_seconds=10.0)
        offer = InProcessOffer(fabric, role, 1, pages, leases)
        self.transfer = Transfer(offer, pages, KV_FORMAT, limits=limits, clock=monotonic)
        self.links = MemoryLinks(Hello(session=1, role=role, uid=role, epoch=1))
        settings: dict[str, Any] = {
            "max_running_requests": requests,
            "lease_seconds": 3600.0,
            "tenant_share_max": 1.0,
            "page_size": cache.page_size,
        }
        parts: dict[str, Any] = {
            "pages": room.pages,
            "context_len": room.context_len,
            "holder": self.transfer.holder,
            "words": self.transfer.words,
            "kv_format": KV_FORMAT,
            "vocab_size": vocab_size,
            "eos_token_ids": frozenset(),
        }
        scheduler: Scheduler
        if role == "prefill":
            scheduler = PrefillScheduler(PrefillConfig(chunked_prefill_size=chunk, **settings), **parts)
        else:
            scheduler = DecodeScheduler(DecodeConfig(**settings), host_pages=cache.host_pages, **parts)
        self.loop = EventLoop(scheduler, self.device, self.transfer, self.links, monotonic, _ignore)


class TwoWorkers:
    """Prefill and decode, each with its own device and pool, and the desk between them."""

    def __init__(self, prefill: Part, decode: Part, requests: int, chunk: int, vocab_size: int) -> None:
        self._stores = [cache.store.flatten().view(torch.uint8) for _, cache, _ in (prefill, decode)]
        fabric = InProcessFabric(copy=self._copy)
        self._prefill = _Worker("prefill", prefill, requests, chunk, vocab_size, fabric)
        self._decode = _Worker("decode", decode, requests, chunk, vocab_size, fabric)
        self._desk = Desk(self._prefill.links, self._decode.links)
        self._served = 0

    def measure(self, prompts: Sequence[tuple[int, ...]], output_lens: Sequence[int]) -> str:
        """Serve all at once; a sentence with the figures."""
        counters = self._decode.device.counters
        idle, busy = counters.idle_seconds, counters.decode_seconds
        requests = []
        for prompt, output_len in zip(prompts, output_lens, strict=True):
            self._served += 1
            params = SamplingParams(
                max_new_tokens=output_len, seed=self._served, temperature=0.6, ignore_eos=True
            )
            requests.append(DeskRequest(prompt, params))
        began = perf_counter()
        for request in requests:
            self._desk.submit(request)
        streams = [self._desk.streams[request.rid] for request in requests]
        while not all(stream.finish for stream in streams):
            self._prefill.loop.turn()
            self._decode.loop.turn()
            self._desk.turn()
        seconds = perf_counter() - began
        assert [stream.output_len for stream in streams] == list(output_lens)
        idle, busy = counters.idle_seconds - idle, counters.decode_seconds - busy
        return (
            f"disaggregated: {sum(output_lens)} tokens in {seconds:.2f} s, {sum(output_lens) / seconds:.0f} tok/s; "
            f"decode idle {idle / (idle + busy):.1%}"
        )

    def close(self) -> None:
        """End reads and devices."""
        for worker in (self._prefill, self._decode):
            worker.transfer.close()
            worker.device.close()

    def _copy(self, span: Span) -> None:
        """From pool to pool; words of leases lie in host memory."""
        source, target = self._bytes(span.source, span), self._bytes(span.target, span)
        if source is None or target is None:
            ctypes.memmove(span.target, span.source, span.size_bytes)
            return
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _bytes(self, address: int, span: Span) -> Tensor | None:
        for store in self._stores:
            begin = address - store.data_ptr()
            if 0 <= begin < len(store):
                return store[begin : begin + span.size_bytes]
        return None


def _ignore(_note: Note) -> None:
    return None
