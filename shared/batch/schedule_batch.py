"""What one step of the device does: plain data, planned by a scheduler, executed by a device.

A batch is ragged and packed. The device keeps state per *slot* between steps (page table, sequence length,
sampling parameters, last sampled token); a batch carries only what changes: slots that join, pages appended.
The last sampled token of each slot stays on the device (the *FutureMap*), so step N+1 can be launched before the
CPU knows what step N sampled. A row that decodes may sit a step out (`Sampled.sat_out`): the device then computes it
again in the next step that has it, and takes no account of this one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.primitives.errors import InvariantError
from shared.wire.sampling_params import SamplingParams


class ForwardMode(enum.Enum):
    """What a step computes."""

    EXTEND = "extend"  # several tokens per request; the KV before them is already in its pages
    DECODE = "decode"  # one token per request, read from the FutureMap
    MIXED = "mixed"  # both: rows that decode, and rows of other requests as in EXTEND
    PREBUILT = "prebuilt"  # requests whose KV has arrived join, and none can decode; nothing is computed


@dataclass(frozen=True, slots=True)
class SlotJoin:
    """Everything the device must know of a slot before its first step; overwrites what the slot held."""

    slot: int
    pages: tuple[int, ...]  # page table so far
    kv_len: int  # tokens whose KV is in those pages
    params: SamplingParams
    prompt_len: int
    token_ids: Sequence[int] = ()  # all tokens so far, given only when params.needs_history
    last_token: int | None = None  # seeds the FutureMap, which EXTEND does not read
    tenant: str = ""  # whose time its masks take


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Pages appended to a slot's page table before the step."""

    slot: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """Input tokens of one request in an EXTEND step: positions `start` … `start + len(token_ids) - 1`."""

    slot: int
    token_ids: Sequence[int]
    start: int
    samples: bool  # False for a middle chunk: its sample is discarded
    scores: Sequence[int] = ()  # tokens whose logprobs are asked for: entry i stands behind input token i


@dataclass(frozen=True, slots=True)
class ScheduleBatch:
    """One step. `step` numbers are consecutive from 1 on each device.

    EXTEND uses `extend`; DECODE uses `decode_slots`; MIXED uses both, and no slot is in both; PREBUILT has only
    `joins`. Deltas (`joins`, then `grants`) apply in order before the forward. Results come back in row order: one
    token for each decode slot, then one for each extend row with `samples`.
    """

    step: int
    mode: ForwardMode
    joins: tuple[SlotJoin, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    extend: tuple[ExtendRow, ...] = ()
    decode_slots: Sequence[int] = field(default=())

    def check_slots(self) -> None:
        """Raise `InvariantError` if a slot has two rows: a device would compute one of them with the other's length."""
        slots = [*self.decode_slots, *(row.slot for row in self.extend)]
        if len(set(slots)) != len(slots):
            raise InvariantError(f"step {self.step} has two rows of a slot: {slots}")
