"""Builds the layers of a decoder of a checkpoint's weights, by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
from shared.engine.model.routing import Router
from shared.engine.model.weights import OnProgress
from shared.engine.weight_source import WeightSource


def load_decoder(
    config: ModelConfig,
    weights: WeightSource,
    ops: Ops,
    *,
    context_len: int,
    dtype: torch.dtype,
    on_progress: OnProgress = lambda _what, _share: None,
) -> DecoderModel:
    """Read all weights, layer by layer; `ModelError` if one is missing or misshapen."""
    named, sizes = DecoderWeights(config, weights), (config.vocab_size, config.hidden_size)
    embedding = named.matrix("model.embed_tokens", *sizes, dtype)
    tables = {
        rope: cos_sin_table(rope, context_len).to(embedding.device) for rope in set(config.ropes) if rope
    }
    load, layers = LayerLoader(config, named, ops, dtype, tables), []
    for number in range(config.layers):
        layers.append(load.layer(number))
        on_progress("loading weights", (number + 1) / (config.layers + 1))
    norm = named.norm("model.norm", config.hidden_size, dtype)
    head = ops.head(embedding if config.tied_embeddings else named.matrix("lm_head", *sizes, dtype))
    on_progress("loading weights", 1.0)
    return DecoderModel(config, ops, DecoderParts(embedding, layers, norm, head))


@dataclass(frozen=True)
class LayerLoader:
    """Reads layer by layer; `ModelError` where a weight is missing or misshapen."""

    config: ModelConfig
    weights: DecoderWeights
    ops: Ops
    dtype: torch.dtype
    tables: Mapping[Rope, Tensor]  # [context_len, rotary_dim]

    def layer(self, number: int) -> DecoderLayer:
        """The layer of this number, from 0."""
        return DecoderLayer(
            config=self.config,
            ops=self.ops,
            attention=self._attention(number),
            feed_forward=self._feed_forward(number),
            **self.weights.layer_norms(number, self.dtype),
        )

    def _attention(self, number: int) -> AttentionBlock:
        config, prefix = self.config, f"model.layers.{number}.self_attn"
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        rope, norms = config.ropes[number], self.weights.qk_norms(number, self.dtype)
        return GroupedAttention(
            number=number,
            config=config,
            ops=self.ops,
            qkv=self._linear(
                [f"{prefix}.{part}_proj" for part in "qkv"],
                [q_size, kv_size, kv_size],
                config.hidden_size,
                bias=config.qkv_bias,
            ),
            whole_norms=(norms["q_norm"], norms["k_norm"]) if config.qk_norm is QKNorm.WHOLE else None,
            heads=HeadTransform(
                **norms if config.qk_norm is QKNorm.HEAD else {},
                epsilon=config.rms_norm_eps,
                cos_sin=self.tables[rope] if rope else None,
                sinks=self.weights.vector(f"{prefix}.sinks", config.heads, torch.float32)
                if config.sinks
                else None,
            ),
            output=self._linear([f"{prefix}.o_proj"], [config.hidden_size], q_size, bias=config.output_bias),
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
        bank = read_bank(self.weights, f"{prefix}.experts", experts, hidden, self.dtype)
        correction = by_expert("e_score_correction_bias") if routing.corrected else None
        return Experts(
            routing.experts,
            self.ops.head(self.weights.dequantized(router, routing.experts, hidden, self.dtype)),
            by_expert("bias") if routing.biased else None,
            Router(routing, correction, bank.device),
            self.ops.experts(bank, clamped(experts.clamped) if experts.clamped else activation),
            self._mlp(f"{prefix}.shared_experts", experts.shared_inner) if experts.shared_inner else None,
        )

    def _mlp(self, prefix: str, inner: int) -> GatedMLP:
        config, hidden = self.config, self.config.hidden_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        return GatedMLP(
            self._linear(names, [inner, inner], hidden, bias=config.mlp_bias),
            gated(config.activation, self.ops),
            self._linear([f"{prefix}.down_proj"], [hidden], inner, bias=config.mlp_bias),
        )

    def _linear(self, names: list[str], sizes: list[int], inputs: int, *, bias: bool) -> Linear:
        """One linear for several that share their input."""
        pairs = list(zip(names, sizes, strict=True))
        biases = [self.weights.vector(f"{name}.bias", size, self.dtype) for name, size in pairs if bias]
        joined_bias = torch.cat(biases) if bias else None
        if form := self.weights.format_of(names):
            return self.ops.narrow_linear(self.weights.narrow(names, sizes, inputs, form), joined_bias)
        weight = torch.cat([self.weights.matrix(name, size, inputs, self.dtype) for name, size in pairs])
        return self.ops.linear(weight, joined_bias)
