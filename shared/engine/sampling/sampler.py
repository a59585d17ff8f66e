"""Chooses tokens: a pure function of (logits, params, the request's own tokens, seed, position).

Position is the index in the output, counted from the end of the prompt across all attempts. What is applied, and in
which order, is the table `ORDER`; then Gumbel noise → argmax, ties by the lowest id. The filters are
thresholds on logits, so tokens equal to the last admitted one are admitted too.

The parameters of a slot lie in arrays indexed by slot, written when a request joins. The token history is kept on the
device, so a step never waits for the CPU. A row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from shared.batch.schedule_batch import SlotJoin
from shared.engine.sampling.masks import Constraints, MaskShares, TokenMasks


class Adjustment(Enum):
    """One change of a row of logits before its token is chosen. Each engine has its own arithmetic for it."""

    PENALTIES = auto()  # repetition, frequency, presence
    ADDENDS = auto()  # bias, and ends that may not come yet
    MASKS = auto()  # tokens that may not come: lists, bad words, grammars
    FILTERS = auto()  # temperature, top_k, top_p, min_p


# For all engines; it is the order of vLLM and SGLang.
ORDER = (Adjustment.PENALTIES, Adjustment.ADDENDS, Adjustment.MASKS, Adjustment.FILTERS)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step. Logits are changed in place."""

    logits: Tensor  # float32 [rows, vocab]
    slots: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows] of the token to choose, in the output
    may_sit_out: int  # the first so many


