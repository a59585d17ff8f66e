"""The decoder by compiled kernels: one call a step, from token ids to logits.

Every result is one chain of sums in a fixed order, so a row has the same bits in any batch, on any number of threads,
and with narrow weights the bits of the same numbers in float32.
"""

from __future__ import annotations

import weakref
from ctypes import byref, c_void_p

import torch
from torch import Tensor

from shared.engine.attention.protocol import PagedBatch
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.cpu.native_weights import NativeWeights, StoredWeights
from shared.engine.model.rope import cos_sin_table
from shared.engine.model.weights import OnProgress
from shared.engine.native import kernels
from shared.engine.native.kernels import Kernels
from shared.primitives.errors import ConfigError, InvariantError

_PAGE_SIZES = (16, 32, 64, 128)  # whole vectors of keys, whole pages in a block of attention


class NativeDecoder:
    """`Model` by compiled kernels over a `KVCache` in host memory."""

    def __init__(
        self,
        library: Kernels,
        stored: StoredWeights,
        cache: KVCache,
        *,
        context_len: int,
        threads: int,
        on_progress: OnProgress,
    ) -> None:
        """Pack or map all weights; `ModelError` if one is missing or misshapen, `ConfigError` for the page size."""
        if cache.page_size not in _PAGE_SIZES:
            allowed = ", ".join(map(str, _PAGE_SIZES))
            raise ConfigError(
                f"page_size must be one of {allowed} for the CPU kernels, got {cache.page_size}"
            )
        self._kernels = library
        self._config = config = stored.config
        self._cache = cache
        self._context_len = context_len
        tables = {rope: cos_sin_table(rope, context_len) for rope in set(config.ropes) if rope}
        self._weights = NativeWeights(stored, tables)
        layers = (kernels.NativeLayer * config.layers)()
        for number in range(config.layers):
            layers[number] = self._weights.layer(number)
            on_progress("loading weights", (number + 1) / (config.layers + 1))
        shape = self._weights.shape(cache)
        self._decoder = library.decoder_new(byref(shape), layers, config.layers, threads)
        if self._decoder is None:
            raise ConfigError(f"{threads} threads cannot be started: ask for fewer")
        ending = weakref.finalize(self, library.decoder_delete, self._decoder)  # ends its threads
        ending.atexit = False  # at exit the forward thread may still compute; the process ends all threads
        on_progress("loading weights", 1.0)

    @property
    def layers_done(self) -> int:
        """See `Model`."""
        return int(self._kernels.decoder_layers_done(self._decoder))

    def forward(self, token_ids: Tensor, batch: PagedBatch, sampled_rows: Tensor) -> Tensor:
        """See `Model`."""
        self._check(token_ids, batch, sampled_rows)
        logits = torch.empty(len(sampled_rows), self._config.vocab_size)
        native = kernels.NativeBatch(
            rows=len(token_ids),
            requests=len(batch.kv_last_page_len),
            sampled=len(sampled_rows),
            token_ids=token_ids.data_ptr(),
            qo_indptr=batch.qo_indptr.data_ptr(),
            kv_indptr=batch.kv_indptr.data_ptr(),
            kv_indices=batch.kv_indices.data_ptr(),
            batch_indices=batch.batch_indices.data_ptr(),
            positions=batch.positions.data_ptr(),
            sampled_rows=sampled_rows.data_ptr(),
        )
        if self._kernels.decoder_forward(self._decoder, byref(native), c_void_p(logits.data_ptr())):
            raise MemoryError(f"no memory for a step of {len(token_ids)} tokens")
        return logits

    def _check(self, token_ids: Tensor, batch: PagedBatch, sampled_rows: Tensor) -> None:
        """The kernels check no bounds: an index out of bounds would read or write other memory."""
        assert batch.page_size == self._cache.page_size
        longs = (token_ids, sampled_rows)
        ints = (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.batch_indices, batch.positions)
        for dtype, tensors in ((torch.int64, longs), (torch.int32, ints)):
            assert all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)
        for what, found, end in (
            ("token", token_ids, self._config.vocab_size),
            ("page", batch.kv_indices, self._cache.pages),
            ("position", batch.positions, self._context_len),
            ("sampled row", sampled_rows, len(token_ids)),
        ):
            if len(found) and not 0 <= int(found.min()) <= int(found.max()) < end:
                raise InvariantError(
                    f"{what} {int(found.min())} or {int(found.max())} is not in 0 … {end - 1}"
                )
        if not bool((sampled_rows.diff() > 0).all()):
            raise InvariantError(f"sampled rows {sampled_rows.tolist()} do not ascend")
