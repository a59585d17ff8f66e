"""What has happened at the KV ports of a worker so far: plain numbers, published by the shell and read by tests."""

from __future__ import annotations

from dataclasses import dataclass

from shared.metric_fields import CounterMetric, all_declared, counted

REFUSALS = CounterMetric(
    "segue_kv_refusals_total", "Connections and reads of KV that this worker refused, by cause.", ("cause",)
)


@all_declared
@dataclass(slots=True)
class KvCounters:
    """Totals since the start; NIXL refuses nobody and counts nothing."""

    # plain bytes, no key, a foreign key, or no handshake in time
    refused_handshake: int = counted(REFUSALS, cause="handshake")
    # handshakes under way, or connections of workers, were at their bound
    refused_crowded: int = counted(REFUSALS, cause="crowded")
    # a worker of ours asked for what it must not read, or sent what cannot be read
    refused_request: int = counted(REFUSALS, cause="request")
