"""Weights of a decoder as the compiled kernels read them.

Matrices are packed into panels of 16 outputs, in 16 bits where that loses nothing, or are a GGUF file's own blocks,
mapped and shared between processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Array, addressof
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import ExpertsConfig, Routing, Scoring
from shared.engine.checkpoint.families import Activation, QKNorm
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.rope_config import Rope
from shared.engine.gguf.packed_file import PackedFile
from shared.engine.gguf.packing import PackedWeight, narrowest_kind, pack_float
from shared.engine.model.expert_banks import read_bank
from shared.engine.model.names import DecoderWeights
from shared.engine.native import kernels
from shared.engine.quantized.weight_source import WeightSource
from shared.primitives.errors import ModelError

KIND_NUMBERS = {
    kind: number
    for number, kind in enumerate(
        ("f32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "bf16", "f16")
    )
}
_KV_TYPES = {torch.float32: 0, torch.float16: 1}


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What the weights of a decoder are read from."""

    config: ModelConfig
    floats: WeightSource
    packed: PackedFile | None  # a GGUF file's own blocks, which are taken before the floats beside them


def native_routing(routing: Routing, correction: int | None) -> kernels.NativeRouting:
    """The struct of a routing; `correction`: the address of float32 [experts]."""
    return kernels.NativeRouting(
        experts=routing.experts,
        chosen=routing.chosen,
        groups=routing.groups,
        groups_chosen=routing.groups_chosen,
        sigmoid=routing.scoring is Scoring.SIGMOID,
        normalized=routing.normalized,
        scale=routing.scale,
        correction=correction,
    )


