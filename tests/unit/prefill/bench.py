"""A prefill core on the bench."""

from __future__ import annotations

from typing import Any

from prefill.config import PrefillConfig
from prefill.scheduler import PrefillScheduler
from shared.batch.schedule_batch import ExtendRow
from tests.unit.scheduling.worker_bench import (
    EOS,
    HOLDER,
    KV_FORMAT,
    PAGE_SIZE,
    VOCAB_SIZE,
    PlainWords,
    WorkerBench,
)

CONTEXT_LEN = 256


class PrefillBench(WorkerBench):
    """One prefill scheduler with small pages; `settings` go into its config."""

    def __init__(
        self, *, pages: int = 64, words: int = 8, overlap: bool = True, routers: int = 1, **settings: Any
    ):
        self.words = PlainWords([0] * words)
        self.core = PrefillScheduler(
            PrefillConfig(
                page_size=PAGE_SIZE, **{"max_running_requests": 4, "lease_fraction": 1.0} | settings
            ),
            pages=pages,
            context_len=CONTEXT_LEN,
            holder=HOLDER,
            words=self.words,
            kv_format=KV_FORMAT,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
        )
        super().__init__("prefill", self.core, overlap=overlap, routers=routers)

    @property
    def extends(self) -> list[tuple[ExtendRow, ...]]:
        """The rows of each EXTEND step so far."""
        return [batch.extend for batch in self.device.batches]

    @property
    def holds_nothing(self) -> bool:
        """Whether no page is held but by the cache, and no lease lives."""
        memory = self.core.memory
        return (
            memory.available_pages == memory.pool.total
            and not any(self.words.values)
            and self.core.slots_used == 0
        )
