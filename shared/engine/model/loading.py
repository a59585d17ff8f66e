"""Builds the layers of a decoder of a checkpoint's weights, by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from shared.engine.attention.heads import HeadTransform
from shared.engine.checkpoint.experts_config import ExpertsConfig
from shared.engine.checkpoint.families import QKNorm
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.rope_config import Rope
from shared.engine.model.decoder import (
    AttentionBlock,
    DecoderLayer,
    DecoderModel,
    DecoderParts,
    FeedForward,
)
from shared.engine.model.expert_banks import read_bank
from shared.engine.model.experts import Experts
from shared.engine.model.gated_mlp import GatedMLP, clamped, gated
from shared.engine.model.grouped_attention import GroupedAttention
from shared.engine.model.names import DecoderWeights
from shared.engine.model.ops import Linear, Ops
from shared.engine.model.rope import cos_sin_table
from shared.engine.model.vocabulary import Embed, EmbeddingOfRank, HeadOfRanks, WholeEmbedding
from shared.engine.model.weights import OnProgress
from shared.engine.parallel.shares import ModelShare
from shared.engine.quantized.weight_source import Part, WeightSource


def load_decoder(
    config: ModelConfig,
    weights: WeightSource,
    ops: Ops,
    *,
    context_len: int,
    dtype: torch.dtype,
    on_progress: OnProgress = lambda _what, _share: None,
) -> DecoderModel:
    """Read all weights, layer by layer; `ModelError` if one is missing or misshapen.

    `config` is of the whole model. Of several ranks each reads its share, that of `ops`; `ConfigError` where there is
    none for so many ranks.
    """
    share, named = ModelShare(config, ops.share), DecoderWeights(config, weights)
    embedding = _of_vocabulary(named, "model.embed_tokens", share, dtype)
    tables = {
        rope: cos_sin_table(rope, context_len).to(embedding.device) for rope in set(config.ropes) if rope
    }
    load, layers = LayerLoader(config, named, ops, dtype, tables), []
    for number in range(config.layers):
        layers.append(load.layer(number))
        on_progress("loading weights", (number + 1) / (config.layers + 1))
    norm = named.norm("model.norm", config.hidden_size, dtype)
    head = ops.head(embedding if config.tied_embeddings else _of_vocabulary(named, "lm_head", share, dtype))
    embed: Embed = WholeEmbedding(embedding)
    if ops.share.ranks > 1:
        embed = EmbeddingOfRank(embedding, share.vocabulary.start, ops)
        head = HeadOfRanks(head, share.vocabulary_rows, ops)
    on_progress("loading weights", 1.0)
    return DecoderModel(config, ops, DecoderParts(embed, layers, norm, head))


def _of_vocabulary(named: DecoderWeights, name: str, share: ModelShare, dtype: torch.dtype) -> Tensor:
    """The rows of a rank's tokens, [vocab, hidden]; zeros where the last rank has fewer."""
    whole = share.whole
    found = named.matrix(name, whole.vocab_size, whole.hidden_size, dtype, share.part(share.vocabulary))
    return functional.pad(found, (0, 0, 0, rest)) if (rest := share.vocabulary_rows - len(found)) else found


