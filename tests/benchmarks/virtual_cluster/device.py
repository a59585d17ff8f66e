"""The accelerator of a virtual worker: steps and copies take a modelled time, and nothing is computed.

How long an output becomes is decided by the client, as the text decides it in a real deployment: `output_seed` hides
the length in the sampling seed, and the device samples an end token at that place. It knows pages only by their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

from shared.batch.schedule_batch import ScheduleBatch, SlotJoin
from shared.scheduling.step_cost import sum_of_positions
from shared.wire.sampled import Sampled
from shared.wire.sampling_params import SamplingParams
from tests.simulation.world.timeline import Action, TimelineProcess

EOS_TOKEN_ID = 300  # no prompt has it: their tokens are bytes
VOCAB_SIZE = 1024
_LENGTH_BITS = 24


def output_seed(number: int, output_len: int) -> int:
    """The sampling seed of a request whose text ends after `output_len` tokens; `number` is its own."""
    return number << _LENGTH_BITS | output_len


def sampled_token(seed: int, index: int) -> int:
    """Token `index` of the text of this seed: the end token where the text ends, else one of this request's own."""
    if index + 1 == seed & ((1 << _LENGTH_BITS) - 1):
        return EOS_TOKEN_ID
    return ((seed >> _LENGTH_BITS) * 31 + index * 17) % 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step: a constant, and so much for each token (EXTEND) or row (DECODE)."""

    extend: float = 0.005
    extend_token: float = 0.00005
    decode: float = 0.020
    decode_row: float = 0.0002
    copied_page: float = 0.0002  # to host memory, and back

    def slower(self, factor: float) -> Self:
        """Of a device on which everything takes `factor` times as long."""
        if factor == 1:
            return self
        return replace(self, **{each.name: factor * getattr(self, each.name) for each in fields(self)})

    def of(self, batch: ScheduleBatch, context: int) -> float:
        """What the device takes for `batch`: passes of both kinds one after the other. Joins alone take no time.

        `context` is the tokens whose KV the rows of DECODE read; here they take no time of their own.
        """
        del context
        seconds = 0.0
        if batch.extend:
            seconds += self.extend + self.extend_token * sum(len(row.token_ids) for row in batch.extend)
        if batch.decode_slots:
            seconds += self.decode + self.decode_row * len(batch.decode_slots)
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTimes(StepTimes):
    """Seconds of a step of a dense model on a GPU, by the work of its pass and the bytes that it reads.

    A pass reads all weights, or computes its tokens, whichever takes longer; attention comes on top.
    """

    weights: float  # to read them
    token: float  # to compute one
    token_position: float  # … for each token before it, of EXTEND
    context_token: float  # to read the KV of a token that a row of DECODE attends to

    def of(self, batch: ScheduleBatch, context: int) -> float:
        """What the device takes for `batch`, of whose rows of DECODE `context` tokens have KV."""
        seconds = 0.0
        if batch.extend:
            tokens = sum(len(row.token_ids) for row in batch.extend)
            positions = sum(sum_of_positions(row.start, len(row.token_ids)) for row in batch.extend)
            seconds += max(self.weights, self.token * tokens) + self.token_position * positions
        if batch.decode_slots:
            seconds += max(self.weights, self.token * len(batch.decode_slots)) + self.context_token * context
        return seconds


@dataclass(slots=True)
class VirtualSlot:
    """What the device keeps of a request: how many tokens have KV, and what to sample."""

    kv_len: int
    prompt_len: int
    params: SamplingParams

    def sample(self) -> int:
        """The token behind the KV."""
        seed = self.params.seed
        endless = seed >> _LENGTH_BITS << _LENGTH_BITS
        return sampled_token(endless if self.params.ignore_eos else seed, self.kv_len - self.prompt_len)


@dataclass(slots=True)
class LaunchedStep:
    """A step under way."""

    number: int
    completes_at: float
    seconds: float
    token_ids: list[int]
    ends_a_prompt: bool


@dataclass(slots=True, kw_only=True)
class VirtualDevice:
    """The `Device` of one virtual worker. What a step samples is known at its launch and given at its end."""

    process: TimelineProcess
    times: StepTimes
    on_copied: Action  # wakes the worker
    busy_seconds: float = 0.0
    _busy_until: float = 0.0
    _copying_until: float = 0.0
    _slots: dict[int, VirtualSlot] = field(default_factory=dict)
    _steps: deque[LaunchedStep] = field(default_factory=deque)  # launched, not yet waited for
    _waited_for: int = 0
    _copied: list[int] = field(default_factory=list)

    def launch(self, batch: ScheduleBatch) -> None:
        for join in batch.joins:
            self._slots[join.slot] = _joined(join)
        seconds = self.times.of(batch, sum(self._slots[number].kv_len for number in batch.decode_slots))
        self.busy_seconds += seconds
        self._busy_until = max(self._busy_until, self.process.now) + seconds
        token_ids = []
        for number in batch.decode_slots:
            slot = self._slots[number]
            slot.kv_len += 1
            token_ids.append(slot.sample())
        for row in batch.extend:
            slot = self._slots[row.slot]
            slot.kv_len = row.start + len(row.token_ids)
            if row.samples:
                token_ids.append(slot.sample())
        ends_a_prompt = any(row.samples for row in batch.extend)
        self._steps.append(LaunchedStep(batch.step, self._busy_until, seconds, token_ids, ends_a_prompt))

    def completes_at(self, step: int) -> float:
        """When a step that was not waited for yet completes, in seconds."""
        return next(each.completes_at for each in self._steps if each.number == step)

    @property
    def step_ends_at(self) -> float | None:
        """When the oldest step in flight ends, in seconds; None: there is none."""
        return self._steps[0].completes_at if self._steps else None

    @property
    def ends_a_prompt(self) -> bool:
        """Whether a step in flight ends a prompt."""
        return any(step.ends_a_prompt for step in self._steps)

    def wait(self, step: int) -> Sampled:
        oldest = self._steps.popleft()
        assert oldest.number == step, f"waits for step {step} before {oldest.number}"
        self.process.block(oldest.completes_at)
        self._waited_for = step
        return Sampled(oldest.token_ids, seconds=oldest.seconds)

    def completed(self) -> int:
        done = self._waited_for
        for step in self._steps:
            if step.completes_at > self.process.now:
                break
            done = step.number
        return done

    def start_backup(self, copy_id: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        del host_pages
        self._start_copy(copy_id, len(pages))

    def start_restore(self, copy_id: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        del host_pages
        self._start_copy(copy_id, len(pages))

    def copies_done(self) -> list[int]:
        done, self._copied = self._copied, []
        return done

    def _start_copy(self, copy_id: int, pages: int) -> None:
        begin = max(self._copying_until, self.process.now)
        self._copying_until = begin + self.times.copied_page * pages
        self.process.at(self._copying_until, lambda: self._end_copy(copy_id))

    def _end_copy(self, copy_id: int) -> None:
        self._copied.append(copy_id)
        self.on_copied()


def _joined(join: SlotJoin) -> VirtualSlot:
    return VirtualSlot(join.kv_len, join.prompt_len, join.params)
