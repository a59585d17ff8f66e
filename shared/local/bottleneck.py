"""What holds a deployment back, from two scrapes of its metrics: a pure function, `verdict`.

Everything is counted in requests that wait. By Little's law a stage at which requests spend S seconds each second has
S requests in it on average, so stages as different as a tokenizer and a KV link compare by one figure:

    router ─► waiting ─► prefill queue ─► prefill ─► ready ─► fetch ─► decode
    loop, tokenizer   └── whichever stage after it is full ──┘   KV link    slots, pages, slow steps

Time that a stage needs anyway is no waiting: only what exceeds the threshold of a mean counts. Who waits in front of
prefill waits for decode where prefilled requests wait for decode, and for the KV link where fetches keep that busy. The
stage with most of the open requests is named; two that are close are both named, as "not clear". Where few wait, the
fleet has room and the client sends no more; where one API key has most of what is open while requests wait, the tenant.

It does not know how pages are read (`live_doctor`). Only the router's metrics are needed; those of workers name pods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal, NamedTuple

Cause = Literal["prefill", "decode", "kv link", "router", "tenant", "client", "idle", "not clear"]
Stage = Literal["prefill", "decode", "kv link", "router"]

RUNNING = "segue_requests_running"
SAMPLED = "segue_sampled_tokens_total"
COMPUTES_PROMPTS = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Every number that decides a verdict."""

    waiting_share: float = 0.1  # of the open requests that must wait for something, or the client is named
    waiting_requests: float = 0.5  # … and so many of them, on average
    close_share: float = 0.6  # of the most waited-for stage: another one with so much makes it unclear
    behind_share: float = 0.3  # of those in prefill's queues that wait behind it: then these hold up all
    compute_seconds: float = 1.0  # of one prompt at prefill; what exceeds it counts as waiting
    itl_seconds: float = 0.1  # between two tokens, as decode.config.itlTargetSeconds
    slow_pod_share: float = 0.5  # of the others' tokens a second and row: a decode pod below it is slow
    fetch_seconds: float = 0.1  # of one read of KV
    fetch_by_itl: float = 3.0  # … and so many gaps between tokens: a worker notices its end after a step
    fetches_a_pod: float = 0.8  # under way at each decode pod: its link is never free
    tokenize_seconds: float = 0.1  # of one prompt, with its queue
    lag_seconds: float = 0.05  # by which the router's loop is late
    tenant_share: float = 2 / 3  # of what is open, or was used, that one key has while another key has some
    limited_share: float = 0.1  # of a key's requests that its own limits refuse
    slots_full: float = 0.9  # of the decode workers'


THRESHOLDS = Thresholds()


