"""The dense decoder: all families of `shared.engine.checkpoint.families` in one packed, ragged forward pass.

Rows of all requests lie one after another, [tokens, …]; only attention knows where a request ends. What a layer is made
of comes as `Ops`, so the same layers run on packed linears of a CPU and on the kernels of a GPU. `ModelConfig` says
what a family's layers have: biases, norms, windows, rotations, soft caps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.attention.heads import HeadTransform
from shared.engine.attention.protocol import Attention, PagedBatch, PlannedAttention, soft_cap
from shared.engine.checkpoint.families import Activation, QKNorm
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.rope_config import Rope
from shared.engine.model.ops import Linear, Ops
from shared.engine.model.rope import cos_sin_table
from shared.engine.model.weights import DecoderWeights, OnProgress, WeightSource


@dataclass(frozen=True)
class DecoderLayer:
    """Attention, then a gated MLP, each added to the residual stream."""

    number: int
    config: ModelConfig
    ops: Ops
    attention_norm: Tensor | None  # [hidden]
    attention_post_norm: Tensor | None
    qkv: Linear
    whole_norms: tuple[Tensor, Tensor] | None  # of q and k over all of their heads, [heads · head_dim]
    heads: HeadTransform
    output: Linear
    mlp_norm: Tensor | None
    mlp_post_norm: Tensor | None
    gate_up: Linear
    down: Linear

    def __call__(
        self, x: Tensor, residual: Tensor | None, attention: PlannedAttention
    ) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] and the stream it is yet to be added to → the same. The first layer's x is the stream."""
        x, residual = self._read(x, residual, self.attention_norm)
        attended = attention.attend(self.number, *self._qkv(x), self.heads)
        x = self._given(self.output(attended.reshape(len(x), -1)), self.attention_post_norm)
        x, residual = self._read(x, residual, self.mlp_norm)
        return self._given(self.down(self._gated(self.gate_up(x))), self.mlp_post_norm), residual

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden] → three of [tokens, heads, head_dim]."""
        config = self.config
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        q, k, v = torch.split(self.qkv(x).view(len(x), sum(sizes), config.head_dim), sizes, dim=1)
        if self.whole_norms is not None:
            pairs = zip((q, k), self.whole_norms, strict=True)
            q, k = (self._norm(x.flatten(1), weight).view(x.shape) for x, weight in pairs)
        return q, k, v

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.rms_norm(x, weight, self.config.rms_norm_eps)

    def _read(self, x: Tensor, residual: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """What attention or the MLP reads, and the stream."""
        if weight is None:
            stream = x if residual is None else residual + x
            return stream, stream
        if residual is None:
            return self._norm(x, weight), x
        return self.ops.add_rms_norm(x, residual, weight, self.config.rms_norm_eps)

    def _given(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """What is added to the stream."""
        if weight is not None:
            x = self._norm(x, weight)
        return x if self.config.residual_scale == 1 else x * self.config.residual_scale

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.config.activation is Activation.GELU:
            return self.ops.gelu_and_mul(gate_up)
        return self.ops.silu_and_mul(gate_up)


class DecoderModel:
    """Token ids to logits, on the device where its weights are."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        ops: Ops,
        *,
        context_len: int,
        dtype: torch.dtype,
        on_progress: OnProgress = lambda _what, _share: None,
    ) -> None:
        """Read all weights, layer by layer; `ModelError` if one is missing or misshapen."""
        self.config = config
        self.layers_done = 0
        self._ops = ops
        named = DecoderWeights(config, weights)
        self._embedding = named.matrix("model.embed_tokens", config.vocab_size, config.hidden_size, dtype)
        device = self._embedding.device
        tables = {rope: cos_sin_table(rope, context_len).to(device) for rope in set(config.ropes) if rope}
        load = _Loader(config, named, ops, dtype, tables)
        self._layers = []
        for number in range(config.layers):
            self._layers.append(load.layer(number))
            on_progress("loading weights", (number + 1) / (config.layers + 1))
        self._norm = load.weights.norm("model.norm", config.hidden_size, dtype)
        head = (
            self._embedding
            if config.tied_embeddings
            else load.matrix("lm_head", config.vocab_size, config.hidden_size)
        )
        self._head = ops.head(head)
        on_progress("loading weights", 1.0)

    def run(
        self,
        token_ids: Tensor,
        attention: PlannedAttention,
        sampled_rows: Tensor | None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """token_ids [tokens], sampled_rows [rows] or None for all → logits float32 [rows, vocab], where they are given.

        The integers are of 32 or 64 bits. Nothing here waits for the device or depends on a value, so the call may be
        captured as a CUDA graph.
        """
        x, residual = self.hidden(token_ids, attention, sampled_rows)
        if logits is None:
            logits = x.new_empty(len(x), self.config.vocab_size, dtype=torch.float32)
        return self.head(x, residual, logits)

    def hidden(
        self, token_ids: Tensor, attention: PlannedAttention, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `run`, up to the last layer: what it gives and the stream that is yet to be added to, [rows, hidden]."""
        x, residual = self._embedding.index_select(0, token_ids), None
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        for layer in self._layers:
            x, residual = layer(x, residual, attention)
            self.layers_done += 1
        assert residual is not None, "a decoder has layers"
        if rows is None:
            return x, residual
        return x.index_select(0, rows), residual.index_select(0, rows)

    def head(self, x: Tensor, residual: Tensor, logits: Tensor) -> Tensor:
        """Write the logits of what `hidden` gave, which may be overwritten, and return them."""
        if not len(logits):
            return logits
        x, _ = self._ops.add_rms_norm(x, residual, self._norm, self.config.rms_norm_eps)
        assert len(logits) == len(x), "torch resizes what does not fit"
        self._head(x, logits)
        if self.config.logits_divisor != 1:
            logits /= self.config.logits_divisor
        if self.config.logits_cap is not None:
            logits.copy_(soft_cap(logits, self.config.logits_cap))
        return logits


class PlanningDecoder:
    """`Model` by a decoder, with an attention that is planned in each step."""

    def __init__(self, decoder: DecoderModel, attention: Attention) -> None:
        self._decoder = decoder
        self._attention = attention

    @property
    def layers_done(self) -> int:
        """See `Model`."""
        return self._decoder.layers_done

    def forward(self, token_ids: Tensor, batch: PagedBatch, sampled_rows: Tensor) -> Tensor:
        """See `Model`."""
        return self._decoder.run(token_ids, self._attention.plan(batch), sampled_rows)


@dataclass(frozen=True)
class _Loader:
    """Hugging Face's names of weights."""

    config: ModelConfig
    weights: DecoderWeights
    ops: Ops
    dtype: torch.dtype
    tables: Mapping[Rope, Tensor]  # [context_len, rotary_dim]

    def matrix(self, name: str, outputs: int, inputs: int) -> Tensor:
        return self.weights.matrix(name, outputs, inputs, self.dtype)

    def linear(self, names: list[str], sizes: list[int], inputs: int, *, bias: bool) -> Linear:
        """One linear for several that share their input."""
        pairs = list(zip(names, sizes, strict=True))
        weight = torch.cat([self.matrix(name, size, inputs) for name, size in pairs])
        if not bias:
            return self.ops.linear(weight, None)
        biases = [self.weights.vector(f"{name}.bias", size, self.dtype) for name, size in pairs]
        return self.ops.linear(weight, torch.cat(biases))

    def layer(self, number: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{number}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        rope, norms = config.ropes[number], self.weights.qk_norms(number, self.dtype)
        return DecoderLayer(
            number=number,
            config=config,
            ops=self.ops,
            qkv=self.linear(
                [f"{attention}.{part}_proj" for part in "qkv"],
                [q_size, kv_size, kv_size],
                hidden,
                bias=config.qkv_bias,
            ),
            whole_norms=(norms["q_norm"], norms["k_norm"]) if config.qk_norm is QKNorm.WHOLE else None,
            heads=HeadTransform(
                **norms if config.qk_norm is QKNorm.HEAD else {},
                epsilon=config.rms_norm_eps,
                cos_sin=self.tables[rope] if rope else None,
            ),
            output=self.linear([f"{attention}.o_proj"], [hidden], q_size, bias=config.output_bias),
            gate_up=self.linear(
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, bias=config.mlp_bias
            ),
            down=self.linear([f"{mlp}.down_proj"], [hidden], inner, bias=config.mlp_bias),
            **self.weights.layer_norms(number, self.dtype),
        )
