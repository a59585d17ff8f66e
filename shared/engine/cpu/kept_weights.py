"""What an engine on CPU keeps of a model's weights: their bytes, which the KV pool has to leave, and words for them.

All is computed in float32. Compiled kernels keep matrices of 16 bits as the file has them, since nothing is lost and a
step reads half as much; torch's kernels keep float32, which takes twice the file's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shared.engine.checkpoint.dtypes import dtype_name
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.gguf.packing import PackedFile
from shared.engine.model.weights import Weights
from shared.engine.parts import LoadJob


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Of one model."""

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
    if shape.in_mxfp4:
        return KeptWeights(whole, f"{loose} of mxfp4")
    if shape.quantization is not None:
        return KeptWeights(whole, f"{loose} of {shape.quantization.format.name}")
    narrow, saved = dict[str, None](), 0
    with Weights(job.folder) as weights:
        for name, outputs, inputs in _matrices(shape):
            stored = weights.stored_dtype(f"{name}.weight")
            if stored != dtype:
                narrow[dtype_name(stored)] = None
                saved += outputs * inputs * max(0, dtype.itemsize - stored.itemsize)
    if not narrow:
        return KeptWeights(whole, loose)
    stored_words = "+".join(narrow)
    if compiled:
        return KeptWeights(whole - saved, f"{stored_words}, computed in {loose}")
    return KeptWeights(whole, f"{loose} of {stored_words}")


def _matrices(shape: ModelConfig) -> Iterator[tuple[str, int, int]]:
    yield "model.embed_tokens", shape.vocab_size, shape.hidden_size
    if not shape.tied_embeddings:
        yield "lm_head", shape.vocab_size, shape.hidden_size
    for group in shape.linears():
        yield from group