@dataclass(frozen=True)
class LayerLoader:
    """Reads layer by layer; `ModelError` where a weight is missing or misshapen."""

    config: ModelConfig  # of the whole model
    weights: DecoderWeights
    ops: Ops
    dtype: torch.dtype
    tables: Mapping[Rope, Tensor]  # [context_len, rotary_dim]

    @cached_property
    def share(self) -> ModelShare:
        """What this rank reads of it."""
        return ModelShare(self.config, self.ops.share)

    @cached_property
    def own(self) -> ModelConfig:
        """What this rank computes."""
        return self.share.config

    def layer(self, number: int) -> DecoderLayer:
        """The layer of this number, from 0."""
        return DecoderLayer(
            config=self.own,
            ops=self.ops,
            attention=self._attention(number),
            feed_forward=self._feed_forward(number),
            **self.weights.layer_norms(number, self.dtype),
        )

    def _attention(self, number: int) -> AttentionBlock:
        config, share, prefix = self.config, self.share, f"model.layers.{number}.self_attn"
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        q, kv = share.part(share.heads, config.head_dim), share.part(share.kv_heads, config.head_dim)
        rope, norms = config.ropes[number], self.weights.qk_norms(number, self.dtype, (q, kv))
        return GroupedAttention(
            number=number,
            config=self.own,
            ops=self.ops,
            qkv=self._linear(
                [(f"{prefix}.q_proj", q_size), (f"{prefix}.k_proj", kv_size), (f"{prefix}.v_proj", kv_size)],
                config.hidden_size,
                [q, kv, kv],
                bias=config.qkv_bias,
            ),
            whole_norms=(norms["q_norm"], norms["k_norm"]) if config.qk_norm is QKNorm.WHOLE else None,
            heads=HeadTransform(
                **norms if config.qk_norm is QKNorm.HEAD else {},
                epsilon=config.rms_norm_eps,
                cos_sin=self.tables[rope] if rope else None,
                sinks=self.weights.vector(
                    f"{prefix}.sinks", config.heads, torch.float32, share.part(share.heads)
                )
                if config.sinks
                else None,
            ),
            output=self._linear(
                [(f"{prefix}.o_proj", config.hidden_size)],
                q_size,
                [share.part(share.heads, config.head_dim, dim=1)],
                bias=self.own.output_bias,
            ),
        )

    def _feed_forward(self, number: int) -> FeedForward:
        experts = self.config.experts[number]
        if experts is None:
            return self._mlp(f"model.layers.{number}.mlp", self.config.intermediate_size)
        return self._experts(f"model.layers.{number}.{experts.names.block}", experts)

    def _experts(self, prefix: str, experts: ExpertsConfig) -> Experts:
        routing, hidden, router = experts.routing, self.config.hidden_size, f"{prefix}.{experts.names.router}"

        def by_expert(name: str) -> Tensor:
            return self.weights.vector(f"{router}.{name}", routing.experts, torch.float32)

        activation = gated(self.config.activation, self.ops)
        held = self.share.experts(experts) if self.ops.share.ranks > 1 else None
        bank = read_bank(self.weights, f"{prefix}.experts", experts, hidden, self.dtype, held)
        correction = by_expert("e_score_correction_bias") if routing.corrected else None
        return Experts(
            routing.experts,
            self.ops.head(self.weights.dequantized(router, routing.experts, hidden, self.dtype)),
            by_expert("bias") if routing.biased else None,
            self.ops.routing(routing, correction, bank.device),
            self.ops.experts(bank, clamped(experts.clamped) if experts.clamped else activation),
            self._mlp(f"{prefix}.shared_experts", experts.shared_inner) if experts.shared_inner else None,
            held,
        )

    def _mlp(self, prefix: str, inner: int) -> GatedMLP:
        config, hidden, share = self.config, self.config.hidden_size, self.share
        rows, columns = (share.part(share.columns(inner), dim=dim) for dim in (0, 1))
        return GatedMLP(
            self._linear(
                [(f"{prefix}.gate_proj", inner), (f"{prefix}.up_proj", inner)],
                hidden,
                [rows, rows],
                bias=config.mlp_bias,
            ),
            gated(config.activation, self.ops),
            self._linear(
                [(f"{prefix}.down_proj", hidden)],
                inner,
                [columns],
                bias=config.mlp_bias and share.share.rank == 0,
            ),
        )

    def _linear(
        self, pairs: list[tuple[str, int]], inputs: int, parts: list[Part | None], *, bias: bool
    ) -> Linear:
        """One linear for several that share their input; pairs of names and outputs, and what is read of each."""
        named, joined_bias = list(zip(pairs, parts, strict=True)), None
        if bias:
            biases = [
                self.weights.vector(
                    f"{name}.bias", size, self.dtype, part if part and part.dim == 0 else None
                )
                for (name, size), part in named
            ]
            joined_bias = torch.cat(biases)
        if form := self.weights.format_of([name for name, _ in pairs]):
            return self.ops.narrow_linear(self.weights.narrow(pairs, inputs, form, parts), joined_bias)
        weight = torch.cat(
            [self.weights.matrix(name, size, inputs, self.dtype, part) for (name, size), part in named]
        )
        return self.ops.linear(weight, joined_bias)
