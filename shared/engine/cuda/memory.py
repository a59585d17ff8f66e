"""What a GPU's memory is used for: weights, workspaces, activations, graphs, and pages for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.engine.checkpoint.dtypes import Dtypes
from shared.engine.checkpoint.experts_config import ExpertsConfig
from shared.engine.checkpoint.kv_cache import page_bytes
from shared.engine.checkpoint.memory_plan import Demand, choose_pages, context_bound, gib
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.config import Budget, EngineConfig
from shared.engine.cuda.kernels.step_kernels import STATE_WORDS
from shared.engine.parallel.collectives import ALONE, Collectives
from shared.kv.page_pool import pages_for_tokens
from shared.primitives.errors import StartError

GRAPH_TOKENS = 2048  # of an EXTEND step that a graph takes, at most
# What a GPU computes while the host launches a layer, as found on one H100. Where a step has more of it, launches cost
# nothing, and what a graph computes for its padding does: little, so another GPU's own number matters little.
LAUNCH_FLOP = 2e11
GRAPH_BYTES = 2**30  # graphs of all buckets, and what libraries allocate at first use: an estimate
HOST_CONTEXT_LEN = 512  # tokens on cuda-on-cpu, unless another number is asked for
HOST_SHARE = 0.5  # of the host's budget that pages may lock: the rest is for buffers and the process itself
PENALTY_BYTES = 16  # a token of the history of a row that is penalized, with its masks
_NONE = -1  # what a rank tells the others in place of pages, if it has no room
ADJUSTED_COPIES = 6  # of a step's logits while rows are penalized
GATHERED_COPIES = 2  # of them while they come from several ranks


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a GPU in bytes, as it was found at the start."""

    total: int
    free: int
    # Bytes beside weights and pages, for a model and so many slots.
    workspace: Callable[[ModelConfig, int], int]


@dataclass(frozen=True, slots=True)
class FittedPool:
    """What fits, and why."""

    pages: int
    host_pages: int
    context_len: int
    words: str
    memory: dict[str, int]  # bytes by what they are for


def graph_tokens(shape: ModelConfig, most: int) -> int:
    """Tokens of an EXTEND step up to which the host's launches take longer than the device, and at most `most`."""
    return min(most, int(LAUNCH_FLOP * shape.layers / (2 * shape.computed)))


