"""Tiny GGUF files with random weights, stored the way llama.cpp's converter stores them.

The weights are of every sort that a real file mixes: 4-bit and 8-bit blocks, and matrices that have to stay float
since their inputs are no whole blocks. The vocabulary fills no whole panel of outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from shared.engine.gguf.packing import Kind
from tests.unit.engine.cpu.random_blocks import even_rows

Floats = NDArray[np.float32]

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 2, 64, 80, 4, 2
_TOKENS = [*sorted(ByteLevel.alphabet()), "th", "<s>", "</s>"]
_TYPES = {
    "token_embd": Type.Q8_0,
    "attn_q": Type.Q4_1,
    "attn_k": Type.Q4_0,
    "attn_v": Type.Q8_0,
    "attn_output": Type.Q4_0,
    "ffn_gate": Type.Q4_1,
    "ffn_up": Type.F16,
    "output": Type.Q4_1,
}
_K_QUANTS = _TYPES | {  # as in a file of Q4_K_M, with Q5_K beside them
    "token_embd": Type.Q4_K,
    "attn_q": Type.Q4_K,
    "attn_k": Type.Q5_K,
    "attn_v": Type.Q6_K,
    "attn_output": Type.Q5_0,
    "ffn_gate": Type.Q5_1,
    "output": Type.Q6_K,
}
_SIZES_OF_K_QUANTS = 256  # hidden


def _names(hidden: int) -> dict[str, tuple[str, int, int]]:
    head_dim = hidden // HEADS
    return {
        "self_attn.q_proj": ("attn_q", HEADS * head_dim, hidden),
        "self_attn.k_proj": ("attn_k", KV_HEADS * head_dim, hidden),
        "self_attn.v_proj": ("attn_v", KV_HEADS * head_dim, hidden),
        "self_attn.o_proj": ("attn_output", hidden, HEADS * head_dim),
        "mlp.gate_proj": ("ffn_gate", INNER, hidden),
        "mlp.up_proj": ("ffn_up", INNER, hidden),
        "mlp.down_proj": ("ffn_down", hidden, INNER),
    }


def write_tiny_gguf(
    path: Path,
    architecture: str,
    kind: Type | None = None,
    *,
    k_quants: bool = False,
    describe: Callable[[GGUFWriter], None] | None = None,
) -> dict[str, Floats]:
    """Write a model of `architecture`; returns what its matrices are to be, by Hugging Face's names.

    `kind`: of all matrices whose inputs are whole blocks; None for a mixture, of K-quants if `k_quants`. `describe`
    adds the tokenizer, of as many tokens as the byte-level one that is there without it, and whatever else.
    """
    mixture, hidden = (_K_QUANTS, _SIZES_OF_K_QUANTS) if k_quants else (_TYPES, HIDDEN)
    kinds = mixture if kind is None else dict.fromkeys(_TYPES, kind)
    writer = GGUFWriter(path, architecture)
    _describe(writer, hidden)
    (describe or byte_level)(writer)
    random = np.random.default_rng(23)
    matrices: dict[str, Floats] = {}

    def add(name: str, stored_name: str, outputs: int, inputs: int) -> None:
        kind = kinds.get(stored_name.split(".")[-1], Type.F32)
        stored = _stored(kind, outputs, inputs, random)
        matrices[name] = dequantize(stored, kind)  # by rows, so their order does not matter
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stored_name.split(".")[-1])
        rows = _interleaved(stored, heads) if architecture == "llama" and heads else stored
        writer.add_tensor(f"{stored_name}.weight", rows, raw_dtype=kind)

    add("model.embed_tokens.weight", "token_embd", len(_TOKENS), hidden)
    for layer in range(LAYERS):
        for name, (stored_name, outputs, inputs) in _names(hidden).items():
            add(f"model.layers.{layer}.{name}.weight", f"blk.{layer}.{stored_name}", outputs, inputs)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
        if architecture == "qwen2":
            for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                writer.add_tensor(
                    f"blk.{layer}.attn_{part}.bias", np.ones(heads * hidden // HEADS, np.float32)
                )
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    add("lm_head.weight", "output", len(_TOKENS), hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices


def _stored(kind: Type, outputs: int, inputs: int, random: np.random.Generator) -> NDArray[Any]:
    """A random matrix as a file holds it. The gguf package writes no K-quants: their blocks are random themselves."""
    if kind.name.endswith("_K"):
        seeded = torch.Generator().manual_seed(int(random.integers(2**31)))
        return even_rows(cast(Kind, kind.name.lower()), outputs, inputs, seeded).numpy()
    return quantize(random.standard_normal((outputs, inputs), dtype=np.float32), kind)


def _interleaved(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    outputs, size = rows.shape
    return rows.reshape(heads, 2, outputs // heads // 2, size).swapaxes(1, 2).reshape(rows.shape)


def _describe(writer: GGUFWriter, hidden: int) -> None:
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(_TOKENS))


def byte_level(writer: GGUFWriter, unmerged: str = _TOKENS[0]) -> None:
    """Give a file the tokenizer of bytes, with a token that is no merge of others in the place of its first."""
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([unmerged, *_TOKENS[1:]])
    writer.add_token_merges(["t h"])
    writer.add_token_types([1] * (len(_TOKENS) - 2) + [3, 3])
    writer.add_bos_token_id(len(_TOKENS) - 2)
    writer.add_eos_token_id(len(_TOKENS) - 1)


def pieces(writer: GGUFWriter) -> None:
    """Give a file a tokenizer as SentencePiece's, without merges: they follow from the scores."""
    words = ["▁", *"the", "he", "▁t", "▁the"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(len(_TOKENS) - 3 - len(words)))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + words)
    writer.add_token_scores([0.0] * len(tokens) + [-float(place) for place in range(len(words))])
    writer.add_token_types([2, 3, 3] + [6] * (len(tokens) - 3) + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