class NativeWeights:
    """Weights in the structs of the kernels; the tensors they point into stay alive here."""

    def __init__(self, stored: StoredWeights, tables: Mapping[Rope, Tensor]) -> None:
        """`tables`: cosines and sines of all positions, [context_len, rotary_dim]."""
        self._config = stored.config
        self._weights = DecoderWeights(stored.config, stored.floats)
        self._blocks = stored.packed
        self._tables = tables
        self._kept: list[Tensor] = []
        self._kept_matrices: list[Array[kernels.NativeMatrix]] = []
        self._halves: dict[Rope, tuple[int, int]] = {}  # addresses of cosines and sines

    def layer(self, number: int) -> kernels.NativeLayer:
        """Pack or map the weights of a layer; `ModelError` if one is missing or misshapen."""
        config, prefix = self._config, f"model.layers.{number}"
        attention, experts = f"{prefix}.self_attn", config.experts[number]
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        qkv = [
            self._matrix(f"{attention}.{part}_proj", size, config.hidden_size, bias=config.qkv_bias)
            for part, size in zip("qkv", (q_size, kv_size, kv_size), strict=True)
        ]
        norms = self._weights.layer_norms(number, torch.float32) | self._weights.qk_norms(
            number, torch.float32
        )
        cosines, sines = self._angles(config.ropes[number])
        sinks = (
            self._weights.vector(f"{attention}.sinks", config.heads, torch.float32) if config.sinks else None
        )
        layer = kernels.NativeLayer(
            **{place: self._vector(norm) for place, norm in norms.items()},
            cosines=cosines,
            sines=sines,
            sinks=self._vector(sinks),
            qkv=(kernels.NativeMatrix * 3)(*qkv),
            output=self._matrix(f"{attention}.o_proj", config.hidden_size, q_size, bias=config.output_bias),
            window=config.windows[number] or 0,
        )
        if experts is None:
            self._put_mlp(layer, f"{prefix}.mlp", config.intermediate_size)
        else:
            block = f"{prefix}.{experts.names.block}"
            layer.experts = self._experts(block, experts)
            if experts.shared_inner:
                self._put_mlp(layer, f"{block}.shared_experts", experts.shared_inner)
        return layer

    def _put_mlp(self, layer: kernels.NativeLayer, prefix: str, inner: int) -> None:
        config, hidden = self._config, self._config.hidden_size
        for place, part in enumerate(("gate", "up")):
            layer.gate_up[place] = self._matrix(f"{prefix}.{part}_proj", inner, hidden, bias=config.mlp_bias)
        layer.down = self._matrix(f"{prefix}.down_proj", hidden, inner, bias=config.mlp_bias)

    def _experts(self, prefix: str, experts: ExpertsConfig) -> kernels.NativeExperts:
        """Pack one expert after the other: what is packed in its file is unpacked for one at a time."""
        hidden, routing, name = self._config.hidden_size, experts.routing, f"{prefix}.{experts.names.router}"

        def by_expert(what: str) -> int | None:
            return self._vector(self._weights.vector(f"{name}.{what}", routing.experts, torch.float32))

        router = self._matrix(name, routing.experts, hidden)
        router.bias = by_expert("bias") if routing.biased else None
        bank = read_bank(self._weights, f"{prefix}.experts", experts, hidden, torch.float32)
        gate_up, down = ((kernels.NativeMatrix * routing.experts)() for _ in range(2))
        for number in range(routing.experts):
            for matrices, weight, biases in zip(
                (gate_up, down), bank.matrices(number), (bank.gate_up_bias, bank.down_bias), strict=True
            ):
                matrices[number] = self._packed(weight, None if biases is None else biases[number])
        self._kept_matrices += (gate_up, down)
        return kernels.NativeExperts(
            routing=native_routing(
                routing, by_expert("e_score_correction_bias") if routing.corrected else None
            ),
            inner=experts.inner,
            slope=experts.clamped.slope if experts.clamped else 0.0,
            limit=experts.clamped.limit if experts.clamped else 0.0,
            router=router,
            gate_up=addressof(gate_up),
            down=addressof(down),
        )

    def shape(self, cache: KVCache) -> kernels.NativeShape:
        """Describe the model, with its embedding and its head."""
        config = self._config
        embedding = self._matrix("model.embed_tokens", config.vocab_size, config.hidden_size)
        return kernels.NativeShape(
            hidden=config.hidden_size,
            heads=config.heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            rotary_dim=max((rope.rotary_dim for rope in config.ropes if rope), default=0),
            gelu=config.activation is Activation.GELU,
            whole_qk_norm=config.qk_norm is QKNorm.WHOLE,
            epsilon=config.rms_norm_eps,
            embedding_scale=config.embedding_scale,
            residual_scale=config.residual_scale,
            logits_divisor=config.logits_divisor,
            logits_cap=config.logits_cap or 0.0,
            attention_scale=config.attention_scale,
            attention_cap=config.attention_cap or 0.0,
            cache=kernels.NativeCache(
                pages=cache.address,
                type=_KV_TYPES[cache.store.dtype],
                layers=config.layers,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                page_size=cache.page_size,
            ),
            embedding=embedding,
            head=(
                embedding
                if config.tied_embeddings
                else self._matrix("lm_head", config.vocab_size, config.hidden_size)
            ),
            norm=self._vector(self._weights.norm("model.norm", config.hidden_size, torch.float32)),
        )

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _vector(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._address(tensor.contiguous())

    def _matrix(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> kernels.NativeMatrix:
        added = self._weights.vector(f"{name}.bias", outputs, torch.float32) if bias else None
        if self._blocks is None or f"{name}.weight" not in self._blocks:
            return self._packed(self._weights.matrix(name, outputs, inputs, torch.float32), added)
        weight = self._blocks.take(f"{name}.weight")
        if (weight.outputs, weight.inputs) != (outputs, inputs):
            raise ModelError(
                f"packed weight {name}.weight should have shape {[outputs, inputs]}, "
                f"has {[weight.outputs, weight.inputs]}"
            )
        return self._native(weight, added)

    def _packed(self, weight: Tensor, bias: Tensor | None) -> kernels.NativeMatrix:
        """The struct of a matrix float32 [outputs, inputs]."""
        kind = narrowest_kind(weight)
        return self._native(PackedWeight(kind, len(weight), weight.shape[1], pack_float(weight, kind)), bias)

    def _native(self, weight: PackedWeight, bias: Tensor | None) -> kernels.NativeMatrix:
        return kernels.NativeMatrix(
            kind=KIND_NUMBERS[weight.kind],
            outputs=weight.outputs,
            inputs=weight.inputs,
            panels=self._address(weight.data),
            bias=self._vector(bias),
        )

    def _angles(self, rope: Rope | None) -> tuple[int | None, int | None]:
        """Where cosines and sines of all positions lie, each [context_len, rotary_dim / 2]."""
        if rope is None:
            return None, None
        if rope not in self._halves:
            cosines, sines = (half.contiguous() for half in self._tables[rope].chunk(2, dim=1))
            self._halves[rope] = (self._address(cosines), self._address(sines))
        return self._halves[rope]