class Sample(NamedTuple):
    """One line of a page of metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scrape:
    """What some processes have shown at `seconds` of one clock, by their addresses."""

    seconds: float
    processes: Mapping[str, Sequence[Sample]]


@dataclass(frozen=True, slots=True)
class LiveVerdict:
    """The cause, the figures that say so, and the value to turn. `candidates` are two where it is not clear."""

    cause: Cause
    figures: tuple[str, ...]
    turn: str
    candidates: tuple[Stage, ...] = ()


def verdict(before: Scrape, after: Scrape, thresholds: Thresholds = THRESHOLDS) -> LiveVerdict:
    """Name the bottleneck between two scrapes; raises ValueError where there is no router among them."""
    window = Window(before, after)
    if not window.of_role("router"):
        raise ValueError("no router is among the processes that were read")
    if _is_idle(window):
        return LiveVerdict(
            "idle", ("no request was open, and none ended",), "nothing: send requests, and ask again"
        )
    stages = _Stages(window, thresholds)
    waits = stages.waits()
    figures = _figures(stages, waits)
    first, second, *_ = sorted(waits, key=lambda stage: -waits[stage])
    open_requests = max(stages.open, sum(waits.values()))
    if waits[first] < max(thresholds.waiting_requests, thresholds.waiting_share * open_requests):
        if sum(stages.slow_pods.values()) >= thresholds.waiting_requests:
            return LiveVerdict("decode", figures, _turn(stages, "decode"))
        return _limited_tenant(window, thresholds) or LiveVerdict("client", figures, TURN_CLIENT)
    if (tenant := _greedy_tenant(window, thresholds, first)) is not None:
        return tenant
    if waits[second] >= thresholds.close_share * waits[first]:
        turn = f"either {first}: {_turn(stages, first)}; or {second}: {_turn(stages, second)}"
        return LiveVerdict("not clear", figures, turn, (first, second))
    return LiveVerdict(first, figures, _turn(stages, first))


def _is_idle(window: Window) -> bool:
    return not window.gauge(RUNNING) and not window.count("segue_request_seconds", "router")


# ---- two scrapes as rates and means ----------------------------------------------------------------------------------


class Window:
    """The time between two scrapes, of the processes that are in both."""

    def __init__(self, before: Scrape, after: Scrape):
        self.seconds = max(after.seconds - before.seconds, 1e-3)
        self._before = {at: before.processes[at] for at in after.processes if at in before.processes}
        self._after = {at: after.processes[at] for at in self._before}

    def of_role(self, role: str) -> list[str]:
        """The addresses of a role's processes."""
        return [at for at, page in self._after.items() if any(s.labels.get("role") == role for s in page)]

    def gauge(self, name: str, at: str = "", **labels: str) -> float:
        """The mean of both ends, summed over processes (or of the one `at` an address) and other labels."""
        ends = (self._sums(pages, name, at, labels) for pages in (self._before, self._after))
        return sum(sum(end.values()) for end in ends) / 2

    def grown(self, name: str, at: str = "", **labels: str) -> float:
        """What a total has grown by; a process that has begun anew counts nothing."""
        before = self._sums(self._before, name, at, labels)
        after = self._sums(self._after, name, at, labels)
        return sum(max(0.0, value - before.get(series, 0.0)) for series, value in after.items())

    def rate(self, name: str, at: str = "", **labels: str) -> float:
        """What a total grows by in a second."""
        return self.grown(name, at, **labels) / self.seconds

    def by_label(
        self, label: str, of: Callable[[Window, str], float], name: str, **labels: str
    ) -> dict[str, float]:
        """`Window.gauge` or `Window.grown` for each value of a label."""
        return {value: of(part, name) for value, part in self.parts(label, name, **labels).items()}

    def parts(self, label: str, name: str, **labels: str) -> dict[str, Window]:
        """The window of one metric, for each value of a label: one look at each sample, however many there are."""
        ends = [self._split(pages, label, name, labels) for pages in (self._before, self._after)]
        return {value: self._part(ends[0].get(value, {}), after) for value, after in ends[1].items()}

    def _part(self, before: Mapping[str, Sequence[Sample]], after: Mapping[str, Sequence[Sample]]) -> Window:
        part = Window(Scrape(0.0, {}), Scrape(self.seconds, {}))
        part._before, part._after = dict(before), dict(after)
        return part

    def _split(
        self, pages: Mapping[str, Sequence[Sample]], label: str, name: str, labels: Mapping[str, str]
    ) -> dict[str, dict[str, list[Sample]]]:
        found: dict[str, dict[str, list[Sample]]] = {}
        for at, page in pages.items():
            for sample in page:
                if label in sample.labels and _matches(sample, name, labels):
                    found.setdefault(sample.labels[label], {}).setdefault(at, []).append(sample)
        return found

    def count(self, name: str, role: str, **labels: str) -> float:
        """Measurements of a histogram."""
        return self.grown(f"{name}_count", role=role, **labels)

    def sum(self, name: str, role: str, **labels: str) -> float:
        """Seconds of these measurements together."""
        return self.grown(f"{name}_sum", role=role, **labels)

    def _sums(
        self, pages: Mapping[str, Sequence[Sample]], name: str, at: str, labels: Mapping[str, str]
    ) -> dict[tuple[object, ...], float]:
        return {
            (address, *sorted(s.labels.items())): s.value
            for address, page in pages.items()
            if at in ("", address)
            for s in page
            if _matches(s, name, labels)
        }


def _matches(sample: Sample, name: str, labels: Mapping[str, str]) -> bool:
    return sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())


