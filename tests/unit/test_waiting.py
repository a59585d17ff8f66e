"""How long "soon" is on this machine: the seconds that were named, or more on a slow one, but never without bound."""

from __future__ import annotations

import pytest

from tests import waiting


def test_a_fast_machine_gets_no_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WORK_SECONDS", 1000.0)
    assert waiting.slowness.__wrapped__() == 1.0


def test_a_very_slow_machine_gets_at_most_six_times_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WORK_SECONDS", 1e-9)
    assert waiting.slowness.__wrapped__() == 6.0


def test_the_machine_is_measured_once_for_all_promises() -> None:
    assert waiting.soon(2) == 2 * waiting.soon(1) >= 2
