"""What a decoder looks like, read from a Hugging Face `config.json`.

`ModelConfig` is the small frozen value that weights, cache, model and memory planning share. Reading it refuses, by
name, everything that Segue cannot compute exactly: a wrong rope or an ignored window would not crash, the model would
answer nonsense. Knows no torch and no weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shared.engine.checkpoint.experts_config import (
    MXFP4_BLOCK,
    MXFP4_BLOCK_BYTES,
    ExpertLayers,
    ExpertsConfig,
    Storage,
    quantization_of,
)
from shared.engine.checkpoint.families import FAMILIES, Activation, Family, Norms, QKNorm
from shared.engine.checkpoint.rope_config import Rope, context_len_of, read_ropes
from shared.engine.checkpoint.text_half import TEXT_HALVES, text_half
from shared.engine.quantized.formats import (
    IN_LAYERS,
    Quantization,
    WeightFormat,
    check_sizes,
    read_quantization,
)
from shared.engine.quantized.fp8_formats import EXPERTS_STEP
from shared.limits.model_files import TOKENIZER_BYTES_MAX, read_config, read_json
from shared.primitives.errors import ModelError

SUPPORTED_ARCHITECTURES = (*FAMILIES, *TEXT_HALVES)
# Fields of a `ModelConfig` that version 0.1.0 had not: a new one is added here, and says nothing by its default.
_LATER_FIELDS = ("experts", "sinks", "quantization")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of a decoder; of each layer its window, rotation and experts, None where it has none."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_len: int  # tokens the model was made for
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]  # tokens, per layer
    ropes: tuple[Rope | None, ...]  # per layer
    experts: ExpertLayers
    attention_scale: float  # of scores
    qk_norm: QKNorm = QKNorm.NONE
    activation: Activation = Activation.SILU
    norms: Norms = Norms.BEFORE
    norm_offset: float = 0.0  # added to the weights of norms
    sinks: bool = False  # attention has one a head
    packed: bool = False  # q, k and v are stored as one weight, and so are gate and up
    attention_cap: float | None = None  # of scores: cap * tanh(score / cap)
    logits_cap: float | None = None  # of logits, likewise
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and the MLP give, before it is added to the stream
    logits_divisor: float = 1.0
    quantization: Quantization | None = None  # of the linears in layers
    # Rows of embedding and head on this rank, see `shared.engine.parallel`; 0: all. Not part of what a model is.
    vocab_held: int = field(default=0, repr=False)

    @property
    def canonical(self) -> str:
        """What a fingerprint hashes of it: the same text in each version of Segue that computes the same model.

        A stream goes on only on workers of one fingerprint. A field that came later, and says nothing of this model, is
        not told: else all streams were lost in a roll from a version without it.
        """
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        for name in _LATER_FIELDS:
            if not (any(told[name]) if isinstance(told[name], tuple) else told[name]):
                del told[name]
        return f"ModelConfig({', '.join(f'{name}={value!r}' for name, value in told.items())})"

    @property
    def parameters(self) -> int:
        """Number of weights, for planning memory."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = hidden * (2 * q_size + 2 * kv_size) + (q_size + 2 * kv_size) * self.qkv_bias
        mlp = 3 * hidden * inner + (2 * inner + hidden) * self.mlp_bias
        qk_norms = {QKNorm.NONE: 0, QKNorm.HEAD: 2 * self.head_dim, QKNorm.WHOLE: q_size + kv_size}
        norms = (4 if self.norms is Norms.AROUND else 2) * hidden + qk_norms[self.qk_norm]
        attention += hidden * self.output_bias + norms + self.heads * self.sinks
        feed_forward = sum(mlp if experts is None else experts.parameters(hidden) for experts in self.experts)
        embeddings = (self.vocab_held or self.vocab_size) * hidden * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * attention + feed_forward + hidden

    @property
    def computed(self) -> int:
        """Number of weights that a token is multiplied with: of experts only those that it chose."""
        hidden = self.hidden_size
        return self.parameters - sum(
            experts.parameters(hidden) - experts.computed(hidden) for experts in self.experts if experts
        )

    @property
    def has_experts(self) -> bool:
        """Whether any layer has."""
        return any(self.experts)

    @property
    def in_mxfp4(self) -> bool:
        """Whether the file has its experts so."""
        return any(experts.storage is Storage.MXFP4 for experts in self.experts if experts)

    @property
    def packed_experts(self) -> str | None:
        """What all experts are packed in, and kept; None: there are none, or some are kept in 16 bits."""
        forms = {self.packed_in(layer) for layer, experts in enumerate(self.experts) if experts}
        return forms.pop() if len(forms) == 1 else None

    def packed_in(self, layer: int) -> str | None:
        """What a layer's experts are packed in, and kept; None: there are none, or they are kept in 16 bits."""
        experts = self.experts[layer]
        if experts is None:
            return None
        if experts.storage is Storage.MXFP4:
            return Storage.MXFP4.value
        form = self.experts_format(_experts_prefix(layer, experts), experts)
        return form.name if form else None

    @property
    def matrices(self) -> int:
        """How many matrices the weights are: seven a layer, the embedding, and the head if it is its own."""
        return 7 * self.layers + (1 if self.tied_embeddings else 2)

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all weights where those that are not quantized take `itemsize` bytes a number."""
        saved = sum(self._saved_by_experts(layer, itemsize) for layer in range(self.layers))
        if quantization := self.quantization:
            for name, outputs, inputs in (each for group in self.linears() for each in group):
                if form := quantization.format_of(name):
                    saved += outputs * inputs * itemsize - form.kept_bytes(outputs, inputs)
        return self.parameters * itemsize - saved

    def _saved_by_experts(self, layer: int, itemsize: int) -> int:
        """Bytes of a layer's experts that are saved by keeping them packed."""
        experts, hidden = self.experts[layer], self.hidden_size
        if experts is None:
            return 0
        count, inner = experts.here, experts.inner
        numbers = 3 * count * inner * hidden
        if experts.storage is Storage.MXFP4:
            return numbers * itemsize - numbers // MXFP4_BLOCK * MXFP4_BLOCK_BYTES
        form = self.experts_format(_experts_prefix(layer, experts), experts)
        if form is None:
            return 0
        kept = form.expert_bytes(2 * inner, hidden, inner, inner) + form.expert_bytes(hidden, inner, hidden)
        return numbers * itemsize - count * kept

    def experts_format(self, prefix: str, experts: ExpertsConfig) -> WeightFormat | None:
        """How experts below this prefix, `model.layers.0.mlp.experts`, are quantized and kept; None: in 16 bits."""
        quantization, names = self.quantization, experts.names
        if quantization is None or experts.storage is not Storage.SEPARATE:
            return None
        if self.hidden_size % EXPERTS_STEP or experts.inner % EXPERTS_STEP:
            return None
        first, *others = (
            quantization.format_of(f"{prefix}.0.{name}") for name in (names.gate, names.up, names.down)
        )
        return first if all(each == first for each in others) else None

    def linears(self) -> Iterator[list[tuple[str, int, int]]]:
        """Linears in layers as files have them, by what is computed as one: name, outputs, inputs of each.

        Experts are no linears: see `experts_format`.
        """
        hidden = self.hidden_size
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        groups = [
            [
                ("self_attn.q_proj", q_size, hidden),
                ("self_attn.k_proj", kv_size, hidden),
                ("self_attn.v_proj", kv_size, hidden),
            ],
            [("self_attn.o_proj", hidden, q_size)],
        ]
        if self.packed:
            groups = [[("self_attn.qkv_proj", q_size + 2 * kv_size, hidden)], groups[1]]
        for layer, experts in enumerate(self.experts):
            prefix, inner = "mlp", self.intermediate_size
            if experts is not None:
                prefix, inner = f"{experts.names.block}.shared_experts", experts.shared_inner
            gate_up = [(f"{prefix}.gate_proj", inner, hidden), (f"{prefix}.up_proj", inner, hidden)]
            if self.packed:
                gate_up = [(f"{prefix}.gate_up_proj", 2 * inner, hidden)]
            mlp = [gate_up, [(f"{prefix}.down_proj", hidden, inner)]] if inner else []
            for group in (*groups, *mlp):
                yield [(f"{IN_LAYERS}{layer}.{name}", outputs, inputs) for name, outputs, inputs in group]

    def first_experts(self) -> Iterator[list[tuple[str, int, int]]]:
        """Linears of each layer's first expert, which stand for all: name, outputs, inputs of each."""
        for layer, experts in enumerate(self.experts):
            if experts is not None and experts.storage is Storage.SEPARATE:
                names, prefix = experts.names, f"{_experts_prefix(layer, experts)}.0"
                hidden, inner = self.hidden_size, experts.inner
                yield [(f"{prefix}.{names.gate}", inner, hidden), (f"{prefix}.{names.up}", inner, hidden)]
                yield [(f"{prefix}.{names.down}", hidden, inner)]

    def expert_linears(self) -> Iterator[list[str]]:
        """Routers, and linears of each layer's first expert, which stand for all; by what is stored in one format."""
        for layer, experts in enumerate(self.experts):
            if experts is not None and experts.storage is Storage.SEPARATE:
                yield [f"{IN_LAYERS}{layer}.{experts.names.block}.{experts.names.router}"]
        yield from ([name for name, _, _ in group] for group in self.first_experts())

    def at_context(self, context_len: int) -> ModelConfig:
        """The model in an engine whose longest request has so many tokens: longrope rotates by that."""
        return replace(self, ropes=tuple(rope and rope.at_context(context_len) for rope in self.ropes))


