"""Settings of a worker that computes prompts: its queue, and how it is ordered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from shared.process.settings import Count, PositiveInt
from shared.scheduling.prompt_queue import QueueRules
from shared.scheduling.queue_policy import QueuePolicy
from shared.worker.worker_config import WorkerConfig


class PromptConfig(WorkerConfig):
    """Settings of every worker with a `PromptQueue`."""

    groups: ClassVar[Mapping[str, str]] = {"scheduling": "max_queued_requests queue_policy"}

    max_queued_requests: PositiveInt = Field(
        default=1024,
        description="Requests that wait here. A further one is refused, and the router tries another worker.",
    )
    queue_policy: QueuePolicy = Field(
        default="fcfs", description="Order of the waiting requests. fcfs starves none."
    )
    prefix_aware_queue_max: PositiveInt = Field(
        default=128,
        description="Waiting requests that are compared with the cache and with each other. In a longer queue lpm and "
        "dfs-weight act as fcfs, because matching costs too much.",
    )
    shared_prefix_cached_tokens_max: Count = Field(
        default=32,
        description="Cached tokens up to which a request may wait one round for a prefix that another one computes.",
    )
    shared_prefix_tokens_min: PositiveInt = Field(
        default=32,
        description="Tokens that two waiting requests must share before the second one waits for the first.",
    )

    @property
    def queue_rules(self) -> QueueRules:
        """What bounds and orders the queue."""
        return QueueRules(
            max_queued_requests=self.max_queued_requests,
            queue_policy=self.queue_policy,
            prefix_aware_queue_max=self.prefix_aware_queue_max,
            shared_prefix_cached_tokens_max=self.shared_prefix_cached_tokens_max,
            shared_prefix_tokens_min=self.shared_prefix_tokens_min,
        )
