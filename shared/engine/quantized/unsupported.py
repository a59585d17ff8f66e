"""The sentence that refuses what is not computed, before a weight is read."""

from __future__ import annotations

from shared.primitives.errors import ModelError

SUPPORTED = (
    "FP8 (e4m3, symmetric) with a scale for each channel, tensor or block of 128 x 128, from compressed-tensors "
    "(float-quantized) or fp8; 4-bit integers in groups, from awq, gptq or compressed-tensors "
    "(pack-quantized); mxfp4 of gpt-oss; unquantized safetensors, and GGUF"
)


def refused(what: str) -> ModelError:
    """Names what a file says of its weights, and what there is instead."""
    return ModelError(f"unsupported quantization: {what}; supported are {SUPPORTED}")
