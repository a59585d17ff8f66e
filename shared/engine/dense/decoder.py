"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 in one packed, ragged forward pass.

Rows of all requests lie one after another, [tokens, …]; only attention knows where a request ends. Every operation
gives a row the same bits in any batch: the linears are packed (see `linear`), products and sums of two numbers are
exact by IEEE 754, and the few others were chosen for it (`_silu` by its formula: torch's own rounds the last elements
of a tensor another way than the rest). `ModelConfig` says which layers have biases, norms or windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.attention.paged import PagedBatch
from shared.engine.attention.protocol import Attention, PlannedAttention
from shared.engine.dense.linear import PackedLinear
from shared.engine.dense.rope import RotaryEmbedding, rotate
from shared.engine.dense.weights import OnProgress, Weights
from shared.engine.model_config import ModelConfig


@dataclass(frozen=True)
class RMSNorm:
    """Root mean square normalization, in float32 (Zhang and Sennrich, 2019)."""

    weight: Tensor  # [size]
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] → same."""
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return self.weight * (wide * scale).to(x.dtype)


@dataclass(frozen=True)
class DecoderLayer:
    """Attention, then a gated MLP, each added to the residual stream."""

    number: int
    config: ModelConfig
    attention_norm: RMSNorm
    qkv: PackedLinear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: PackedLinear
    mlp_norm: RMSNorm
    gate_up: PackedLinear
    down: PackedLinear

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: PlannedAttention) -> Tensor:
        """x [tokens, hidden] → same."""
        config = self.config
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        packed = self.qkv(self.attention_norm(x)).view(len(x), sum(sizes), config.head_dim)
        q, k, v = torch.split(packed, sizes, dim=1)
        q = rotate(self.q_norm(q) if self.q_norm else q, cos, sin)
        k = rotate(self.k_norm(k) if self.k_norm else k, cos, sin)
        attended = attention.attend(self.number, q, k, v)
        x = x + self.output(attended.reshape(len(x), -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(_silu(gate) * up)


class DecoderModel:
    """Token ids to logits."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: Attention,
        context_len: int,
        dtype: torch.dtype,
        on_progress: OnProgress,
    ) -> None:
        """Read and pack all weights; `ModelError` if one is missing or misshapen."""
        self.config = config
        self.layers_done = 0
        self._attention = attention
        self._rope = RotaryEmbedding(config, context_len)
        load = _Loader(config, weights, dtype)
        self._embedding = load.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = []
        for number in range(config.layers):
            self._layers.append(load.layer(number))
            on_progress("loading weights", (number + 1) / (config.layers + 1))
        self._norm = load.norm("model.norm", config.hidden_size)
        if config.tied_embeddings:
            self._head = PackedLinear(self._embedding, None)
        else:
            self._head = load.linear(["lm_head"], [config.vocab_size], config.hidden_size, bias=False)
        on_progress("loading weights", 1.0)

    def forward(self, token_ids: Tensor, batch: PagedBatch, sampled_rows: Tensor) -> Tensor:
        """token_ids [tokens], sampled_rows [rows] → logits float32 [rows, vocab]."""
        x = self._embedding[token_ids]
        cos, sin = self._rope.at(batch.positions)
        attention = self._attention.plan(batch)
        for layer in self._layers:
            x = layer(x, cos, sin, attention)
            self.layers_done += 1
        if not len(sampled_rows):
            return torch.empty(0, self.config.vocab_size)
        return self._head(self._norm(x[sampled_rows])).float()


@dataclass(frozen=True)
class _Loader:
    """Hugging Face's names of weights."""

    config: ModelConfig
    weights: Weights
    dtype: torch.dtype

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.weights.take(name, shape, self.dtype)

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", size), self.config.rms_norm_eps)

    def linear(self, names: list[str], sizes: list[int], inputs: int, *, bias: bool) -> PackedLinear:
        """One linear for several that share their input."""
        pairs = list(zip(names, sizes, strict=True))
        weight = torch.cat([self.tensor(f"{name}.weight", size, inputs) for name, size in pairs])
        return PackedLinear(
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
            attention_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            qkv=self.linear(
                [f"{attention}.{part}_proj" for part in "qkv"],
                [q_size, kv_size, kv_size],
                hidden,
                bias=config.qkv_bias,
            ),
            q_norm=self.norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self.norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
            output=self.linear([f"{attention}.o_proj"], [hidden], q_size, bias=config.output_bias),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            gate_up=self.linear(
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, bias=config.mlp_bias
            ),
            down=self.linear([f"{mlp}.down_proj"], [hidden], inner, bias=config.mlp_bias),
        )


def _silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))
