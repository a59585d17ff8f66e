"""A virtual cluster from its start until every request has ended, with the faults that strike it.

links come up ─► requests come, faults strike ─► the last request has ended ─► figures
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from decode.scheduler import DecodeScheduler
from prefill.scheduler import PrefillScheduler
from router.config import RouterConfig
from shared.wire.messages import WorkerRole
from tests.benchmarks.virtual_cluster.fabric import FabricSpeed, VirtualFabric
from tests.benchmarks.virtual_cluster.figures import (
    AnswerRecord,
    Figures,
    RunRecorder,
    digest,
    goodput,
    quantile,
    request_figures,
    within_target,
)
from tests.benchmarks.virtual_cluster.network import VirtualNetwork
from tests.benchmarks.virtual_cluster.router import VirtualRouter
from tests.benchmarks.virtual_cluster.trace import DrawTrace, Trace, TracedRequest
from tests.benchmarks.virtual_cluster.worker import MODEL_NAME, VirtualWorker, WorkerShape
from tests.simulation.world.timeline import Timeline, TimelineProcess

START_SECONDS = 1.0  # until the first request; links come up before


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """What a cluster consists of, and what comes to it."""

    prefill: WorkerShape
    decode: WorkerShape
    trace: DrawTrace
    seconds: float  # in which requests come
    warmup_seconds: float = 0.0  # of them, before the goodput is measured
    routers: int = 1
    prefill_workers: int = 1
    decode_workers: int = 1
    router: dict[str, object] = field(default_factory=dict)  # settings
    router_event_seconds: float = 0.0  # of a router's loop for each event and token; 0: it is never late
    fabric: FabricSpeed = field(default_factory=FabricSpeed)
    slowness: Mapping[str, float] = field(default_factory=dict)  # of workers by uid: times as long as others
    faults: tuple[Callable[[VirtualCluster], None], ...] = ()  # each schedules what it does
    keeps_gaps: bool = False  # of every request, see `AnswerRecord.gaps`
    judges_tokens: bool = False  # see `AnswerRecord.different`
    # what a client asks when a request of its has ended, besides the trace; None: nothing more
    follow_up: Callable[[AnswerRecord], TracedRequest | None] = lambda _: None
    end_seconds: float = 400.0  # after the last arrival; then the run is given up


class RequestsHangError(RuntimeError):
    """Some requests have no outcome long after the last one came."""


class VirtualCluster:
    """All processes of one run."""

    def __init__(self, shape: ClusterShape, seed: int, *, encodes: bool = False):
        self.shape = shape
        self.timeline = Timeline()
        self.rng = random.Random(f"{seed} cluster")
        self.network = VirtualNetwork(encodes=encodes)
        self.fabric = VirtualFabric(shape.fabric)
        self.workers: dict[str, VirtualWorker] = {}
        self.routers: dict[str, VirtualRouter] = {}
        self.all_workers: list[VirtualWorker] = []  # also those that have ended
        self.all_routers: list[VirtualRouter] = []
        self.records: list[AnswerRecord] = []
        self.recorder = RunRecorder(
            counts_from=START_SECONDS + shape.warmup_seconds,
            counts_until=START_SECONDS + shape.seconds,
            judges_tokens=shape.judges_tokens,
            on_ended=self._follow_up,
        )
        self.events: Counter[str] = Counter()  # what faults have done
        self._trace: Trace = shape.trace(random.Random(f"{seed} trace"))
        self._arriving = True
        self._coming = 0  # requests that follow others
        self._turn = 0  # of the load balancer

    def begin(self) -> None:
        """Start all processes; requests come, and faults strike, while the timeline advances."""
        shape = self.shape
        for number in range(shape.prefill_workers):
            self.start_worker("prefill", f"prefill-{number}")
        for number in range(shape.decode_workers):
            self.start_worker("decode", f"decode-{number}")
        for number in range(shape.routers):
            self.start_router(f"router-{number}")
        for fault in shape.faults:
            fault(self)
        self._expect_next()

    def run(self) -> None:
        """Live until every request has ended; raises `RequestsHangError` if some never do."""
        self.begin()
        shape = self.shape
        end = START_SECONDS + shape.seconds + shape.end_seconds
        while self._arriving or self._coming or any(router.open for router in self.routers.values()):
            if not self.timeline.advance() or self.timeline.now > end:
                waiting = sum(len(router.open) for router in self.routers.values())
                raise RequestsHangError(f"{waiting} requests have not ended at {self.timeline.now:.1f} s")

    # ---- processes ----

    def start_worker(self, role: WorkerRole, uid: str) -> None:
        """A worker comes up, and every router connects to it."""
        shape = self.shape.prefill if role == "prefill" else self.shape.decode
        shape = replace(shape, times=shape.times.slower(self.shape.slowness.get(uid, 1.0)))
        epoch = self.rng.getrandbits(64)
        process = TimelineProcess(self.timeline, uid)
        worker = VirtualWorker(uid, epoch, shape, process, self.network, self.fabric)
        self.workers[uid] = worker
        self.all_workers.append(worker)
        for router in self.routers.values():
            self.network.connect(router, worker)

    def start_router(self, uid: str) -> None:
        """A router comes up and connects to every worker."""
        settings = RouterConfig(served_model_name=MODEL_NAME, **self.shape.router)  # type: ignore[arg-type]
        process = TimelineProcess(self.timeline, uid)
        context_len = self.shape.decode.context_len
        router = VirtualRouter(
            uid, self.rng.getrandbits(64), settings, process, self.network, context_len, self.recorder
        )
        router.event_seconds = self.shape.router_event_seconds
        self.routers[uid] = router
        self.all_routers.append(router)
        for worker in self.workers.values():
            self.network.connect(router, worker)

    def end_worker(self, worker: VirtualWorker, notice_seconds: float | None = None) -> None:
        """The process is gone."""
        worker.process.kill()
        self.network.died(worker, notice_seconds)
        del self.workers[worker.hello.uid]
        del self.fabric.fetchers[worker.fetcher.holder.agent]

    def end_router(self, router: VirtualRouter) -> None:
        """The process is gone, and its clients' connections with it."""
        router.process.kill()
        self.network.died(router)
        del self.routers[router.hello.uid]
        for record in router.open.values():
            record.disconnected = True
            record.ended_at = self.timeline.now
        router.open.clear()

    # ---- requests ----

    def _expect_next(self) -> None:
        traced = next(self._trace, None)
        if traced is None:
            self._arriving = False
            return

        def come() -> None:
            self._expect_next()
            self._submit(traced)

        self.timeline.at(START_SECONDS + traced.at, come)

    def _follow_up(self, record: AnswerRecord) -> None:
        if (traced := self.shape.follow_up(record)) is None:
            return
        self._coming += 1

        def come() -> None:
            self._coming -= 1
            self._submit(traced)

        self.timeline.at(START_SECONDS + traced.at, come)

    def _submit(self, traced: TracedRequest) -> None:
        serving = [router for router in self.routers.values() if router.serving]
        gaps = array("f") if self.shape.keeps_gaps else None
        record = AnswerRecord(traced, START_SECONDS + traced.at, gaps=gaps)
        self.records.append(record)
        if not serving:
            record.disconnected = True
            return
        self._turn += 1
        serving[self._turn % len(serving)].submit(record)

    # ---- figures ----

    def figures(self) -> Figures:
        """All that the run has shown, but for the CPU time."""
        shape, recorder = self.shape, self.recorder
        figures = request_figures(self.records)
        figures |= goodput(self.records, recorder.counts_from, recorder.counts_until)
        figures |= within_target(self.records, recorder.counts_from, recorder.counts_until)
        figures |= {"itl_p50": recorder.gaps.quantile(0.5), "itl_p99": recorder.gaps.quantile(0.99)}
        figures |= self._worker_figures() | self._router_figures()
        kinds = sorted({record.traced.kind for record in self.records} - {""})
        figures |= {
            kind: request_figures(each for each in self.records if each.traced.kind == kind) for kind in kinds
        }
        figures["pods"] = {
            "prefill": shape.prefill_workers,
            "decode": shape.decode_workers,
            "routers": shape.routers,
        }
        figures["events"] = dict(self.events)
        figures["virtual_seconds"] = round(self.timeline.now, 3)
        figures["digest"] = digest(self.records)
        return figures

    def _worker_figures(self) -> Figures:
        prefills, decodes = self._schedulers()
        computed = sum(each.counters.extend_tokens for each in prefills)
        cached = sum(router.core.counters.cached_tokens for router in self.all_routers)
        prompts = sum(record.traced.prompt_len for record in self.records if record.tokens)
        rows = sum(each.counters.generated_tokens + each.counters.extra_tokens for each in decodes)
        without = sum(each.counters.rows_without_page for each in decodes)
        fetched = sum(each.counters.fetched_bytes for each in decodes)
        return {
            "prefix_hit_share": _share(cached, prompts),
            "retractions": sum(each.counters.retractions for each in decodes),
            "local_prompts": sum(each.counters.local_prompts for each in decodes),
            "put_back": sum(each.counters.put_back for each in decodes),
            "recomputed": sum(each.counters.recomputed for each in decodes),
            "no_room_refusals": sum(each.counters.no_room for each in decodes),
            "decode_rows": rows,
            "computed_tokens_a_request": round(computed / max(1, len(self.records)), 1),
            "computed_at_decode_a_request": round(
                sum(each.counters.extend_tokens for each in decodes) / max(1, len(self.records)), 1
            ),
            "fetched_mb_a_request": round(fetched / 1e6 / max(1, len(self.records)), 2),
            **_spread("computed", [each.counters.extend_tokens for each in prefills]),
            **_spread("rows", [each.counters.generated_tokens for each in decodes]),
            "rows_without_page": without,
            "rows_without_page_share": _share(without, rows + without),
            "prefill_busy_share": self._busy("prefill"),
            "decode_busy_share": self._busy("decode"),
        }

    def _router_figures(self) -> Figures:
        cores = [router.core.counters for router in self.all_routers]
        pairs = [pair for core in cores for pair in zip(core.ttft_foreseen, core.ttft_real, strict=True)]
        errors = sorted(abs(foreseen - real) / real for foreseen, real in pairs)
        return {
            "placements": {
                " ".join(key): count
                for key, count in sorted(sum((core.placements for core in cores), Counter()).items())
            },
            "targets": dict(sum((core.targets for core in cores), Counter())),
            "foreseen": len(pairs),
            "foreseen_error_p50": quantile(errors, 0.5),
            "migrations": {
                " ".join(key): count
                for key, count in sorted(sum((core.migrations for core in cores), Counter()).items())
            },
            "continuations": dict(sum((core.continuations for core in cores), Counter())),
            "worker_refusals": dict(sum((core.refusals for core in cores), Counter())),
        }

    def cost(self) -> Figures:
        """CPU of the routers' cores, as this machine had it: not deterministic."""
        spent = sum((router.cpu_seconds for router in self.all_routers), Counter[str]())
        inputs = sum((router.inputs for router in self.all_routers), Counter[str]())
        tokens = sum(record.tokens for record in self.records)
        return {
            "router_cpu_ms_a_request": round(1e3 * spent.total() / max(1, len(self.records)), 4),
            "router_cpu_ms_a_request_without_tokens": round(
                1e3 * (spent.total() - spent["token"]) / max(1, len(self.records)), 4
            ),
            "router_cpu_us_a_token": round(1e6 * spent["token"] / max(1, tokens), 3),
            "router_cpu_us_a_load": round(1e6 * spent["load"] / max(1, inputs["load"]), 3),
            "router_cores_busy": round(spent.total() / max(1.0, self.timeline.now), 4),
        }

    def _schedulers(self) -> tuple[list[PrefillScheduler], list[DecodeScheduler]]:
        every = [worker.scheduler for worker in self.all_workers]
        return (
            [each for each in every if isinstance(each, PrefillScheduler)],
            [each for each in every if isinstance(each, DecodeScheduler)],
        )

    def _busy(self, role: WorkerRole) -> float:
        busy = [worker.device.busy_seconds for worker in self.all_workers if worker.hello.role == role]
        return round(sum(busy) / max(1, len(busy)) / self.timeline.now, 4)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 5) if whole else 0.0


def _spread(name: str, by_pod: Sequence[int]) -> Figures:
    """How uneven pods are; a pod that has done nothing counts as one."""
    most, mean = max(by_pod, default=0), sum(by_pod) / max(1, len(by_pod))
    return {
        f"{name}_most_by_least": round(most / max(1, min(by_pod, default=0)), 3),
        f"{name}_most_by_mean": round(most / max(1.0, mean), 3),
    }
