"""Counts the bytes of tensors that are alive while operators run, as an allocator would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """As a context: `most` is the largest sum of what was made in it and was alive at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        operator: Callable[..., Any],
        types: Any,
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and count what it made."""
        given = {_key(each) for each in tree_leaves((arguments, named)) if isinstance(each, Tensor)}
        made = operator(*arguments, **(named or {}))
        self._alive = {
            key: each
            for key, each in self._alive.items()
            if not each[0].expired()  # type: ignore[no-untyped-call]
        }
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and _key(each) not in given:
                storage = each.untyped_storage()
                alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._alive[_key(each)] = (alive, storage.nbytes())
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return made


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
