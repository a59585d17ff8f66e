"""The end of a step: what logits tell, adjustments, masks, the choice, and the way back to the host.

    stage    what the rows ask, beside the step                            before its layers are launched
    run      masks of the host → adjust → mask → filter → choose → report  behind its layers, once `is_known`
    read     tokens and their reports; masks learn the tokens              once a mark behind it has passed

A mask that follows the output needs the token before. So a step is run as far as its logits at once, and chooses when
the step before was read: the host computes masks while the device computes layers. A row whose mask there is no time
for has a token like the others, which nobody reads; `sat_out` tells the device whose state to set back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.batch.schedule_batch import SlotJoin
from shared.engine.cuda.adjustments import Adjusted, Adjustments, Rows
from shared.engine.cuda.engine_parts import EngineParts
from shared.engine.cuda.kernels.step_kernels import ReportBuffers, read_reports
from shared.engine.cuda.slots import DeviceWords
from shared.engine.cuda.staging import Staging, place_of
from shared.engine.cuda.vocab_masks import Bits, MaskedRows, SlotMask, VocabMasks, mask_words
from shared.engine.parallel.orders import Operation
from shared.engine.parts import OnLogits
from shared.engine.sampling.masks import Matchers
from shared.engine.sampling.sampler import ORDER, Adjustment
from shared.engine.streams import Work
from shared.wire.sampled import Sampled, TokenLogprobs


@dataclass(frozen=True, slots=True)
class _Asked:
    """The rows whose tokens are reported."""

    places: list[int]
    tops: list[int]
    rows: Tensor  # int32, on the device, and so
    top: Tensor


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Chooses the tokens of so many rows."""

    logits: Tensor
    tokens: Tensor
    run: Work


class _Buffer:
    """Memory of the host for the tokens of a step."""

    def __init__(self, words: Tensor) -> None:
        self.words = words
        self.tokens: NDArray[np.int32] = words.numpy()  # the same memory


@dataclass(slots=True, eq=False)
class StagedRows:
    """The rows of a step that sample. Their arrays lie in the step's staging."""

    slots: list[int]
    of_slots: Tensor  # int32 [rows], on the device
    adjusted: Adjusted
    masks: list[tuple[int, SlotMask]]
    asked: _Asked | None
    may_sit_out: int  # the first so many

    @property
    def is_known(self) -> bool:
        """Whether all tokens that the masks need have been read."""
        return not any(mask.unknown and mask.follows_output for _, mask in self.masks)


@dataclass(slots=True, eq=False)
class TokenChoice:
    """What the device will have written to buffers of the host."""

    rows: StagedRows
    buffer: _Buffer
    reports: Tensor | None
    masked: MaskedRows
    token_ids: list[int] = field(default_factory=list)  # once it was read


