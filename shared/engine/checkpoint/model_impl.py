"""Whose code computes the model of a folder: the dense decoder, or that of transformers. Knows no torch."""

from __future__ import annotations

from pathlib import Path

from shared.engine.checkpoint.model_config import (
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
    architectures,
    read_model_config,
    supported_names,
)
from shared.engine.checkpoint.transformers_config import FallbackConfig, read_fallback_config
from shared.engine.config import ModelImpl
from shared.limits.model_files import read_config as read_config_file
from shared.primitives.errors import ModelError


def read_config(folder: Path, impl: ModelImpl = "auto") -> ModelConfig | FallbackConfig:
    """What computes the model of a folder, and its shape; `ModelError` names what is unsupported.

    auto: transformers for an architecture that is no family's, the dense decoder for all others.
    """
    if impl == "transformers":
        return read_fallback_config(folder)
    names = architectures(read_config_file(folder))
    if impl == "segue" or any(name in SUPPORTED_ARCHITECTURES for name in names):
        return read_model_config(folder)
    try:
        return read_fallback_config(folder)
    except ModelError as error:
        raise ModelError(
            f"unsupported model: {error}; supported are {supported_names()}, and what transformers can"
        ) from None