@dataclass(frozen=True, slots=True)
class Stay:
    """Requests in a stage: how many on average, and how long each was there (inf: none came out of it)."""

    requests: float
    seconds: float

    def above(self, seconds: float) -> float:
        """How many of them are there longer than a stay of `seconds` explains."""
        return self.requests * max(0.0, 1 - seconds / self.seconds) if self.seconds else 0.0


# ---- where requests wait ---------------------------------------------------------------------------------------------


class _Stages:
    """The figures of each stage between two scrapes."""

    def __init__(self, window: Window, limits: Thresholds):
        self.window = window
        self.limits = limits
        lags = window.count("segue_loop_lag_seconds", "router")
        # by which the router's loop is late; whatever it measures is longer by it
        self.lag = window.sum("segue_loop_lag_seconds", "router") / lags if lags else 0.0
        self.tokenizing = self._tokenizing()
        self.queued, self.computing = (
            self._at_workers("segue_prefill_queue"),
            self._at_workers("segue_prefill_compute"),
        )
        self.waiting = max(self._state("waiting"), self._stay("segue_queue").requests)
        self.ready = max(self._state("ready"), self._stay("segue_ready").requests)
        self.decoding = self._state("decoding")
        seen = window.gauge(RUNNING) or min(
            self._stay("segue_request").requests, window.count("segue_request_seconds", "router")
        )
        self.open = seen + self.tokenizing.requests
        self.fetching = self._fetches()
        self.itl_seconds = self._itl_seconds()
        self.slow_pods = self._slow_pods()

    def waits(self) -> dict[Stage, float]:
        """Requests that wait for each stage, on average."""
        limits, link_is_full = self.limits, self.link_is_full()
        link = self.fetching.above(limits.fetch_seconds) if link_is_full else 0.0
        rows = max(0.0, self.decoding - link)
        slow_steps = Stay(rows, self.itl_seconds).above(limits.itl_seconds)
        decode = max(slow_steps, sum(self.slow_pods.values()))
        prefill = self.queued.requests + self.computing.above(limits.compute_seconds)
        if not any(self.window.of_role(role) for role in COMPUTES_PROMPTS):
            prefill = max(0.0, self._state("prefilling") - self.workers("prefill"))  # one each is computed
        router = self.tokenizing.above(limits.tokenize_seconds)
        router += Stay(self.open, self.lag).above(limits.lag_seconds)
        waits: dict[Stage, float] = {"prefill": 0.0, "decode": decode, "kv link": link, "router": router}
        after: Stage = "kv link" if link > decode else "decode"
        computes: Stage = "prefill" if self.workers("prefill") or not self.workers("decode") else "decode"
        held = self.ready + max(decode, link)
        is_held = held >= max(limits.waiting_requests, limits.behind_share * prefill)
        waits[computes] += prefill
        waits[after] += self.ready
        waits[after if is_held else computes] += self.waiting
        return waits

    def link_is_full(self) -> bool:
        """Whether reads of KV are slow, and some are under way all the time."""
        slow = max(self.limits.fetch_seconds, self.limits.fetch_by_itl * min(self.itl_seconds, 1.0))
        pods = max(1.0, self.workers("decode"))
        return self.fetching.seconds >= slow and self.fetching.requests >= self.limits.fetches_a_pod * pods

    def workers(self, role: str) -> float:
        """Workers of a role, as the router that is linked to most of them sees it."""
        routers = self.window.of_role("router")
        return max(self.window.gauge("segue_workers", at, worker_role=role) for at in routers)

    def pages_used(self) -> float:
        """The share of the decode workers' pages that are neither free nor evictable."""
        pages = self.window.by_label("state", Window.gauge, "segue_pages", role="decode")
        whole = sum(pages.values())
        return 1 - (pages.get("free", 0.0) + pages.get("tree", 0.0)) / whole if whole else 0.0

    def slots_used(self) -> float:
        """The share of the decode workers' slots that are taken."""
        slots = self.window.gauge("segue_slots", role="decode")
        return self.window.gauge("segue_slots_used", role="decode") / slots if slots else 0.0

    def fetched_bytes_a_second(self) -> float:
        """Bytes of KV that the decode workers read."""
        return self.window.rate("segue_kv_fetched_bytes_total", role="decode")

    def _state(self, state: str) -> float:
        return self.window.gauge(RUNNING, role="router", state=state)

    def _stay(self, name: str, **labels: str) -> Stay:
        """What routers have measured of a stage, less the lag of their loop."""
        count = self.window.count(f"{name}_seconds", "router", **labels)
        total = max(0.0, self.window.sum(f"{name}_seconds", "router", **labels) - count * self.lag)
        return Stay(total / self.window.seconds, total / count if count else 0.0)

    def _at_workers(self, name: str) -> Stay:
        """What the workers that compute prompts have measured of a stage."""
        count = sum(self.window.count(f"{name}_seconds", role) for role in COMPUTES_PROMPTS)
        total = sum(self.window.sum(f"{name}_seconds", role) for role in COMPUTES_PROMPTS)
        return Stay(total / self.window.seconds, total / count if count else 0.0)

    def _tokenizing(self) -> Stay:
        """Prompts at the tokenizer. Where they come faster than it takes them, each is there for long."""
        measured = self._stay("segue_tokenize")
        there = self.window.gauge("segue_tokenizing")
        return Stay(max(measured.requests, there), measured.seconds or (inf if there else 0.0))

    def _fetches(self) -> Stay:
        """Reads of KV. Where none has ended, as many as pages that arrive are of a decode worker's used ones."""
        ended = self._stay("segue_fetch")
        pages = self.window.by_label("state", Window.gauge, "segue_pages", role="decode")
        arriving, owned = pages.get("arriving", 0.0), pages.get("owned", 0.0)
        under_way = self.decoding * arriving / (arriving + owned) if arriving else 0.0
        if under_way > ended.requests and not ended.seconds:
            return Stay(under_way, inf)
        return Stay(max(ended.requests, under_way), ended.seconds)

    def _itl_seconds(self) -> float:
        """The mean gap between tokens that a decode worker gives; inf: it has requests and gives none.

        The gap before a second token is left out: handing over is in it.
        """
        gaps, first = self._stay("segue_itl"), self._stay("segue_second_token")
        count = self.window.count("segue_itl_seconds", "router")
        count -= self.window.count("segue_second_token_seconds", "router")
        if count > 0:
            return max(0.0, gaps.requests - first.requests) * self.window.seconds / count
        return inf if self._state("decoding") > self.fetching.requests else 0.0

    def _slow_pods(self) -> dict[str, float]:
        """Requests that each slow decode pod holds up: the part of them that a pod like the others would have done."""
        window, rates = self.window, {}
        for at in window.of_role("decode"):
            rows = window.gauge("segue_slots_used", at)
            if rows >= 1:
                rates[at] = rows, window.rate(SAMPLED, at) / rows
        slow = {}
        for at, (rows, rate) in rates.items():
            others = [each for other, (_, each) in rates.items() if other != at]
            usual = median(others) if others else 0.0
            if rate < self.limits.slow_pod_share * usual:
                slow[at] = rows * (1 - rate / usual)
        return slow


