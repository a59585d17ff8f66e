"""What has happened at the KV ports of a worker so far: plain numbers, published by the shell and read by tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shared.metric_fields import CounterMetric, all_declared, counted, counted_by

REFUSALS = CounterMetric(
    "segue_kv_refusals_total", "Connections and reads of KV that this worker refused, by cause.", ("cause",)
)
TRANSPORT_FETCHES = CounterMetric(
    "segue_kv_transport_fetches_total",
    "Fetches from other workers whose pages all arrived, by transport; those whose lease had ended then count, too.",
    ("transport",),
)
TRANSPORT_BYTES = CounterMetric(
    "segue_kv_transport_bytes_total", "Bytes of KV that these fetches carried, by transport.", ("transport",)
)


@all_declared
@dataclass(slots=True)
class KvCounters:
    """Totals since the start; NIXL refuses nobody."""

    # plain bytes, no key, a foreign key, or no handshake in time
    refused_handshake: int = counted(REFUSALS, cause="handshake")
    # handshakes under way, or connections of workers, were at their bound
    refused_crowded: int = counted(REFUSALS, cause="crowded")
    # a worker of ours asked for what it must not read, or sent what cannot be read
    refused_request: int = counted(REFUSALS, cause="request")
    fetches: Counter[str] = counted_by(TRANSPORT_FETCHES)
    fetched_bytes: Counter[str] = counted_by(TRANSPORT_BYTES)
