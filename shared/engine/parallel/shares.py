"""What one of several ranks holds of a model (tensor parallelism, after Shoeybi et al., 2019).

    q, k, v; gate, up       rows, of whole heads and of inner numbers; ranks beyond the key-value heads share these
    o, down                 columns, those that the rows before them give; then ranks add up; biases are on rank 0
    embedding, head         rows, equally many on each rank; the last rank's are padded
    experts                 whole ones, so that no block of a narrow format is cut; the first ranks may have one more
    norms, routers          whole on every rank

Inner numbers are cut where a group or block of the weights' format begins, so ranks may have unequally many. Knows no
weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.engine.checkpoint.experts_config import ExpertsConfig
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.quantized.fp8_formats import BLOCK, Fp8Format, Scales
from shared.engine.quantized.int4_formats import SMALLEST_GROUP, WORD, Int4Format
from shared.engine.quantized.weight_source import Part
from shared.primitives.errors import ConfigError

RANKS_MAX = 16  # GPUs of a node
_STEP = 16  # numbers: sizes that a GPU multiplies in 8 bits, and 32 bytes of 16-bit ones


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a rank, from 0, of so many."""

    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks, f"rank {self.rank} of {self.ranks}"

    def of(self, count: int, step: int = 1) -> range:
        """This rank's of `count` things, in whole steps but for the last; the first ranks may have a step more."""
        each, more = divmod(-(-count // step), self.ranks)
        start = self.rank * each + min(self.rank, more)
        stop = start + each + (self.rank < more)
        return range(min(start * step, count), min(stop * step, count))


@dataclass(frozen=True, slots=True)
class HeldHeads:
    """Which key-value heads lie in a rank's pages."""

    first: int
    count: int
    total: int  # of the model


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What a rank holds of a model. Raises `ConfigError` where the model cannot be cut for so many ranks."""

    whole: ModelConfig
    share: Share = Share()

    def __post_init__(self) -> None:
        ranks = self.share.ranks
        if reason := _why_not(self.whole, ranks):
            able = [each for each in range(1, RANKS_MAX + 1) if not _why_not(self.whole, each)]
            raise ConfigError(f"{ranks} GPUs cannot share this model, {reason}: use {_listed(able)}")

    @property
    def heads(self) -> range:
        """Query heads."""
        return self.share.of(self.whole.heads)

    @property
    def kv_heads(self) -> range:
        """Key-value heads: those that its query heads read."""
        return _kv_heads(self.whole, self.share)

    @property
    def held_heads(self) -> HeldHeads:
        """The key-value heads in this rank's pages."""
        return HeldHeads(self.kv_heads.start, len(self.kv_heads), self.whole.kv_heads)

    @property
    def vocabulary(self) -> range:
        """Tokens whose rows of embedding and head are here."""
        return self.share.of(self.whole.vocab_size, self.vocabulary_rows)

    @property
    def vocabulary_rows(self) -> int:
        """Rows of embedding and head on each rank, with those of padding."""
        return -(-self.whole.vocab_size // self.share.ranks)

    def columns(self, inner: int) -> range:
        """Numbers of an MLP with so many inner ones."""
        return self.share.of(inner, _column_step(self.whole, inner, self.share.ranks))

    def experts(self, experts: ExpertsConfig) -> range:
        """Experts of a layer."""
        return self.share.of(experts.routing.experts)

    def part(self, held: range, each: int = 1, *, dim: int = 0) -> Part | None:
        """What is read of a weight of whose things, `each` rows or columns, these are held; None: all of it."""
        if self.share.ranks == 1:
            return None
        return Part(held.start * each, held.stop * each, dim)

    @property
    def config(self) -> ModelConfig:
        """The model as this rank computes it, and plans memory for it."""
        whole = self.whole
        if self.share.ranks == 1:
            return whole
        return replace(
            whole,
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            intermediate_size=len(self.columns(whole.intermediate_size)),
            output_bias=whole.output_bias and self.share.rank == 0,
            experts=tuple(each and self._held(each) for each in whole.experts),
            vocab_held=self.vocabulary_rows,
        )

    def _held(self, experts: ExpertsConfig) -> ExpertsConfig:
        shared = len(self.columns(experts.shared_inner))
        return replace(experts, shared_inner=shared, held=len(self.experts(experts)))


def _kv_heads(config: ModelConfig, share: Share) -> range:
    if config.kv_heads >= share.ranks:
        return share.of(config.kv_heads)
    own = share.rank * config.kv_heads // share.ranks
    return range(own, own + 1)


def _column_step(config: ModelConfig, inner: int, ranks: int) -> int:
    """Inner numbers that are not parted."""
    if (step := _format_step(config)) > 1:
        return step
    return _STEP if inner >= _STEP * ranks else 1


def _format_step(config: ModelConfig) -> int:
    """Columns of a linear that share what is stored once: a scale, or a word."""
    form = config.quantization.format if config.quantization else None
    if isinstance(form, Int4Format):
        return form.group or SMALLEST_GROUP
    if isinstance(form, Fp8Format) and form.scales is Scales.BLOCK:
        return BLOCK
    return 1


def _why_not(config: ModelConfig, ranks: int) -> str | None:
    """Why a model cannot be cut for so many ranks; None: it can."""
    heads, kv_heads = config.heads, config.kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return f"which has {heads} heads and {kv_heads} key-value heads"
    step, columns = _format_step(config), heads // ranks * config.head_dim
    if ranks > 1 and columns % step:
        return f"whose weights are stored in blocks of {step} inputs, while a GPU's heads have {columns}"
    packed = config.quantization and isinstance(config.quantization.format, Int4Format)
    if ranks > 1 and packed and config.head_dim % WORD:
        return f"whose heads of {config.head_dim} are no whole words of {WORD} numbers"
    inners = {config.intermediate_size} if None in config.experts else set()
    inners |= {experts.shared_inner for experts in config.experts if experts and experts.shared_inner}
    for inner in sorted(inners):
        if -(-inner // (step := _column_step(config, inner, ranks))) < ranks:
            return f"which has MLPs of {inner} numbers in blocks of {step}"
    fewest = min((experts.routing.experts for experts in config.experts if experts), default=ranks)
    if fewest < ranks:
        return f"which has {fewest} experts a layer"
    last = Share(ranks - 1, ranks).of(config.vocab_size, -(-config.vocab_size // ranks))
    return None if last else f"which has {config.vocab_size} tokens"


def _listed(counts: list[int]) -> str:
    *most, last = map(str, counts)
    return f"{', '.join(most)} or {last} GPUs" if most else "1 GPU"
