"""The dense decoder by compiled kernels: one call a step, from token ids to logits.

Weights are packed into panels of 16 outputs, in 16 bits where that loses nothing, or are a GGUF file's own blocks,
mapped and shared between processes. Every result is one chain of sums in a fixed order, so a row has the same bits in
any batch, on any number of threads, and with narrow weights the bits of the same numbers in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from ctypes import byref, c_void_p
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.engine.attention.protocol import PagedBatch
from shared.engine.checkpoint.families import Activation, QKNorm
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.checkpoint.rope_config import Rope
from shared.engine.gguf.packing import PackedFile, PackedWeight, narrowest_kind, pack_float
from shared.engine.model.names import DecoderWeights
from shared.engine.model.rope import cos_sin_table
from shared.engine.model.weights import OnProgress
from shared.engine.native import kernels
from shared.engine.native.kernels import Kernels
from shared.engine.quantized.weight_source import WeightSource
from shared.primitives.errors import ConfigError, InvariantError, ModelError

KIND_NUMBERS = {
    kind: number
    for number, kind in enumerate(
        ("f32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "bf16", "f16")
    )
}
_KV_TYPES = {torch.float32: 0, torch.float16: 1}
_PAGE_SIZES = (16, 32, 64, 128)  # whole vectors of keys, whole pages in a block of attention


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What the weights of a decoder are read from."""

    config: ModelConfig
    floats: WeightSource
    packed: PackedFile | None  # a GGUF file's own blocks, which are taken before the floats beside them


class NativeDecoder:
    """`Model` by compiled kernels over a `KVCache` in host memory."""

    def __init__(
        self,
        library: Kernels,
        stored: StoredWeights,
        cache: KVCache,
        *,
        context_len: int,
        threads: int,
        on_progress: OnProgress,
    ) -> None:
        """Pack or map all weights; `ModelError` if one is missing or misshapen, `ConfigError` for the page size."""
        if cache.page_size not in _PAGE_SIZES:
            allowed = ", ".join(map(str, _PAGE_SIZES))
            raise ConfigError(
                f"page_size must be one of {allowed} for the CPU kernels, got {cache.page_size}"
            )
        self._kernels = library
        self._config = config = stored.config
        self._cache = cache
        self._context_len = context_len
        tables = {rope: cos_sin_table(rope, context_len) for rope in set(config.ropes) if rope}
        self._memory = _Memory(config, DecoderWeights(config, stored.floats), stored.packed, tables)
        layers = (kernels.NativeLayer * config.layers)()
        for number in range(config.layers):
            layers[number] = self._memory.layer(number)
            on_progress("loading weights", (number + 1) / (config.layers + 1))
        shape = self._memory.shape(cache)
        self._decoder = library.decoder_new(byref(shape), layers, config.layers, threads)
        if self._decoder is None:
            raise ConfigError(f"{threads} threads cannot be started: ask for fewer")
        ending = weakref.finalize(self, library.decoder_delete, self._decoder)  # ends its threads
        ending.atexit = False  # at exit the forward thread may still compute; the process ends all threads
        on_progress("loading weights", 1.0)

    @property
    def layers_done(self) -> int:
        """See `Model`."""
        return int(self._kernels.decoder_layers_done(self._decoder))

    def forward(self, token_ids: Tensor, batch: PagedBatch, sampled_rows: Tensor) -> Tensor:
        """See `Model`."""
        self._check(token_ids, batch, sampled_rows)
        logits = torch.empty(len(sampled_rows), self._config.vocab_size)
        native = kernels.NativeBatch(
            rows=len(token_ids),
            requests=len(batch.kv_last_page_len),
            sampled=len(sampled_rows),
            token_ids=token_ids.data_ptr(),
            qo_indptr=batch.qo_indptr.data_ptr(),
            kv_indptr=batch.kv_indptr.data_ptr(),
            kv_indices=batch.kv_indices.data_ptr(),
            batch_indices=batch.batch_indices.data_ptr(),
            positions=batch.positions.data_ptr(),
            sampled_rows=sampled_rows.data_ptr(),
        )
        if self._kernels.decoder_forward(self._decoder, byref(native), c_void_p(logits.data_ptr())):
            raise MemoryError(f"no memory for a step of {len(token_ids)} tokens")
        return logits

    def _check(self, token_ids: Tensor, batch: PagedBatch, sampled_rows: Tensor) -> None:
        """The kernels check no bounds: an index out of bounds would read or write other memory."""
        assert batch.page_size == self._cache.page_size
        longs = (token_ids, sampled_rows)
        ints = (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.batch_indices, batch.positions)
        for dtype, tensors in ((torch.int64, longs), (torch.int32, ints)):
            assert all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)
        for what, found, end in (
            ("token", token_ids, self._config.vocab_size),
            ("page", batch.kv_indices, self._cache.pages),
            ("position", batch.positions, self._context_len),
            ("sampled row", sampled_rows, len(token_ids)),
        ):
            if len(found) and not 0 <= int(found.min()) <= int(found.max()) < end:
                raise InvariantError(
                    f"{what} {int(found.min())} or {int(found.max())} is not in 0 … {end - 1}"
                )
        if not bool((sampled_rows.diff() > 0).all()):
            raise InvariantError(f"sampled rows {sampled_rows.tolist()} do not ascend")


