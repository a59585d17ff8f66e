"""Raises where torch would wait for a device, on machines that have none.

Work of a device must neither read a value nor have a shape that depends on one: with CUDA both wait for all that was
launched, and neither can be captured in a graph. Modes of torch belong to a thread: enter where the work runs. What the
host plans from its own tensors does not belong inside, as on CPU nobody can tell whose a tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_WAITING = {
    aten._local_scalar_dense,  # item(), bool(), int(), float()
    aten._unique2,
    aten.allclose,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.item,
    aten.masked_select,
    aten.nonzero,
    aten.nonzero_numpy,
    aten.unique_consecutive,
    aten.unique_dim,
}
_INDEXING = {aten.index, aten.index_put, aten.index_put_}
_REPEATS = {aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor}
# What operators do not show on CPU: there, these read memory that the host has anyway.
_READING = {Tensor.cpu, Tensor.numpy, Tensor.tolist, torch.as_tensor, torch.from_numpy, torch.tensor}


class HostSyncError(AssertionError):
    """Work of a device that would wait for it."""


@contextmanager
def no_sync() -> Iterator[None]:
    """Raise `HostSyncError` for what waits for a device, or copies from memory that is not pinned."""
    with _Functions(), _Operators():  # type: ignore[no-untyped-call]
        yield


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READING:
            raise HostSyncError(f"{func.__name__} moves values between host and device")
        return func(*args, **kwargs or {})


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _WAITING or func is aten.where.default:
            raise HostSyncError(f"{func} needs a value on the host")
        if func.overloadpacket in _INDEXING and any(_is_mask(index) for index in args[1]):
            raise HostSyncError(f"{func} by a mask has a shape that depends on values: use torch.where")
        if func in _REPEATS and kwargs.get("output_size") is None:
            raise HostSyncError(f"{func} without output_size has a shape that depends on values")
        return func(*args, **kwargs)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)