class Sampler:
    """Sampling parameters and histories of all slots, and the choice itself."""

    def __init__(
        self,
        *,
        slots: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        constraints: Constraints | None = None,
    ) -> None:
        """Without `constraints` no request may have a grammar."""
        self._constraints = Constraints(None, vocab_size) if constraints is None else constraints
        self._token_masks = TokenMasks()
        self.failed: dict[int, str] = {}  # the rows of the last `sample` that have no token, and why
        self.masks = MaskShares()  # of the last `sample`
        self._eos_token_ids = frozenset(eos_token_ids)
        self._token_ids = torch.arange(vocab_size)
        self._temperature = torch.zeros(slots)
        self._top_k = torch.full((slots,), vocab_size)
        self._top_p = torch.ones(slots)
        self._min_p = torch.zeros(slots)
        self._seed = torch.zeros(slots, dtype=torch.int64)
        self._prompt_len = torch.zeros(slots, dtype=torch.int64)
        self._min_new_tokens = torch.zeros(slots, dtype=torch.int64)
        self._repetition_penalty = torch.ones(slots)
        self._frequency_penalty = torch.zeros(slots)
        self._presence_penalty = torch.zeros(slots)
        self._needs_history = torch.zeros(slots, dtype=torch.bool)
        # Rows of slots without history are never touched, so they cost address space, not memory.
        self._output_counts = torch.zeros(slots, vocab_size, dtype=torch.int32)
        self._in_prompt = torch.zeros(slots, vocab_size, dtype=torch.bool)
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}  # slot → ids, values
        self._ends: dict[int, Tensor] = {}  # slot → ids masked before min_new_tokens

    def join(self, join: SlotJoin) -> None:
        """Overwrite what the slot held."""
        slot, params, vocab_size = join.slot, join.params, len(self._token_ids)
        self._temperature[slot] = params.temperature
        self._top_k[slot] = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = signed(params.seed)
        self._prompt_len[slot] = join.prompt_len
        self._min_new_tokens[slot] = params.min_new_tokens
        self._repetition_penalty[slot] = params.repetition_penalty
        self._frequency_penalty[slot] = params.frequency_penalty
        self._presence_penalty[slot] = params.presence_penalty
        self._needs_history[slot] = params.penalized
        if params.penalized:
            tokens = torch.tensor(join.token_ids, dtype=torch.int64)
            output = tokens[join.prompt_len :]
            self._in_prompt[slot].zero_()[tokens[: join.prompt_len]] = True
            self._output_counts[slot] = torch.bincount(output, minlength=vocab_size).to(torch.int32)
        self._constraints.join(join)
        self._token_masks.join(join)
        self._bias.pop(slot, None)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias.items(), strict=True)
            self._bias[slot] = torch.tensor(ids), torch.tensor(values, dtype=torch.float32)
        self._ends.pop(slot, None)
        if params.min_new_tokens:
            ends = sorted(self._eos_token_ids.union(params.stop_token_ids))
            self._ends[slot] = torch.tensor(ends, dtype=torch.int64)

    def sample(self, logits: Tensor, slots: Tensor, sequence_lens: Tensor, *, may_sit_out: int = 0) -> Tensor:
        """Choose a token for each row and remember it; logits are overwritten.

        logits float32 [rows, vocab], slots and sequence_lens int64 [rows], the latter the tokens of each request
        before the one to choose → int64 [rows]. The first `may_sit_out` rows may have no time for their masks: those in
        `masks.sat_out` have no token, and nothing is remembered of them.
        """
        self.failed, self.masks = {}, MaskShares()
        rows = _Rows(logits, slots, sequence_lens - self._prompt_len[slots], may_sit_out)
        for adjustment in ORDER:
            _ADJUST[adjustment](self, rows)
        tokens, taken = logits.argmax(-1), self._taken(rows)  # the first of equal ones
        remembered = torch.nonzero(self._needs_history[slots] & taken)[:, 0]
        if len(remembered):
            self._output_counts[slots[remembered], tokens[remembered]] += 1
        for held in (self._constraints, self._token_masks):
            if held:
                held.take(slots[taken].tolist(), tokens[taken].tolist())
        return tokens

    def _taken(self, rows: _Rows) -> Tensor:
        """Which rows do not sit out, bool [rows]; known once they are masked."""
        taken = torch.ones(len(rows.slots), dtype=torch.bool)
        taken[list(self.masks.sat_out)] = False
        return taken

    def _penalize(self, given: _Rows) -> None:
        rows = torch.nonzero(self._needs_history[given.slots])[:, 0]
        if not len(rows):
            return
        slots, found = given.slots[rows], given.logits[rows]
        counts = self._output_counts[slots]
        seen = self._in_prompt[slots] | (counts > 0)
        repetition = self._repetition_penalty[slots].unsqueeze(1)
        repeated = torch.where(found > 0, found / repetition, found * repetition)
        found = torch.where(seen, repeated, found)
        found -= self._frequency_penalty[slots].unsqueeze(1) * counts
        found -= self._presence_penalty[slots].unsqueeze(1) * (counts > 0)
        given.logits[rows] = found

    def _add(self, rows: _Rows) -> None:
        """Bias, and ends that may not come yet; few rows have any."""
        masked = rows.positions < self._min_new_tokens[rows.slots]
        for row, slot in enumerate(rows.slots.tolist()):
            if slot in self._bias:
                ids, values = self._bias[slot]
                rows.logits[row, ids] += values
            if slot in self._ends and bool(masked[row]) and slot not in self._constraints:
                rows.logits[row, self._ends[slot]] = -torch.inf

    def _mask(self, rows: _Rows) -> None:
        """Mask tokens that may not come, and note the rows that have no token: `failed` and `masks`.

        Beside a grammar, ends that may not come yet are masked, too, unless nothing else is allowed.
        """
        numbers, logits, positions = rows.slots.tolist(), rows.logits, rows.positions
        for row, slot in enumerate(numbers if self._token_masks else ()):
            if slot in self._token_masks:
                self._token_masks.mask(slot, logits[row].numpy())
        if not self._constraints:
            return

        def mask(row: int, seconds: float) -> bool:
            slot = numbers[row]
            ends = self._ends.get(slot) if positions[row] < self._min_new_tokens[slot] else None
            found = logits[row].numpy()
            why = self._constraints.mask(slot, found, None if ends is None else ends.numpy(), seconds)
            if why:
                self.failed[row] = why
                found.fill(0.0)  # so that the row has a token at all
            return why is not None

        self.masks = self._constraints.share(numbers, mask, may_sit_out=rows.may_sit_out)

    def _perturb(self, rows: _Rows) -> None:
        """Temperature, filters and noise, for the rows that are drawn.

        One by one: a row of logits and its hashes fit a core's cache; several rows at once are 4 times slower.
        """
        for row in torch.nonzero((self._temperature[rows.slots] > 0) & self._taken(rows)):
            rows.logits[row] = self._perturbed(rows.logits[row], rows.slots[row], rows.positions[row])

    def _perturbed(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Change and return its own logits."""
        logits -= logits.amax(-1, keepdim=True)  # the highest is 0: no temperature can overflow it
        logits /= self._temperature[slots].unsqueeze(1)
        self._filter(logits, slots)
        keys = row_keys(self._seed[slots], positions)
        logits += gumbel_noise(keys.unsqueeze(1), self._token_ids)
        return logits

    def _filter(self, logits: Tensor, slots: Tensor) -> None:
        """Set to -inf what top_k, top_p and min_p exclude; the highest logit of each row is 0."""
        top_k, top_p, min_p = self._top_k[slots], self._top_p[slots], self._min_p[slots]
        floors = min_p.log()  # [rows]; -inf where min_p is 0
        rows = torch.nonzero((top_k < logits.shape[1]) | (top_p < 1))[:, 0]
        if len(rows):
            ranked = _ranked(logits[rows])
            kth = ranked.gather(1, top_k[rows].unsqueeze(1) - 1)
            last = nucleus_floor(ranked.masked_fill_(ranked < kth, -torch.inf), top_p[rows])
            floors[rows] = torch.maximum(floors[rows], torch.maximum(kth[:, 0], last))
        logits.masked_fill_(logits < floors.unsqueeze(1), -torch.inf)


_ADJUST: dict[Adjustment, Callable[[Sampler, _Rows], None]] = {
    Adjustment.PENALTIES: Sampler._penalize,
    Adjustment.ADDENDS: Sampler._add,
    Adjustment.MASKS: Sampler._mask,
    Adjustment.FILTERS: Sampler._perturb,
}


def _ranked(logits: Tensor) -> Tensor:
    """Each row in descending order, by numpy: its vectorized sort is 30 times faster than torch's on CPU."""
    return torch.from_numpy(np.sort(logits.neg().numpy(), axis=-1)).neg_()


def nucleus_floor(ranked: Tensor, top_p: Tensor) -> Tensor:
    """The lowest logit of the smallest set that holds `top_p` of the probability, -inf where top_p is 1.

    ranked [rows, vocab] in descending order, top_p [rows] → [rows]. Sums are running sums in float64: they depend on
    nothing but the row.
    """
    mass = (ranked - ranked[:, :1]).double().exp_().cumsum(-1)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)  # of the tokens ranked higher
    held = before < top_p.double().unsqueeze(1) * mass[:, -1:]
    count = held.sum(-1, keepdim=True).clamp_(min=1)
    return torch.where(top_p < 1, ranked.gather(1, count - 1)[:, 0], -torch.inf)