def _experts_prefix(layer: int, experts: ExpertsConfig) -> str:
    return f"{IN_LAYERS}{layer}.{experts.names.block}.experts"


def read_model_config(folder: Path) -> ModelConfig:
    """The `ModelConfig` of a model folder; `ModelError` names what is unsupported, missing or malformed."""
    config = read_config(folder)
    try:
        return parse_model_config(config)
    except ModelError:
        raise
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks {error}") from None
    except Exception as error:  # whatever a value of another type, or infinity, leads to
        raise ModelError(f"{folder / 'config.json'} is malformed: {error}") from None


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Turn the content of a `config.json` into a `ModelConfig`, refusing what is not supported."""
    config = text_half(config)
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    config = dict(family.defaults) | dict(config)
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    hidden_size = int(config["hidden_size"])
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    head_dim = int(config.get("head_dim") or hidden_size // heads)
    attention_bias = bool(config.get("attention_bias", False))
    kinds = _layer_kinds(family, config)
    ropes = read_ropes(config, kinds, head_dim, family.rope)

    def multiplier(name: str) -> float:
        return float(config.get(name, 1.0)) if family.multipliers else 1.0

    model = ModelConfig(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        layers=len(kinds),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_len=context_len_of(config, ropes),
        rms_norm_eps=float(config["rms_norm_eps"]),
        tied_embeddings=bool(config.get("tie_word_embeddings", family.tied_embeddings)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.qkv_bias is None and family.output_biased,
        mlp_bias=bool(config.get("mlp_bias", False)),
        windows=_windows(family, kinds, config),
        ropes=ropes,
        experts=family.experts(config, len(kinds)),
        attention_scale=_attention_scale(family, config, head_dim),
        qk_norm=family.qk_norm if config.get("use_qk_norm") or not family.qk_norm_switch else QKNorm.NONE,
        activation=family.activation,
        norms=family.norms,
        norm_offset=family.norm_offset,
        sinks=family.sinks,
        packed=family.packed,
        attention_cap=_cap(family.attention_capped, config.get("attn_logit_softcapping")),
        logits_cap=_cap(family.logits_capped, config.get("final_logit_softcapping")),
        embedding_scale=hidden_size**0.5 if family.scaled_embeddings else multiplier("embedding_multiplier"),
        residual_scale=multiplier("residual_multiplier"),
        logits_divisor=multiplier("logits_scaling"),
    )
    if quantization_of(config) in family.quantizations:
        return model
    names = [*([name for name, _, _ in group] for group in model.linears()), *model.expert_linears()]
    quantization = read_quantization(config, names)
    if quantization is not None:
        check_sizes(quantization, (*model.linears(), *model.first_experts()))
    return replace(model, quantization=quantization)


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The names of the classes that a `config.json` is for."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def supported_names() -> str:
    """The supported architectures as a person reads them: without what nearly all of their names end with."""
    short = {re.sub("For(CausalLM|ConditionalGeneration)$", "", name) for name in SUPPORTED_ARCHITECTURES}
    return ", ".join(sorted(short))


def _architecture(config: Mapping[str, Any]) -> str:
    supported = f"supported are {supported_names()}"
    names = architectures(config)
    if len(names) != 1 or names[0] not in FAMILIES:
        met = ", ".join(names) or f"none named (model_type {config.get('model_type')!r})"
        raise ModelError(f"unsupported architecture: {met}; {supported}")
    if (named := config.get("auto_map")) and not _is_familys(named, FAMILIES[names[0]]):
        raise ModelError(f"the model needs its own code (auto_map), which is never run; {supported}")
    if config.get("use_bidirectional_attention"):
        raise ModelError("unsupported attention: bidirectional; a decoder reads what came before")
    expected = FAMILIES[names[0]].activation_names
    activation = config.get("hidden_activation") or config.get("hidden_act") or expected[0]
    if activation not in expected:
        raise ModelError(f"unsupported activation: {activation}; supported is {expected[-1]}")
    return names[0]


def _is_familys(auto_map: object, family: Family) -> bool:
    """Whether the code that a file names computes what the family does. It is not run then either.

    Whoever saves a model that was loaded with its code writes the repository before it: `owner/name--module.Class`.
    """
    model = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, Mapping) else None
    return isinstance(model, str) and model.rpartition("--")[2] == family.own_code


def _layer_kinds(family: Family, config: Mapping[str, Any]) -> list[str]:
    layers = int(config["num_hidden_layers"])
    kinds = list(config.get("layer_types") or family.kinds(config, layers))
    if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise ModelError(f"unsupported layer types: {', '.join(unknown)}")
    if len(kinds) != layers:
        raise ModelError(f"layer_types names {len(kinds)} layers, the model has {layers}")
    return kinds


def _windows(family: Family, kinds: list[str], config: Mapping[str, Any]) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family.window_switch and not config.get("use_sliding_window", False):
        window = None
    return tuple(int(window) if window and kind == "sliding_attention" else None for kind in kinds)


def _attention_scale(family: Family, config: Mapping[str, Any], head_dim: int) -> float:
    """Gemma 2 and 3 divide by the root of their own number, Granite multiplies."""
    if family.multipliers:
        return float(config["attention_multiplier"])
    divisor = float(config.get("query_pre_attn_scalar") or head_dim)
    return 1.0 / math.sqrt(divisor)


def _cap(capped: bool, cap: float | None) -> float | None:
    return float(cap) if capped and cap else None


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """Every id that ends a sequence: of config.json, of generation_config.json, and of the tokenizer."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            ids = read_json(folder / name).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids] if ids is not None else [])
    return frozenset(int(token_id) for token_id in found) | _tokenizer_eos(folder)


def _tokenizer_eos(folder: Path) -> frozenset[int]:
    """The tokenizer's eos token ends a chat turn even where the model's own files name another."""
    if not ((folder / "tokenizer_config.json").exists() and (folder / "tokenizer.json").exists()):
        return frozenset()
    eos = read_json(folder / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    tokenizer = read_json(folder / "tokenizer.json", TOKENIZER_BYTES_MAX)
    added = {entry["content"]: int(entry["id"]) for entry in tokenizer.get("added_tokens", [])}
    return frozenset({added[text]}) if text in added else frozenset()
