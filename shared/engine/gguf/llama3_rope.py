"""Llama 3.1's stretched rotation, which a GGUF file holds as one divisor for each frequency.

llama.cpp's converter computes the divisors of the numbers in `config.json` and writes them in their place. All models
of Llama 3.1 to 3.3 differ in one of these numbers alone, which is the largest divisor; so the numbers are known again,
and are taken only if they give the file's divisors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shared.engine.checkpoint.rope_config import Llama3Scaling, Rope
from shared.engine.model.rope import frequencies
from shared.primitives.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

DIVISORS = "rope_freqs.weight"
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # of all these models
_RELATIVE_GAP_MAX = 1e-4


def rope_parameters(reader: GGUFReader) -> dict[str, object] | None:
    """The scaling in a file in the words of `config.json`; None: it has none. `ModelError` if it is another one."""
    tensor = next((tensor for tensor in reader.tensors if tensor.name == DIVISORS), None)
    if tensor is None:
        return None
    divisors = torch.from_numpy(tensor.data.copy()).float().flatten()
    architecture = reader.fields["general.architecture"].contents()
    theta = reader.fields.get(f"{architecture}.rope.freq_base")
    plain = Rope(float(theta.contents()) if theta else 10_000.0, 2 * len(divisors))
    factor = round(float(divisors.max()), 4)
    stretched = Rope(plain.theta, plain.rotary_dim, Llama3Scaling(factor, _LOW, _HIGH, _ORIGINAL))
    expected = frequencies(plain)[0] / frequencies(stretched)[0]
    if not torch.allclose(divisors, expected, rtol=_RELATIVE_GAP_MAX, atol=0.0):
        raise ModelError(
            f"unsupported in GGUF files: scaled rope ({DIVISORS} other than Llama 3's); use the model's safetensors"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }
