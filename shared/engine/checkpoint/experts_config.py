"""Which layers of a mixture of experts have experts, and how a token finds its own, read from a `config.json`.

Each family names these numbers in its own way. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shared.primitives.errors import ModelError

MXFP4_BLOCK, MXFP4_BLOCK_BYTES = 32, 17  # numbers, with their scale


class Scoring(Enum):
    """What the router's logits become before the best experts are chosen."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"  # each expert by itself


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen, and weighted. Of experts with equal scores the lower one is taken."""

    experts: int
    chosen: int  # by a token
    scoring: Scoring = Scoring.SOFTMAX
    normalized: bool = True  # the weights of the chosen are divided by their sum
    scale: float = 1.0  # of the weights
    biased: bool = False  # logits get a bias by expert
    corrected: bool = False  # scores get a bias by expert before the choice; weights do not
    groups: int = 1  # of experts, one behind the other
    groups_chosen: int = 1  # by the sum of their two best scores; only their experts are chosen from

    def __post_init__(self) -> None:
        if not 0 < self.chosen <= self.experts:
            raise ModelError(
                f"{self.chosen} experts a token of {self.experts} experts cannot be chosen: expected 1 to "
                f"{self.experts} in config.json (num_experts_per_tok)"
            )
        if self.groups < 1 or self.experts % self.groups or not 0 < self.groups_chosen <= self.groups:
            raise ModelError(
                f"{self.experts} experts in {self.groups} groups, of which {self.groups_chosen} are chosen: expected "
                "groups of equal size, and no more chosen than there are"
            )
        a_group = self.experts // self.groups
        if self.groups > 1 and (a_group < 2 or self.chosen > self.groups_chosen * a_group):
            raise ModelError(
                f"{self.chosen} experts a token cannot be chosen from {self.groups_chosen} groups of {a_group}"
            )


@dataclass(frozen=True)
class ClampedGate:
    """An expert's numbers by gpt-oss: (up + 1) · gate · sigmoid(slope · gate), both clamped at `limit`."""

    slope: float
    limit: float


class Storage(Enum):
    """How a family's files store experts."""

    SEPARATE = "separate"  # each linear by itself, [outputs, inputs]
    STACKED = "stacked"  # all experts as one, [experts, inputs, outputs], gate and up in turns
    MXFP4 = "mxfp4"  # the same as [experts, outputs, inputs], 32 inputs by 16 bytes and a scale


@dataclass(frozen=True)
class ExpertNames:
    """What a family's files call the weights below a layer."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"  # of an expert
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer: MLPs of `inner` numbers, and one of `shared_inner` that every token takes."""

    routing: Routing
    inner: int
    shared_inner: int = 0  # 0: there is none
    biased: bool = False  # each linear of an expert
    clamped: ClampedGate | None = None  # None: the model's activation
    storage: Storage = Storage.SEPARATE
    names: ExpertNames = ExpertNames()
    held: int = field(default=0, repr=False)  # experts on this rank, see `shared.engine.parallel`; 0: all

    @property
    def here(self) -> int:
        """Number of experts whose weights are on this rank."""
        return self.held or self.routing.experts

    def parameters(self, hidden: int) -> int:
        """Number of weights."""
        routing = self.routing
        router = routing.experts * (hidden + routing.biased + routing.corrected)
        biases = self.here * (2 * self.inner + hidden) * self.biased
        return router + biases + 3 * hidden * (self.here * self.inner + self.shared_inner)

    def computed(self, hidden: int) -> int:
        """Number of weights that a token is multiplied with."""
        return hidden * (self.routing.experts + 3 * self.taken)

    @property
    def taken(self) -> int:
        """Inner numbers of the experts that a token takes."""
        return self.routing.chosen * self.inner + self.shared_inner


ExpertLayers = tuple[ExpertsConfig | None, ...]  # None: the layer has one MLP
ReadExperts = Callable[[Mapping[str, Any], int], ExpertLayers]  # of a config and its number of layers


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """How the file says that its weights are quantized; None: they are not."""
    found = config.get("quantization_config")
    if not found:
        return None
    return str(found.get("quant_method", "unnamed") if isinstance(found, dict) else found)


def no_experts(_config: Mapping[str, Any], layers: int) -> ExpertLayers:
    """Each layer has one MLP."""
    return (None,) * layers


def qwen3_moe_experts(config: Mapping[str, Any], layers: int) -> ExpertLayers:
    """Every so many-th layer has experts, but for those that are named."""
    experts = int(config.get("num_experts") or config["num_local_experts"])
    routing = Routing(
        experts,
        int(config["num_experts_per_tok"]),
        normalized=bool(config.get("norm_topk_prob", False)),
    )
    found = ExpertsConfig(routing, int(config["moe_intermediate_size"]))
    interval, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
    return tuple(
        None if layer in dense or not interval or (layer + 1) % interval else found for layer in range(layers)
    )


def mixtral_experts(config: Mapping[str, Any], layers: int) -> ExpertLayers:
    """All layers have experts, whose inner size is the model's."""
    routing = Routing(int(config["num_local_experts"]), int(config["num_experts_per_tok"]))
    names = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
    return (ExpertsConfig(routing, int(config["intermediate_size"]), names=names),) * layers


def glm4_moe_experts(config: Mapping[str, Any], layers: int) -> ExpertLayers:
    """The first layers have one MLP, all others experts and one that every token takes."""
    inner = int(config["moe_intermediate_size"])
    routing = Routing(
        int(config["n_routed_experts"]),
        int(config["num_experts_per_tok"]),
        scoring=Scoring.SIGMOID,
        normalized=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        corrected=True,
        groups=int(config.get("n_group") or 1),
        groups_chosen=int(config.get("topk_group") or 1),
    )
    found = ExpertsConfig(routing, inner, shared_inner=inner * int(config.get("n_shared_experts") or 0))
    dense = int(config.get("first_k_dense_replace", 1))
    return tuple(None if layer < dense else found for layer in range(layers))


def gpt_oss_experts(config: Mapping[str, Any], layers: int) -> ExpertLayers:
    """All layers have experts, with biases and a clamped gate. The softmax is over those chosen: the same weights."""
    routing = Routing(int(config["num_local_experts"]), int(config["num_experts_per_tok"]), biased=True)
    found = ExpertsConfig(
        routing,
        int(config["intermediate_size"]),
        biased=True,
        clamped=ClampedGate(float(config.get("swiglu_alpha", 1.702)), float(config.get("swiglu_limit", 7.0))),
        storage=Storage.MXFP4 if quantization_of(config) == "mxfp4" else Storage.STACKED,
        names=ExpertNames(router="router"),
    )
    return (found,) * layers
