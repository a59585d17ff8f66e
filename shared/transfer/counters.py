"""What has happened at the KV ports of a worker so far: plain numbers, published by the shell and read by tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shared.primitives.metric_fields import CounterMetric, all_declared, counted, counted_by, total

PEERS_COUNTED_MAX = 256  # addresses that have series of their own; pods come and go
OTHER_PEERS = "others"
KvNumbers = dict[str, int | dict[str, int]]

REFUSALS = CounterMetric(
    "segue_kv_refusals_total", "Connections and reads of KV that this worker refused, by cause.", ("cause",)
)
READS = CounterMetric(
    "segue_kv_reads_total",
    "Reads of this worker's pages and leases that were answered over the TLS transport, by the reader's address.",
    ("peer",),
)
READS_REFUSED = CounterMetric(
    "segue_kv_reads_refused_total",
    "Reads of this worker's pages and leases that opened nothing, by the reader's address: the lease had ended (a few "
    "do), the nonce was wrong, or the pages were not the lease's.",
    ("peer",),
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
    reads: Counter[str] = counted_by(READS)
    reads_refused: Counter[str] = counted_by(READS_REFUSED)
    words_told: int = total(
        "segue_kv_words_told_total",
        "Lease words told to workers of the release before that had not shown to know them; their pages were closed.",
    )
    fetches: Counter[str] = counted_by(TRANSPORT_FETCHES)
    fetched_bytes: Counter[str] = counted_by(TRANSPORT_BYTES)

    def with_others(self, others: Iterable[KvCounters]) -> KvCounters:
        """Add up what happened at the ports of all ranks; these themselves where there is one.

        Threads of a port go on counting meanwhile, so copies are added up: each is made at once.
        """
        sums = self
        for each in others:
            one, other = (KvCounters.of_numbers(counters.as_numbers()) for counters in (sums, each))
            sums = KvCounters(*(getattr(one, name) + getattr(other, name) for name in KvCounters.__slots__))
        return sums

    def as_numbers(self) -> KvNumbers:
        """All of it as plain numbers, for a message."""
        found = {name: getattr(self, name) for name in KvCounters.__slots__}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in found.items()}

    @classmethod
    def of_numbers(cls, numbers: KvNumbers) -> KvCounters:
        """Take back what `as_numbers` has given."""
        return cls(
            **{name: Counter(value) if isinstance(value, dict) else value for name, value in numbers.items()}  # type: ignore[arg-type]
        )

    def count_read(self, peer: str, *, answered: bool) -> None:
        """One read by the worker at this address; addresses beyond the bound are counted together."""
        counts = self.reads if answered else self.reads_refused
        counts[peer if peer in counts or len(counts) < PEERS_COUNTED_MAX else OTHER_PEERS] += 1
