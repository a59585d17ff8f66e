"""What an engine on CPU keeps of a model's weights: their bytes, which the KV pool has to leave, and words for them.

All is computed in float32. Compiled kernels keep matrices of 16 bits as the file has them, since nothing is lost and a
step reads half as much; torch's kernels keep float32, which takes twice the file's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shared.engine.checkpoint.dtypes import dtype_name
from shared.engine.checkpoint.experts_config import Storage
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.gguf.packed_file import PackedFile
from shared.engine.model.weights import Weights
from shared.engine.parts import LoadJob
from shared.engine.quantized.formats import IN_LAYERS


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Bytes, and words, of one model's weights."""

    nbytes: int
    words: str


def kept_weights(
    job: LoadJob, dtype: torch.dtype, packed: PackedFile | None, *, compiled: bool
) -> KeptWeights:
    """Weights that are computed with in `dtype`; `packed`: a GGUF file's own blocks, which are mapped from their file.

    `ModelError` for a weight that is missing.
    """
    shape, loose = job.shape, dtype_name(dtype)
    whole = shape.parameters * dtype.itemsize
    if not isinstance(shape, ModelConfig):
        return KeptWeights(whole, loose)
    if packed is not None:
        rest = max(0, shape.parameters - packed.parameters) * dtype.itemsize
        words = packed.kinds if packed.matrices == shape.matrices else f"{packed.kinds}+{loose}"
        return KeptWeights(packed.nbytes + rest, words)
    if not compiled and shape.tied_embeddings:  # torch's linear keeps a packed copy beside the embedding
        whole += shape.vocab_size * shape.hidden_size * dtype.itemsize
    if shape.quantization is not None:
        return KeptWeights(whole, f"{loose} of {shape.quantization.format.name}")
    narrow, saved = dict[str, None](), 0
    with Weights(job.folder) as weights:
        for stored, numbers in _matrices(shape, weights):
            if stored != dtype:
                narrow[dtype_name(stored)] = None
                saved += numbers * max(0, dtype.itemsize - stored.itemsize)
    stored_words = "+".join(narrow) + (" of mxfp4" if shape.in_mxfp4 else "")
    if not narrow:
        return KeptWeights(whole, loose)
    if compiled:
        return KeptWeights(whole - saved, f"{stored_words}, computed in {loose}")
    return KeptWeights(whole, f"{loose} of {stored_words}")


def _matrices(shape: ModelConfig, weights: Weights) -> Iterator[tuple[torch.dtype, int]]:
    """The type that matrices are kept in by compiled kernels, and how many numbers they have."""
    for name in ("model.embed_tokens",) if shape.tied_embeddings else ("model.embed_tokens", "lm_head"):
        yield weights.stored_dtype(f"{name}.weight"), shape.vocab_size * shape.hidden_size
    for name, outputs, inputs in (each for group in shape.linears() for each in group):
        yield weights.stored_dtype(f"{name}.weight"), outputs * inputs
    for layer, experts in enumerate(shape.experts):
        if experts is not None:
            prefix = f"{IN_LAYERS}{layer}.{experts.names.block}.experts"
            numbers = 3 * experts.routing.experts * experts.inner * shape.hidden_size
            if experts.storage is Storage.MXFP4:  # a few bits, times a power of two
                yield torch.bfloat16, numbers
            elif experts.storage is Storage.STACKED:
                yield weights.stored_dtype(f"{prefix}.gate_up_proj"), numbers
            else:
                yield weights.stored_dtype(f"{prefix}.0.{experts.names.gate}.weight"), numbers
