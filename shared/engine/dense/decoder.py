"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 in one packed, ragged forward pass.

Rows of all requests lie one after another, [tokens, …]; only attention knows where a request ends. What a layer is made
of comes as `Ops`, so the same layers run on packed linears of a CPU and on the kernels of a GPU. `ModelConfig` says
which layers have biases, norms or windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.attention.paged import PagedBatch
from shared.engine.attention.protocol import Attention, PlannedAttention
from shared.engine.dense.rope import cos_sin_table
from shared.engine.dense.weights import OnProgress, WeightSource
from shared.engine.model_config import ModelConfig
from shared.engine.ops import Linear, Ops


@dataclass(frozen=True)
class DecoderLayer:
    """Attention, then a gated MLP, each added to the residual stream."""

    number: int
    config: ModelConfig
    ops: Ops
    attention_norm: Tensor  # [hidden]
    qkv: Linear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        attention: PlannedAttention,
    ) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] and the stream it is yet to be added to → the same. The first layer's x is the stream."""
        x, residual = self._norm(x, residual, self.attention_norm)
        q, k, v = self._qkv(x)
        q, k = self.ops.rotate(q, k, positions, cos_sin)
        attended = attention.attend(self.number, q, k, v)
        x, residual = self._norm(self.output(attended.reshape(len(x), -1)), residual, self.mlp_norm)
        return self.down(self.ops.silu_and_mul(self.gate_up(x))), residual

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden] → three of [tokens, heads, head_dim], those of q and k normalized in some families."""
        config = self.config
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        q, k, v = torch.split(self.qkv(x).view(len(x), sum(sizes), config.head_dim), sizes, dim=1)
        if self.q_norm is not None:
            q = self.ops.rms_norm(q, self.q_norm, config.rms_norm_eps)
        if self.k_norm is not None:
            k = self.ops.rms_norm(k, self.k_norm, config.rms_norm_eps)
        return q, k, v

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.ops.rms_norm(x, weight, self.config.rms_norm_eps), x
        return self.ops.add_rms_norm(x, residual, weight, self.config.rms_norm_eps)


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
        device: str = "cpu",
        attention: Attention | None = None,
        on_progress: OnProgress = lambda _what, _share: None,
    ) -> None:
        """Read all weights, layer by layer; `ModelError` if one is missing or misshapen.

        `attention` plans for `forward`; `run` is given one that is planned.
        """
        self.config = config
        self.layers_done = 0
        self._ops = ops
        self._attention = attention
        self._cos_sin = cos_sin_table(config, context_len).to(device)
        load = _Loader(config, weights, ops, dtype)
        self._embedding = load.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = []
        for number in range(config.layers):
            self._layers.append(load.layer(number))
            on_progress("loading weights", (number + 1) / (config.layers + 1))
        self._norm = load.tensor("model.norm.weight", config.hidden_size)
        head = (
            self._embedding
            if config.tied_embeddings
            else load.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        self._head = ops.head(head)
        on_progress("loading weights", 1.0)

    def forward(self, token_ids: Tensor, batch: PagedBatch, sampled_rows: Tensor) -> Tensor:
        """See `Model`."""
        assert self._attention is not None
        return self.run(token_ids, batch.positions, self._attention.plan(batch), sampled_rows)

    def run(
        self, token_ids: Tensor, positions: Tensor, attention: PlannedAttention, sampled_rows: Tensor | None
    ) -> Tensor:
        """token_ids, positions [tokens], sampled_rows [rows] or None for all → logits float32 [rows, vocab].

        The integers are of 32 or 64 bits. Nothing here waits for the device or depends on a value, so the call may be
        captured as a CUDA graph.
        """
        x, residual = self._embedding.index_select(0, token_ids), None
        for layer in self._layers:
            x, residual = layer(x, residual, positions, self._cos_sin, attention)
            self.layers_done += 1
        assert residual is not None, "a decoder has layers"
        if sampled_rows is not None:
            if not len(sampled_rows):
                return x.new_empty(0, self.config.vocab_size, dtype=torch.float32)
            x, residual = x.index_select(0, sampled_rows), residual.index_select(0, sampled_rows)
        x, _ = self._ops.add_rms_norm(x, residual, self._norm, self.config.rms_norm_eps)
        return self._head(x)


@dataclass(frozen=True)
class _Loader:
    """Hugging Face's names of weights."""

    config: ModelConfig
    weights: WeightSource
    ops: Ops
    dtype: torch.dtype

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.weights.take(name, shape, self.dtype)

    def head_norm(self, name: str) -> Tensor | None:
        return self.tensor(name, self.config.head_dim) if self.config.qk_norm else None

    def linear(self, names: list[str], sizes: list[int], inputs: int, *, bias: bool) -> Linear:
        """One linear for several that share their input."""
        pairs = list(zip(names, sizes, strict=True))
        weight = torch.cat([self.tensor(f"{name}.weight", size, inputs) for name, size in pairs])
        return self.ops.linear(
            weight, torch.cat([self.tensor(f"{name}.bias", size) for name, size in pairs]) if bias else None
        )

    def layer(self, number: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{number}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        return DecoderLayer(
            number=number,
            config=config,
            ops=self.ops,
            attention_norm=self.tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self.linear(
                [f"{attention}.{part}_proj" for part in "qkv"],
                [q_size, kv_size, kv_size],
                hidden,
                bias=config.qkv_bias,
            ),
            q_norm=self.head_norm(f"{attention}.q_norm.weight"),
            k_norm=self.head_norm(f"{attention}.k_norm.weight"),
            output=self.linear([f"{attention}.o_proj"], [hidden], q_size, bias=config.output_bias),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self.linear(
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, bias=config.mlp_bias
            ),
            down=self.linear([f"{mlp}.down_proj"], [hidden], inner, bias=config.mlp_bias),
        )