class Sampling:
    """For one device. All calls come from the scheduler's thread, but what the stream of steps runs."""

    def __init__(
        self,
        parts: EngineParts,
        words: DeviceWords,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        matchers: Matchers | None,
        on_logits: OnLogits | None,
    ) -> None:
        device, slots = words.words.device, len(words.state) - 1
        self.logits = torch.zeros(slots, vocab_size, device=device)
        self._stream = parts.forward
        self._kernels = parts.kernels
        self._words = words
        self._on_logits = on_logits
        self._gather, self._tells = parts.ops.gather, parts.ops.share.ranks > 1
        self._adjustments = Adjustments(slots, vocab_size, eos_token_ids, parts.kernels, words)
        self._masks = VocabMasks(vocab_size, eos_token_ids, matchers)
        self._reports = ReportBuffers(parts.forward, slots, device)
        self._tops = np.full(slots, -1, dtype=np.int32)
        self._tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        self._each = torch.arange(slots, dtype=torch.int32, device=device)
        self._bits = torch.arange(8, dtype=torch.uint8, device=device)
        self._choosers: dict[int, _Chooser] = {}  # of DECODE, by rows; made and used on the stream
        self._free: list[_Buffer] = []  # those that no step uses

    def join(self, join: SlotJoin) -> None:
        """Overwrite what the slot held."""
        self._adjustments.join(join)
        self._masks.join(join)
        self._tops[join.slot] = join.params.logprobs

    def stage(
        self, slots: Rows, kv_lens: Rows, of_slots: Tensor, staging: Staging, *, may_sit_out: int = 0
    ) -> StagedRows:
        """Stage what rows ask. `kv_lens` [rows]: tokens before the one to choose; `of_slots`: slots, on the device."""
        tops = self._tops[slots]
        asked = None
        if len(places := (tops >= 0).nonzero()[0]):
            _, rows = staging.put(places.astype(np.int32))
            _, top = staging.put(tops[places])
            asked = _Asked(places.tolist(), tops[places].tolist(), rows, top)
        adjusted = self._adjustments.stage(slots, kv_lens, staging)
        staging.note(Operation.TAKE_TOKENS, of_slots, len(slots))
        listed = slots.tolist()
        return StagedRows(listed, of_slots, adjusted, self._masks.of(listed), asked, may_sit_out)

    def run(self, step: int, rows: StagedRows) -> TokenChoice:
        """Choose from the first rows of `logits`."""
        found = self._masks.compute(rows.slots, rows.masks, may_sit_out=rows.may_sit_out)
        masked = self._upload(found.bits)
        self._stream.run(partial(self._choose, step, rows, masked))
        if masked:
            self._mask_staging.end(self._stream.record())
        rows.masks = [(row, mask) for row, mask in rows.masks if row not in found.shares.sat_out]
        for _, mask in rows.masks:
            mask.unknown += 1
        buffer = self._free.pop() if self._free else _Buffer(self._stream.buffer(len(self._tokens)))
        self._stream.download(buffer.words, self._tokens)  # all of them: a part would be a view more to make
        reports = self._reports.download(len(rows.asked.tops)) if rows.asked else None
        return TokenChoice(rows, buffer, reports, found)

    def sat_out(self, choice: TokenChoice) -> dict[int, int]:
        """The last token of each slot that has none of this step. Known as soon as it was run."""
        slots = [choice.rows.slots[row] for row in choice.masked.shares.sat_out]
        return {slot: self._masks.last_token(slot) for slot in slots}

    def read(self, choice: TokenChoice) -> None:
        """The device has written it. A second call does nothing."""
        if choice.token_ids:
            return
        choice.token_ids = choice.buffer.tokens[: len(choice.rows.slots)].tolist()
        for row, mask in choice.rows.masks:
            mask.take(choice.token_ids[row])

    def sampled(self, choice: TokenChoice, seconds: float) -> Sampled:
        """What was read of a step of so many seconds; its buffers serve another step from now on."""
        self._free.append(choice.buffer)
        logprobs: dict[int, TokenLogprobs] = {}
        sat_out = choice.masked.shares.sat_out
        if choice.reports is not None and (asked := choice.rows.asked) is not None:
            reports = read_reports(choice.reports, asked.tops, self.logits.shape[1])
            self._reports.give_back(choice.reports)
            logprobs = {
                row: one for row, one in zip(asked.places, reports, strict=True) if row not in sat_out
            }
        return Sampled(
            choice.token_ids,
            logprobs,
            failed=choice.masked.failed,
            sat_out=sat_out,
            mask_seconds=choice.masked.shares.seconds,
            seconds=seconds,
        )

    def warm_up(self, of_slots: Tensor) -> None:
        """Do once what no graph has done. On the stream; `of_slots` int32 [1]: the padding slot, on the device."""
        logits = self.logits[:1]
        row, reports = self._each[:1], self._reports.on_device(1)
        bits = torch.full((1, mask_words(logits.shape[1])), -1, dtype=torch.int32, device=row.device)
        self._mask((row, bits), logits)
        factors = torch.full((3, 1), 0.5, device=row.device)
        self._kernels.filter_rows(logits, row, torch.ones_like(of_slots), factors)
        self._kernels.chooser(logits, of_slots, self._words.state, self._tokens[:1])()
        self._kernels.logprobs(logits, row, self._tokens[:1], row, reports)

    @cached_property
    def _mask_staging(self) -> Staging:
        """Made when the first mask comes: some MB on device and host that few deployments need."""
        words = len(self.logits) * (1 + mask_words(self.logits.shape[1]))
        with self._stream.on_host():  # on its stream: it is used there at once
            return Staging(self._stream, torch.zeros(words, dtype=torch.int32, device=self.logits.device), 0)

    def _upload(self, bits: dict[int, Bits]) -> tuple[Tensor, Tensor] | None:
        """Bring masks to the device: their rows int32 [n], and their bits int32 [n, words]."""
        if not bits:
            return None
        self._mask_staging.begin()
        _, rows = self._mask_staging.put(np.array(list(bits), dtype=np.int32))
        _, words = self._mask_staging.put(np.stack(list(bits.values())).view(np.int32))
        self._mask_staging.upload()
        return rows, words

    # ---- the device's part: reads staging and state on the device, nothing that the host changes ------------------

    def _choose(self, step: int, rows: StagedRows, masked: tuple[Tensor, Tensor] | None) -> None:
        asked, adjusted, chooser = rows.asked, rows.adjusted, self._chooser(rows.of_slots)
        logits, tokens = chooser.logits, chooser.tokens
        if self._on_logits is not None:
            self._on_logits(step, tuple(rows.slots), logits.clone())
        changes = dict(adjusted.changes)
        if masked:
            changes[Adjustment.MASKS] = partial(self._mask, masked)
        raw, raw_rows = logits, asked.rows if asked else None
        if asked and changes:  # which overwrite them
            raw, raw_rows = logits.index_select(0, asked.rows), self._each[: len(asked.tops)]
        for adjustment in ORDER if changes else ():
            if adjustment in changes:
                changes[adjustment](logits)
        chooser.run()
        if self._tells:
            self._gather(tokens)  # other ranks take the first one's
        for remember in adjusted.after:
            remember(tokens)
        if asked and raw_rows is not None:
            chosen = tokens.index_select(0, asked.rows)
            self._kernels.logprobs(raw, raw_rows, chosen, asked.top, self._reports.on_device(len(asked.tops)))

    def _chooser(self, of_slots: Tensor) -> _Chooser:
        """Slots of DECODE always lie at the beginning of staging, so one for each number of rows is enough for all."""
        count, of_decode = of_slots.shape[0], place_of(of_slots) == 0
        if of_decode and (kept := self._choosers.get(count)) is not None:
            return kept
        logits, tokens = self.logits[:count], self._tokens[:count]
        chooser = _Chooser(logits, tokens, self._kernels.chooser(logits, of_slots, self._words.state, tokens))
        if of_decode:
            self._choosers[count] = chooser
        return chooser

    def _mask(self, masked: tuple[Tensor, Tensor], logits: Tensor) -> None:
        """Set to -inf what the bits of some rows do not allow."""
        rows, words = masked
        spread = (words.view(torch.uint8).unsqueeze(2) >> self._bits) & 1
        never = spread.flatten(1)[:, : logits.shape[1]] == 0
        found = logits.index_select(0, rows).masked_fill_(never, -torch.inf)
        logits.index_copy_(0, rows.long(), found)
