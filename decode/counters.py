"""What has happened on a decode worker so far: plain numbers, published by the shell and read by tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.kv.leases import LeaseCounters


@dataclass(slots=True)
class DecodeCounters(LeaseCounters):
    """`observations` are (metric, value) pairs since the shell last took them."""

    requests: int = 0
    joined: int = 0
    waited_for_prefix: int = 0  # did not fetch what another request was fetching
    full_hits: int = 0  # joined without a fetch: all pages were cached here
    fetched_bytes: int = 0
    cached_tokens: int = 0
    no_room: int = 0
    stale: int = 0  # the lease had ended before the reads did
    unreachable: int = 0  # the fetch failed
    quarantines: int = 0
    refused: int = 0
    cancelled: int = 0
    finished: int = 0
    decode_steps: int = 0
    prebuilt_steps: int = 0
    generated_tokens: int = 0
    extra_tokens: int = 0  # computed by an overlapped step for a request that had ended, discarded
    rows_without_page: int = 0  # rows that lacked a page and missed a step
    retractions: int = 0
    backups: int = 0
    resumes: int = 0
    returned_to_router: int = 0  # retracted without room in host memory: another attempt recomputes them
    migrations: int = 0  # requests lent to continue elsewhere
    observations: list[tuple[str, float]] = field(default_factory=list)