# ---- tenants ---------------------------------------------------------------------------------------------------------


def _greedy_tenant(window: Window, limits: Thresholds, stage: Stage) -> LiveVerdict | None:
    """The key that has most of what is open, or of the tokens that were used, while another key has some."""
    shares = window.by_label("key", Window.gauge, "segue_key_requests_open")
    unit = "open requests"
    if not any(shares.values()):
        shares, unit = window.by_label("key", Window.grown, "segue_usage_tokens_total"), "tokens"
    ended = window.by_label("key", Window.grown, "segue_key_requests_total")
    total, active = sum(shares.values()), [key for key in shares | ended if shares.get(key) or ended.get(key)]
    key = max(shares, key=lambda each: shares[each], default="")
    if len(active) < 2 or shares[key] < limits.tenant_share * total:
        return None
    figure = f"key {key} has {shares[key]:.0f} of {total:.0f} {unit}, and requests wait for {stage}"
    turn = (
        f"the line of {key} in the file of API keys: concurrent=N or tpm=N; or router.config.tenantRunningMax"
    )
    return LiveVerdict("tenant", (figure,), turn)


def _limited_tenant(window: Window, limits: Thresholds) -> LiveVerdict | None:
    """The key that meets limits of its own while the fleet has room."""
    for key, of_key in window.parts("key", "segue_key_requests_total").items():
        outcomes = of_key.by_label("outcome", Window.grown, "segue_key_requests_total")
        refused = {name: n for name, n in outcomes.items() if name in ("rpm", "tpm", "concurrent") and n}
        if sum(refused.values()) > limits.limited_share * sum(outcomes.values()):
            limit = max(refused, key=lambda name: refused[name])
            counts = f"{sum(refused.values()):.0f} of {sum(outcomes.values()):.0f}"
            figure = f"{counts} requests of key {key} met its {limit}"
            return LiveVerdict("tenant", (figure,), f"the line of {key} in the file of API keys: {limit}=N")
    return None


