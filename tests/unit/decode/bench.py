"""A decode core on the bench."""

from __future__ import annotations

from typing import Any

from decode.config import DecodeConfig
from decode.scheduler import DecodeScheduler
from shared.wire.messages import UNDERSTOOD, Generated
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


class DecodeBench(WorkerBench):
    """One decode scheduler with small pages; `settings` go into its config."""

    def __init__(
        self,
        *,
        pages: int = 64,
        host_pages: int = 32,
        words: int = 8,
        overlap: bool = True,
        routers: int = 1,
        understands: tuple[str, ...] = UNDERSTOOD["router"],
        **settings: Any,
    ):
        defaults = {
            "max_running_requests": 8,
            "init_new_token_ratio": 0.0,
            "retract_steps": 4,
            "tenant_share_max": 1.0,
            "local_tokens_max": 0,
        }
        self.words = PlainWords([0] * words)
        self.core = DecodeScheduler(
            DecodeConfig(page_size=PAGE_SIZE, **defaults | settings),
            pages=pages,
            host_pages=host_pages,
            context_len=CONTEXT_LEN,
            holder=HOLDER,
            words=self.words,
            kv_format=KV_FORMAT,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
        )
        super().__init__("decode", self.core, overlap=overlap, routers=routers, understands=understands)

    @property
    def holds_nothing(self) -> bool:
        """Whether no page is held but by the cache, no slot is used, no lease lives and host memory is free."""
        memory, host = self.core.memory, self.core.host
        free = memory.available_pages == memory.pool.total and host.free == host.total
        return free and self.core.slots_used == 0 and not any(self.words.values)

    def tokens(self, rid: str, attempt: int = 1) -> list[int]:
        """The tokens the routers heard of a request, in order; an index out of order is an error."""
        token_ids: list[int] = []
        for message in self.said(Generated):
            for row in message.rows:
                if (row.rid, row.attempt) == (rid, attempt):
                    assert row.index == 1 + len(token_ids)
                    token_ids += row.token_ids
        return token_ids
