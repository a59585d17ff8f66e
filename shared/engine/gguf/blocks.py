"""Takes the quantized blocks out of a GGUF file as they are, under the names that Hugging Face gives the weights.

Takes only matrices of the types that the CPU kernels expand in registers; all others stay float weights, which every
converted folder holds in any case. For the llama architecture (and Mistral) llama.cpp interleaves the rows of q and k
for its own rope. Rows are whole blocks, so restoring their order changes no quantized value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFReader, ReaderTensor, get_tensor_name_map
from torch import Tensor

from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.gguf.packing import QUANTIZED_KINDS, Kind, PackedWeight, pack_blocks


def quantized_weights(
    reader: GGUFReader, names: Iterable[str], config: ModelConfig
) -> dict[str, PackedWeight]:
    """Packed weights: those of `names` that the file holds in supported blocks."""
    architecture = str(reader.fields["general.architecture"].contents())
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    found = {}
    for name, stored_name in _stored_names(architecture, names, config.layers).items():
        tensor = tensors.get(stored_name)
        if tensor is None or tensor.tensor_type.name.lower() not in QUANTIZED_KINDS or len(tensor.shape) != 2:
            continue
        heads = _interleaved_heads(name, config) if architecture == "llama" else None
        found[name] = _packed(tensor, heads)
    return found


def dropped_tensors(reader: GGUFReader, names: Iterable[str], layers: int) -> list[str]:
    """Tensors of the file that are none of `names`, a model's by Hugging Face: biases it does not have, mostly."""
    architecture = str(reader.fields["general.architecture"].contents())
    known_names = get_tensor_name_map(_number(architecture), layers)
    known = {known_names.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    return [tensor.name for tensor in reader.tensors if tensor.name not in known]


def _stored_names(architecture: str, names: Iterable[str], layers: int) -> dict[str, str]:
    """GGUF's name of each weight that has one."""
    known_names = get_tensor_name_map(_number(architecture), layers)
    stored = {name: known_names.get_name(name, try_suffixes=(".weight",)) for name in names}
    return {name: stored_name for name, stored_name in stored.items() if stored_name}


def _number(architecture: str) -> MODEL_ARCH:
    return next(number for number, known in MODEL_ARCH_NAMES.items() if known == architecture)


def _interleaved_heads(name: str, config: ModelConfig) -> int | None:
    if name.endswith("q_proj.weight"):
        return config.heads
    return config.kv_heads if name.endswith("k_proj.weight") else None


def _packed(tensor: ReaderTensor, interleaved_heads: int | None) -> PackedWeight:
    inputs, outputs = (int(size) for size in tensor.shape)
    blocks = torch.from_numpy(tensor.data.copy())  # [outputs, bytes]; the mapped file itself is read-only
    if interleaved_heads:
        blocks = _separated(blocks, interleaved_heads)
    kind = cast(Kind, tensor.tensor_type.name.lower())
    return PackedWeight(kind, outputs, inputs, pack_blocks(kind, blocks))


def _separated(rows: Tensor, heads: int) -> Tensor:
    """Each head's rows from x0 y0 x1 y1 … to x0 x1 … y0 y1 …, where rope turns the pairs (x, y)."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
