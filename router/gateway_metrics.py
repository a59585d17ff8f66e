"""The page of metrics at a router's API port, for an inference gateway's endpoint picker and for tools that know vLLM.

A picker reads the port that it sends requests to, some twenty times a second, and wants three gauges of each endpoint,
without labels and by names that it is told: requests that wait, requests that run, and the share of KV that is used
(Gateway API Inference Extension, model server protocol). Behind one router stand all workers of its cells, so its
figures are theirs. vLLM's names for the same, and for its latencies, are given where they are asked for: dashboards
and load generators look for these. Nothing here is by key, tenant or peer: whoever reaches the API may read it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from shared.primitives.metric_fields import GaugeMetric
from shared.process import gauges
from shared.process.metrics import CONTENT_TYPE, Metrics

PATH = "/metrics"
KEPT_SECONDS = 0.05  # a page: whoever reaches the API may ask for it without end
QUEUED_STATES = ("waiting", "ready")
VLLM_GAUGES = {
    gauges.QUEUED_REQUESTS: "vllm:num_requests_waiting",
    gauges.RUNNING_REQUESTS: "vllm:num_requests_running",
    gauges.KV_USED_RATIO: "vllm:kv_cache_usage_perc",
}
VLLM_HISTOGRAMS = {
    "segue_ttft_seconds": "vllm:time_to_first_token_seconds",
    "segue_itl_seconds": "vllm:inter_token_latency_seconds",
    "segue_request_seconds": "vllm:e2e_request_latency_seconds",
}


class GatewayMetrics:
    """Writes the page; on the event loop."""

    def __init__(self, core: RouterCore, metrics: Metrics, settings: RouterConfig):
        self._core = core
        self._metrics = metrics
        self._names = settings.metric_names
        self._on_api_port = settings.metrics_on_api_port
        escaped = settings.model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._labels = f'model_name="{escaped}",engine="0"'
        self._kept = b""
        self._kept_until = -math.inf

    def values(self) -> dict[GaugeMetric, float]:
        """The three gauges, by Segue's names."""
        states = self._core.requests_by_state
        queued = sum(states.get(state, 0) for state in QUEUED_STATES)
        decode = [worker for worker in self._core.fleet.of_role("decode") if worker.hello.limits.pages]
        pages = sum(worker.hello.limits.pages for worker in decode)
        free = sum(min(worker.load.free_pages, worker.hello.limits.pages) for worker in decode)
        return {
            gauges.QUEUED_REQUESTS: queued,
            gauges.RUNNING_REQUESTS: sum(states.values()) - queued,
            gauges.KV_USED_RATIO: 1 - free / pages if pages else 0.0,
        }

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app`, with the page before it where the settings want that: it is asked for without a key."""
        return with_metrics(app, self.kept_page) if self._on_api_port else app

    def kept_page(self) -> bytes:
        """The page, as it was at most `KEPT_SECONDS` ago."""
        now = time.monotonic()
        if now >= self._kept_until:
            self._kept, self._kept_until = self.page(), now + KEPT_SECONDS
        return self._kept

    def page(self) -> bytes:
        """The text, in Prometheus' format."""
        values = self.values()
        lines: list[str] = []
        if self._names != "vllm":
            for gauge, value in values.items():
                lines += [f"# TYPE {gauge.name} gauge", f"{gauge.name} {value}"]
        if self._names != "segue":
            lines += self._of_vllm(values)
        return ("\n".join(lines) + "\n").encode()

    def _of_vllm(self, values: Mapping[GaugeMetric, float]) -> Iterator[str]:
        for gauge, value in values.items():
            alias = VLLM_GAUGES[gauge]
            yield f"# TYPE {alias} gauge"
            yield f"{alias}{{{self._labels}}} {value}"
        yield from self._cache_config()
        for name, alias in VLLM_HISTOGRAMS.items():
            yield f"# TYPE {alias} histogram"
            buckets, total = self._metrics.histogram(name)
            for bound, count in buckets:
                yield f'{alias}_bucket{{{self._labels},le="{bound}"}} {count}'
            yield f"{alias}_count{{{self._labels}}} {buckets[-1][1] if buckets else 0}"
            yield f"{alias}_sum{{{self._labels}}} {total}"

    def _cache_config(self) -> Iterator[str]:
        limits = [worker.hello.limits for worker in self._core.fleet.of_role("decode")]
        if limits:
            pages = sum(each.pages for each in limits)
            config = f'block_size="{limits[0].page_size}",num_gpu_blocks="{pages}"'
            yield "# TYPE vllm:cache_config_info gauge"
            yield f"vllm:cache_config_info{{{self._labels},{config}}} 1.0"


def with_metrics(app: ASGIApp, page: Callable[[], bytes]) -> ASGIApp:
    """`app`, and the page at its path."""

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] not in ("GET", "HEAD"):
            await app(scope, receive, send)
            return
        body = page()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return routed
