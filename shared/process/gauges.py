"""Every gauge of every process. Shells set them; cores have no gauges.

A new gauge is declared here and set by the shell that publishes it: `publish_scheduler` and `shared.worker.worker` for
workers, `router.metrics_publisher` for routers. Counters and histograms are declared where they are counted, in
a `counters.py` (see `shared.primitives.metric_fields`). `make docs` writes all of them into docs/reference.md.
"""

from __future__ import annotations

from shared.primitives.metric_fields import GaugeMetric

BUILD_INFO = GaugeMetric(
    "segue_build_info",
    "Always 1; the labels are the version that runs and the protocol of its links.",
    ("version", "protocol"),
)
MODEL_INFO = GaugeMetric(
    "segue_model_info",
    "Always 1; the labels are what a worker has loaded: model and KV format as they must agree, and what it chose.",
    ("model", "fingerprint", "kv_format", "dtype", "device", "page_size", "context_len"),
)
LOOP_TURN_SECONDS = GaugeMetric(
    "segue_loop_turn_seconds",
    "Seconds since the main loop last turned, or its device got on, as of the scrape: what /livez judges.",
)
READY = GaugeMetric("segue_ready", "1 when the process is ready, else 0.")

PAGES = GaugeMetric("segue_pages", "KV pages of a worker by state; their sum is the pool.", ("state",))
LEASES = GaugeMetric("segue_leases", "Leases that a worker holds for readers.")
SLOTS = GaugeMetric("segue_slots", "Requests that a worker may have on the device at a time.")
SLOTS_USED = GaugeMetric("segue_slots_used", "Requests that occupy a slot of a worker.")
KV_USED_RATIO = GaugeMetric(
    "segue_kv_used_ratio",
    "Part of a worker's KV pages that a request could not have now: neither free nor held by the cache alone. A router "
    "shows that of all decode workers of its cells together.",
)
MEMORY_BYTES = GaugeMetric(
    "segue_memory_bytes",
    "Bytes that a worker has set apart at its start, by kind. On cuda all but host_kv are the GPU's.",
    ("kind",),
)
KV_LINK_BYTES_PER_SECOND = GaugeMetric(
    "segue_kv_link_bytes_per_second",
    "Bytes a second that the best of the last fetches of at least 1 MiB from this peer carried, by transport.",
    ("peer", "transport"),
)
KV_LINKS_SLOW = GaugeMetric(
    "segue_kv_links_slow", "Peers whose link carries less than a quarter of what the best one carries."
)

REQUESTS_RUNNING = GaugeMetric(
    "segue_requests_running", "Requests that a router serves, by state.", ("state",)
)
QUEUED_REQUESTS = GaugeMetric(
    "segue_queued_requests",
    "Requests at a router that wait for a worker: for one that computes their prompt, or, behind it, for decode.",
)
RUNNING_REQUESTS = GaugeMetric("segue_running_requests", "Requests of a router that a worker has.")
OLDEST_REQUEST_SECONDS = GaugeMetric(
    "segue_oldest_request_seconds",
    "Seconds since the last token or change of state of the request that has waited longest for one, by its state at "
    "the router.",
    ("state",),
)
TOKENIZING = GaugeMetric(
    "segue_tokenizing",
    "Requests whose body is there and whose prompt is not tokenized: they wait for a thread, or have one (running).",
    ("state",),
)
KEY_REQUESTS_OPEN = GaugeMetric(
    "segue_key_requests_open",
    "HTTP requests that were let in and have not ended, by the name of their API key. Keys are lines of a file, so "
    "there are as many series as it has names.",
    ("key",),
)
KEY_CONTEXT_TOKENS = GaugeMetric(
    "segue_key_context_tokens",
    "Tokens of the streams that run, prompts and outputs together, by the name of their API key: their part of the KV.",
    ("key",),
)
CERTIFICATE_EXPIRY = GaugeMetric(
    "segue_tls_certificate_expiry_timestamp_seconds",
    "Seconds from 1970 to the end of the certificate that new connections to a router get.",
)
CONNECTIONS = GaugeMetric("segue_http_connections", "Client connections that are open at a router.")
WORKERS = GaugeMetric("segue_workers", "Workers that are linked to a router, by role.", ("worker_role",))
DISCOVERY_REACHABLE = GaugeMetric(
    "segue_discovery_reachable",
    "1 when the last list and watch of EndpointSlices were answered, else 0; the last known pods are used until then.",
    ("source",),
)
DISCOVERY_AGE_SECONDS = GaugeMetric(
    "segue_discovery_age_seconds",
    "Seconds since the API server last answered about EndpointSlices.",
    ("source",),
)
DISCOVERY_PODS = GaugeMetric(
    "segue_discovery_pods",
    "Workers' pods by state; work is sent to those that are dialed, and those elsewhere belong to other routers.",
    ("state",),
)