# ---- what is said ----------------------------------------------------------------------------------------------------

TURN_CLIENT = "the client: more requests at a time; or fewer pods, for nothing waits for them"


def _figures(stages: _Stages, waits: Mapping[Stage, float]) -> tuple[str, ...]:
    """The figures on which a verdict rests, those of the worst stage first."""
    said: dict[Stage, str] = {
        "prefill": f"prefill: {stages.queued.requests:.1f} requests in its queues "
        f"({_seconds(stages.queued.seconds)} each), a prompt takes {_seconds(stages.computing.seconds)}",
        "decode": f"decode: {stages.ready:.1f} requests wait for it, {stages.decoding:.1f} are in it "
        f"({_seconds(stages.itl_seconds)} between tokens), KV pages used {stages.pages_used():.0%}{_slow(stages)}",
        "kv link": f"KV link: {stages.fetching.requests:.1f} reads under way, "
        f"{_seconds(stages.fetching.seconds)} each, {stages.fetched_bytes_a_second() / 1e6:.1f} MB/s",
        "router": f"router: its loop is late by {_seconds(stages.lag)}, {stages.tokenizing.requests:.1f} requests are "
        f"tokenized ({_seconds(stages.tokenizing.seconds)} each)",
    }
    ranked = sorted(waits, key=lambda stage: -waits[stage])
    head = (
        f"{stages.open:.1f} requests open, {stages.waiting:.1f} of them in the router's queue; they wait for "
    )
    head += ", ".join(f"{stage}: {waits[stage]:.1f}" for stage in ranked)
    return (head, *(said[stage] for stage in ranked))


def _slow(stages: _Stages) -> str:
    return f"; slow: {', '.join(stages.slow_pods)}" if stages.slow_pods else ""


def _turn(stages: _Stages, stage: Stage) -> str:
    """The value that moves this stage."""
    match stage:
        case "prefill":
            if not stages.workers("prefill"):
                return "prefill.replicas: no prefill worker is linked"
            return "prefill.replicas; prefill.config.chunkedPrefillSize where prompts are long"
        case "kv link":
            return "rdma.* and kv.transport (docs/operating.md), or decode.replicas: each pod has a link"
        case "router":
            return "router.replicas, and whole cores for each: router.resources"
    return _turn_decode(stages)


def _turn_decode(stages: _Stages) -> str:
    if not stages.workers("decode"):
        return "decode.replicas: no decode worker is linked"
    if stages.slow_pods:
        return f"the node of {', '.join(stages.slow_pods)}: its tokens come at less than half of the others' rate"
    if stages.itl_seconds > stages.limits.itl_seconds:
        return "decode.replicas: steps are slow; decode.config.maxRunningRequests bounds their rows"
    if stages.slots_used() >= stages.limits.slots_full:
        return "decode.config.maxRunningRequests: all slots are taken; or decode.replicas"
    return "decode.replicas, or decode.config.kvPages: KV pages are kept for what runs, and its growth"


def _seconds(seconds: float) -> str:
    if seconds == inf:
        return "none has ended"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
