"""One bound: what is met beyond it, what it costs at most, and the test that goes there.

`python -m tests.tidy.reference` writes all of them into the reference; defaults come from the code. The bounds are in
`bounds`, `bounds_of_answers`, `bounds_of_resuming` and `bounds_of_messages` (what clients take from a router),
`bounds_of_links` (strangers and peers) and `bounds_of_workers`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from router.config import RouterConfig
from shared.process.settings import Settings, flag_of

ROUTER_CONFIG = f"{RouterConfig.__module__}.{RouterConfig.__name__}"


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound. `place` is the module of a constant, or the class of a setting."""

    name: str
    beyond: str  # what is met there
    worst: str  # bytes and seconds that it costs at most
    test: str  # path::function, and the case's id if it has one
    place: str = ROUTER_CONFIG

    @property
    def title(self) -> str:
        """The flag of a setting, or the constant and where it is."""
        owner = self._owner() if self._of_class else None  # a constant's module may take seconds to import
        is_setting = isinstance(owner, type) and issubclass(owner, Settings)
        return flag_of(self.name) if is_setting else f"{self.place}.{self.name}"

    @property
    def default(self) -> str:
        """As the code has it."""
        owner = self._owner()
        if not isinstance(owner, type):
            return str(getattr(owner, self.name))
        if issubclass(owner, Settings):
            return str(owner.model_fields[self.name].default)
        return str(owner.__dataclass_fields__[self.name].default)  # type: ignore[attr-defined]

    @property
    def _of_class(self) -> bool:
        return self.place.rpartition(".")[2][0].isupper()

    def _owner(self) -> object:
        if not self._of_class:
            return importlib.import_module(self.place)
        module, _, name = self.place.rpartition(".")
        return getattr(importlib.import_module(module), name)
