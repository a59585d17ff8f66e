"""A device whose every wrong page, position or token shows in what it samples, with the step times of a modelled one.

It computes the oracle's model of tests/simulation: a KV cell is a hash of all before it. So a run that uses it may
say that tokens are right, not only that there are as many as there should be. A text has no end of its own: it is as
long as its request allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.batch.schedule_batch import ScheduleBatch
from shared.wire.sampling_params import SamplingParams
from tests.benchmarks.virtual_cluster.device import StepTimes
from tests.simulation.oracle.device import OracleDevice
from tests.simulation.oracle.model import kv_cell, sample


@dataclass(slots=True, kw_only=True)
class TimedOracle(OracleDevice):
    """The `Device` of one virtual worker, with pages."""

    times: StepTimes
    busy_seconds: float = 0.0
    _contexts: dict[int, int] = field(default_factory=dict)  # tokens with KV once all launched steps are done

    def seconds_of(self, batch: ScheduleBatch) -> float:
        for join in batch.joins:
            self._contexts[join.slot] = join.kv_len
        seconds = self.times.of(batch, sum(self._contexts[slot] for slot in batch.decode_slots))
        for slot in batch.decode_slots:
            self._contexts[slot] += 1
        for row in batch.extend:
            self._contexts[row.slot] = row.start + len(row.token_ids)
        self.busy_seconds += seconds
        return seconds

    @property
    def step_ends_at(self) -> float | None:
        """When the oldest step in flight ends, in seconds; None: there is none."""
        return self._steps[0].completes_at if self._steps else None

    @property
    def ends_a_prompt(self) -> bool:
        """Whether a step in flight ends a prompt."""
        return any(row.samples for step in self._steps for row in step.extend)


class OracleText:
    """What is said in one conversation, computed without pages, batches or workers: each token once."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._cells: list[int] = []

    def answer(self, new: Sequence[int], output_len: int, params: SamplingParams) -> tuple[int, ...]:
        """The output of so many tokens to all that was said before and `new`; both are said from now on."""
        self.token_ids += new
        prompt_len = len(self.token_ids)
        for _ in range(output_len):
            for token_id in self.token_ids[len(self._cells) :]:
                self._cells.append(kv_cell(self._cells, token_id))
            self.token_ids.append(sample(self._cells, params, prompt_len, ()))
        return tuple(self.token_ids[prompt_len:])
