"""A device that also writes down the logits of every sampled position, by request and by place in the output.

Steps know slots, not requests. A request is recognized by its seed, which joins carry and no two requests of a run
share; its place in the sequence is counted from the deltas that batches carry, as the device itself does.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shared.batch.schedule_batch import ForwardMode, ScheduleBatch
from shared.engine.parts import EngineDevice
from shared.wire.sampled import Sampled

Place = tuple[int, int]  # seed of the request, index in its output


class Logbook:
    """What was sampled from, in the order of the steps; `write` is the engine's `on_logits`."""

    def __init__(self) -> None:
        self.logits: dict[Place, list[Tensor]] = {}  # more than one: the same place was computed again
        self._planned: dict[
            int, tuple[tuple[int, ...], list[Place]]
        ] = {}  # slots and places of rows, by step
        self._slots: dict[int, tuple[int, int, int]] = {}  # seed, prompt_len, kv_len

    def plan(self, batch: ScheduleBatch) -> None:
        """Note whose rows a step will sample; called before the step is launched."""
        for join in batch.joins:
            self._slots[join.slot] = join.params.seed, join.prompt_len, join.kv_len
        for row in batch.extend:
            self._lengthen(row.slot, len(row.token_ids))
        for slot in batch.decode_slots:
            self._lengthen(slot, 1)
        slots = (*batch.decode_slots, *(row.slot for row in batch.extend if row.samples))
        self._planned[batch.step] = slots, [self._place(slot) for slot in slots]

    def write(self, step: int, slots: tuple[int, ...], logits: Tensor) -> None:
        """Keep the rows of a step; runs on the device's thread."""
        planned_slots, places = self._planned.pop(step)
        assert slots == planned_slots
        for place, row in zip(places, logits, strict=True):
            self.logits.setdefault(place, []).append(row)

    def _lengthen(self, slot: int, tokens: int) -> None:
        seed, prompt_len, kv_len = self._slots[slot]
        self._slots[slot] = seed, prompt_len, kv_len + tokens

    def _place(self, slot: int) -> Place:
        seed, prompt_len, kv_len = self._slots[slot]
        return seed, kv_len - prompt_len


class RecordingDevice:
    """A `EngineDevice` whose steps are entered in a logbook. Implements `Device`."""

    def __init__(self, device: EngineDevice, logbook: Logbook) -> None:
        self._device = device
        self._logbook = logbook
        self._unsettled = 0
        self.unsettled_max = 0  # steps launched, not waited for: 1 in the normal loop, 2 with overlap
        self.rows_max: dict[ForwardMode, int] = dict.fromkeys(ForwardMode, 0)

    def launch(self, batch: ScheduleBatch) -> None:
        """See `Device`."""
        self._unsettled += 1
        self.unsettled_max = max(self.unsettled_max, self._unsettled)
        rows = len(batch.extend) + len(batch.decode_slots)
        self.rows_max[batch.mode] = max(self.rows_max[batch.mode], rows)
        self._logbook.plan(batch)
        self._device.launch(batch)

    def wait(self, step: int) -> Sampled:
        """See `Device`."""
        self._unsettled -= 1
        return self._device.wait(step)

    def completed(self) -> int:
        """See `Device`."""
        return self._device.completed()

    def start_backup(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """See `Device`."""
        self._device.start_backup(copy_id, pages, host_pages)

    def start_restore(self, copy_id: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """See `Device`."""
        self._device.start_restore(copy_id, host_pages, pages)

    def copies_done(self) -> list[int]:
        """See `Device`."""
        return self._device.copies_done()

    def close(self) -> None:
        """End the device's thread."""
        self._device.close()