# ---- noise: a function of seed, position and token id, with no state to lose -----------------------------------------
# argmax(logits / T + noise) samples from softmax(logits / T) (the Gumbel-max trick). Every token has noise of its own
# and its chance depends on no running sum. So when logits differ in the last bit, the choice is nearly always the same.
# The hash is splitmix64's finalizer (Steele, Lea and Flood, 2014); int64 arithmetic wraps, shifts are masked to be
# logical.


_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def signed(value: int) -> int:
    """The 64 bits of `value` as a signed integer."""
    return (value + 2**63) % 2**64 - 2**63


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """One key for each row: seeds and positions int64 [rows] → int64 [rows]."""
    return _mix(_mix(seeds) + positions * signed(_GOLDEN))


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """keys int64 [rows, 1] and token_ids int64 [rows or 1, tokens] → noise float32 [rows, tokens]."""
    bits = _mix(keys + token_ids * signed(_GOLDEN))
    # 23 bits, and half a step away from both 0 and 1: exact in float32, and no logarithm is infinite.
    uniform = ((bits >> 41) & 0x7FFFFF).float().mul_(2.0**-23).add_(2.0**-24)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & (2**34 - 1))) * signed(_FIRST)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * signed(_SECOND)
    return torch.bitwise_xor(x, (x >> 31) & (2**33 - 1))