@dataclass
class _Memory:
    """Weights in the structs of the kernels; the tensors they point into stay alive here."""

    config: ModelConfig
    weights: DecoderWeights
    packed: PackedFile | None
    tables: Mapping[Rope, Tensor]  # [context_len, rotary_dim]
    kept: list[Tensor] = field(default_factory=list)
    halves: dict[Rope, tuple[int, int]] = field(default_factory=dict)  # addresses of cosines and sines

    def address(self, tensor: Tensor) -> int:
        self.kept.append(tensor)
        return tensor.data_ptr()

    def vector(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self.address(tensor.contiguous())

    def matrix(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> kernels.NativeMatrix:
        weight = self._packed_weight(name, outputs, inputs)
        return kernels.NativeMatrix(
            kind=KIND_NUMBERS[weight.kind],
            outputs=outputs,
            inputs=inputs,
            panels=self.address(weight.data),
            bias=self.vector(self.weights.vector(f"{name}.bias", outputs, torch.float32)) if bias else None,
        )

    def _packed_weight(self, name: str, outputs: int, inputs: int) -> PackedWeight:
        stored = f"{name}.weight"
        if self.packed is not None and stored in self.packed:
            weight = self.packed.take(stored)
            if (weight.outputs, weight.inputs) != (outputs, inputs):
                raise ModelError(
                    f"packed weight {stored} should have shape {[outputs, inputs]}, "
                    f"has {[weight.outputs, weight.inputs]}"
                )
            return weight
        full = self.weights.matrix(name, outputs, inputs, torch.float32)
        kind = narrowest_kind(full)
        return PackedWeight(kind, outputs, inputs, pack_float(full, kind))

    def layer(self, number: int) -> kernels.NativeLayer:
        config, prefix = self.config, f"model.layers.{number}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = [
            self.matrix(f"{attention}.{part}_proj", size, hidden, bias=config.qkv_bias)
            for part, size in zip("qkv", (q_size, kv_size, kv_size), strict=True)
        ]
        gate_up = [
            self.matrix(f"{mlp}.{part}_proj", inner, hidden, bias=config.mlp_bias) for part in ("gate", "up")
        ]
        norms = self.weights.layer_norms(number, torch.float32) | self.weights.qk_norms(number, torch.float32)
        cosines, sines = self.angles(config.ropes[number])
        return kernels.NativeLayer(
            **{place: self.vector(norm) for place, norm in norms.items()},
            cosines=cosines,
            sines=sines,
            qkv=(kernels.NativeMatrix * 3)(*qkv),
            output=self.matrix(f"{attention}.o_proj", hidden, q_size, bias=config.output_bias),
            gate_up=(kernels.NativeMatrix * 2)(*gate_up),
            down=self.matrix(f"{mlp}.down_proj", hidden, inner, bias=config.mlp_bias),
            window=config.windows[number] or 0,
        )

    def angles(self, rope: Rope | None) -> tuple[int | None, int | None]:
        """Where cosines and sines of all positions lie, each [context_len, rotary_dim / 2]."""
        if rope is None:
            return None, None
        if rope not in self.halves:
            cosines, sines = (half.contiguous() for half in self.tables[rope].chunk(2, dim=1))
            self.halves[rope] = (self.address(cosines), self.address(sines))
        return self.halves[rope]

    def shape(self, cache: KVCache) -> kernels.NativeShape:
        config = self.config
        embedding = self.matrix("model.embed_tokens", config.vocab_size, config.hidden_size)
        return kernels.NativeShape(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
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
                else self.matrix("lm_head", config.vocab_size, config.hidden_size)
            ),
            norm=self.vector(self.weights.norm("model.norm", config.hidden_size, torch.float32)),
        )
