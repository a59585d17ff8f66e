"""The compiled kernels as Python sees them: the structs of the C interface, field by field, and its functions.

ctypes releases the interpreter's lock during a call, so the scheduler runs while a forward pass computes.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

from shared.engine.native.build import BuildError


class NativeMatrix(Structure):
    """`Matrix` of gemm.h."""

    _fields_ = (
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("panels", c_void_p),
        ("bias", c_void_p),
    )


class NativeCache(Structure):
    """`Cache` of attention.h."""

    _fields_ = (
        ("pages", c_void_p),
        ("type", c_int32),
        ("layers", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page_size", c_int32),
    )


class NativeBatch(Structure):
    """`Batch` of attention.h."""

    _fields_ = (
        ("rows", c_int32),
        ("requests", c_int32),
        ("sampled", c_int32),
        ("token_ids", c_void_p),
        ("qo_indptr", c_void_p),
        ("kv_indptr", c_void_p),
        ("kv_indices", c_void_p),
        ("batch_indices", c_void_p),
        ("positions", c_void_p),
        ("sampled_rows", c_void_p),
    )


class NativeShape(Structure):
    """`SegueShape` of decoder.cpp."""

    _fields_ = (
        ("hidden", c_int32),
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("rotary_dim", c_int32),
        ("gelu", c_int32),
        ("whole_qk_norm", c_int32),
        ("epsilon", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("logits_divisor", c_float),
        ("logits_cap", c_float),
        ("attention_scale", c_float),
        ("attention_cap", c_float),
        ("cache", NativeCache),
        ("embedding", NativeMatrix),
        ("head", NativeMatrix),
        ("norm", c_void_p),
    )


class NativeRouting(Structure):
    """`Routing` of experts.h."""

    _fields_ = (
        ("experts", c_int32),
        ("chosen", c_int32),
        ("groups", c_int32),
        ("groups_chosen", c_int32),
        ("sigmoid", c_int32),
        ("normalized", c_int32),
        ("scale", c_float),
        ("correction", c_void_p),
    )


class NativeExperts(Structure):
    """`Experts` of experts.h."""

    _fields_ = (
        ("routing", NativeRouting),
        ("inner", c_int32),
        ("slope", c_float),
        ("limit", c_float),
        ("router", NativeMatrix),
        ("gate_up", c_void_p),
        ("down", c_void_p),
    )


class NativeLayer(Structure):
    """`SegueLayer` of decoder.cpp."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("sinks", c_void_p),
        ("qkv", NativeMatrix * 3),
        ("output", NativeMatrix),
        ("gate_up", NativeMatrix * 2),
        ("down", NativeMatrix),
        ("experts", NativeExperts),
        ("window", c_int32),
    )


class Kernels:
    """The functions of a compiled library."""

    def __init__(self, library: Path) -> None:
        """`BuildError` for a library that cannot be loaded, or whose structs are not these."""
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            raise BuildError(f"{library} cannot be loaded: {error}") from None
        structs = (NativeMatrix, NativeCache, NativeBatch, NativeExperts, NativeShape, NativeLayer)
        for number, struct in enumerate(structs):
            if loaded.segue_size_of(number) != ctypes.sizeof(struct):
                raise BuildError(f"{library} has another {struct.__name__} than this version")
        self.decoder_new = loaded.segue_decoder_new
        self.decoder_new.argtypes = (POINTER(NativeShape), POINTER(NativeLayer), c_int32, c_int32)
        self.decoder_new.restype = c_void_p
        self.decoder_delete = loaded.segue_decoder_delete
        self.decoder_delete.argtypes = (c_void_p,)
        self.decoder_delete.restype = None
        self.decoder_forward = loaded.segue_decoder_forward
        self.decoder_forward.argtypes = (c_void_p, POINTER(NativeBatch), c_void_p)
        self.decoder_forward.restype = c_int32
        self.decoder_layers_done = loaded.segue_decoder_layers_done
        self.decoder_layers_done.argtypes = (c_void_p,)
        self.decoder_layers_done.restype = c_int64
        self.logprobs = loaded.segue_logprobs
        self.logprobs.argtypes = (c_void_p, c_int32, c_int32, c_int32, *(c_void_p,) * 4)
        self.logprobs.restype = c_int32
        self.choose_experts = loaded.segue_choose_experts  # of tests
        self.choose_experts.argtypes = (POINTER(NativeRouting), c_void_p, c_int32, c_void_p, c_void_p)
        self.choose_experts.restype = None
        self.gemm = loaded.segue_gemm  # of the micro-benchmark
        self.gemm.argtypes = (c_void_p, POINTER(NativeMatrix), c_void_p, c_int32, c_void_p)
        self.gemm.restype = None