def room_for(
    shape: ModelConfig,
    dtypes: Dtypes,
    config: EngineConfig,
    memory: DeviceMemory | None,
    collectives: Collectives = ALONE,
) -> FittedPool:
    """Pages for the model; `memory` None: the device is this host, and `config.budget` bounds it.

    Of several ranks each counts for its share of the model, `shape`, and all get as many pages as fit on the one with
    the least room; ranks share the host. Raises `ConfigError` if the pages that were asked for do not fit, `ModelError`
    if the model does not, on all ranks.
    """
    most, most_reason = _context(shape, config, memory)
    one_page = page_bytes(shape, config.page_size, dtypes.kv)
    weights = shape.weight_bytes(dtypes.weights.itemsize)
    reserve = _reserve(shape, dtypes, config, most, memory.workspace(shape, config.slots) if memory else 0)
    demand = Demand(
        weights_bytes=weights,
        page_bytes=one_page,
        page_size=config.page_size,
        host_fraction=0.0 if memory else config.host_fraction,
        slots=config.slots,
        context_len=most,
        max_total_tokens=config.max_total_tokens,
        reserve_bytes=sum(reserve.values()),
        reserve=f"reserve ({', '.join(f'{gib(size)} {kind}' for kind, size in reserve.items())})",
    )
    host = _of_host(config.budget, collectives.share.ranks)
    budget = _budget(memory, config.device_memory_share) if memory else host
    pages, reason = pages_of_all(lambda: choose_pages(demand, budget, config.pages), collectives)
    context = min(most, pages * config.page_size)
    context_reason = most_reason if context == most else "all that the pages hold"
    host_pages = int(pages * config.host_fraction)
    if memory:
        host_pages = min(host_pages, int(host.memory_bytes * HOST_SHARE) // one_page)
    words = (
        f"{pages} KV pages of {config.page_size} tokens ({reason}), {host_pages} host pages, "
        f"context {context} tokens ({context_reason})"
    )
    kinds = {"weights": weights, "kv": pages * one_page, "host_kv": host_pages * one_page, **reserve}
    return FittedPool(pages, host_pages, context, words, kinds)


def pages_of_all(choose: Callable[[], tuple[int, str]], collectives: Collectives) -> tuple[int, str]:
    """The fewest pages that a rank chooses, and why: its own reason if this one does, else which one.

    Raises what `choose` does, and `StartError` on the other ranks.
    """
    share = collectives.share
    if share.ranks == 1:
        return choose()
    try:
        pages, reason = choose()
    except StartError:
        collectives.numbers(_NONE)
        raise
    every = collectives.numbers(pages)
    fewest = min(every)
    rank = every.index(fewest)
    if fewest == _NONE:
        raise StartError(
            f"rank {rank} of {share.ranks} has too little memory, and says of what in its own log"
        )
    if fewest < pages:
        return fewest, f"all that rank {rank} of {share.ranks} has room for, this one for {pages}"
    return pages, reason if max(every) == fewest else f"rank {share.rank} has room for the fewest: {reason}"


def _of_host(budget: Budget, ranks: int) -> Budget:
    """What each of several ranks may take of their host."""
    if ranks == 1:
        return budget
    return Budget(budget.memory_bytes // ranks, f"{budget.origin}, shared by {ranks} ranks")


def _context(shape: ModelConfig, config: EngineConfig, memory: DeviceMemory | None) -> tuple[int, str]:
    most, reason = context_bound(shape, config.context_len)
    if memory is None and config.context_len is None and most > HOST_CONTEXT_LEN:
        return HOST_CONTEXT_LEN, "plain torch keeps every number of a graph; set context_len for more"
    return most, reason


def feed_forward_row(shape: ModelConfig) -> int:
    """Numbers that are alive for a token in the feed-forward block of any layer, at most."""
    # Beside the inner numbers of 16 bits, FP8 keeps them in float32 and rounded while a linear reads them.
    of_mlp = 5 if shape.quantization else 3
    return max(
        _experts_row(experts, shape.hidden_size, of_mlp) if experts else of_mlp * shape.intermediate_size
        for experts in set(shape.experts)
    )


def _experts_row(experts: ExpertsConfig, hidden: int, of_mlp: int) -> int:
    """As `feed_forward_row`: what `GroupedExperts` keeps of a token's experts, or the one that all tokens take."""
    product = hidden + 3 * experts.inner  # gate and up, what they become, and the result
    weighted = 3 * hidden  # the results, and in float32 times their weights
    gate = 8 * experts.inner if experts.clamped else 0  # in float32
    return max(experts.routing.chosen * max(product, weighted, gate), of_mlp * experts.shared_inner)


def _budget(memory: DeviceMemory, share: float) -> Budget:
    others = memory.total - memory.free
    origin = f"{share:.0%} of the GPU's {gib(memory.total)}, less {gib(others)} in use"
    if others > 0.1 * memory.total:
        origin += "; is another worker on it? Give each device_memory_share 0.45"
    return Budget(max(0, int(memory.total * share) - others), origin)


def _reserve(
    shape: ModelConfig, dtypes: Dtypes, config: EngineConfig, context_len: int, workspace: int
) -> dict[str, int]:
    """Bytes beside weights and pages, by kind."""
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # Numbers that are alive for a token in a layer: an estimate.
    row = 4 * shape.hidden_size + 2 * heads + feed_forward_row(shape)
    tokens = config.extend_tokens
    if workspace:  # on a GPU graphs keep memory of their own
        tokens += min(tokens, graph_tokens(shape, GRAPH_TOKENS))
    words = STATE_WORDS + pages_for_tokens(context_len, config.page_size) + context_len + 1
    copies = ADJUSTED_COPIES + (GATHERED_COPIES if shape.vocab_held else 0)
    reserve = {
        "workspace": workspace,
        "activations": tokens * row * dtypes.weights.itemsize,
        "logits": copies * config.slots * shape.vocab_size * 4,
        "penalties": PENALTY_BYTES * config.slots * context_len,
        "slots": (config.slots + 1) * words * 4,
        "graphs": GRAPH_BYTES,
    }
    return {what: size for what, size in reserve.items() if size}
