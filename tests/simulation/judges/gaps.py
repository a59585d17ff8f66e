"""The oracle for the gap before a second token: its parts, as a router tells them, are what the client has seen."""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulation.judges.fairness import JudgedRouterCore

ROUNDING = 0.01  # milliseconds: each part is told with three digits


class JudgedGaps:
    """When the clients of one router had their first tokens, in seconds."""

    def __init__(self, core: JudgedRouterCore):
        self._core = core
        self._first: dict[str, float] = {}

    def tokens(self, rid: str, index: int, shown: Mapping[str, object], now: float) -> None:
        """A client gets tokens, and /debug shows this of its request."""
        if index == 0:
            self._first[rid] = now
        if index != 1:
            return
        gap, parts = 1e3 * (now - self._first[rid]), shown["second_token_milliseconds"]
        assert isinstance(parts, dict)
        if parts:
            assert min(parts.values()) >= 0, f"{rid}: {parts}"
            assert abs(sum(parts.values()) - gap) < ROUNDING, f"{rid}: {parts} of a gap of {gap} ms"
            self._core.judged["the parts of a gap are the gap"] += 1
            self._core.judged["a request was in the queue for decode"] += parts["queue"] > 0
