"""What a scheduler's process may ask of an accelerator.

Two implementations: `engine.cpu.torch_device` (real) and the oracle in `tests/simulation` (a KV cell is a hash of
the whole prefix). Steps and copies run in the order they were launched, on the device's own stream (on CPU: its own
thread). A page may be reused by a later *step* at once; as source or target of a fetch or a copy, only after
the last launched step that saw it has completed. Observing that is the scheduler's duty (`page_pool.retire`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.batch.schedule_batch import ScheduleBatch
from shared.wire.sampled import Sampled


class Device(Protocol):
    """An accelerator with a paged KV cache, a host pool for retracted pages, and per-slot state."""

    def launch(self, batch: ScheduleBatch) -> None:
        """Enqueue a step; returns at once."""

    def wait(self, step: int) -> Sampled:
        """Block until `step` has completed; what it sampled. Each step is waited for once."""

    def completed(self) -> int:
        """The number of the last completed step (steps complete in order); 0 before the first."""

    def start_backup(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Enqueue a copy of device pages into host pages."""

    def start_restore(self, copy_id: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Enqueue a copy of host pages into device pages."""

    def copies_done(self) -> list[int]:
        """Ids of the copies that have completed since the last call."""
