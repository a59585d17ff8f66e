"""Deadlines fall due once, in order, at the time set last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.requests.deadlines import Deadlines


def test_a_deadline_set_again_moves_and_one_cleared_meanwhile_does_not_come() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("a", 2.5)):
        deadlines.set(name, seconds)
    assert deadlines.next() == 2.0
    due = []
    for name in deadlines.due(3.0):
        due.append(name)
        deadlines.clear("c")
    assert due == ["b", "a"]
    assert deadlines.next() is None


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 50)), max_size=400))
def test_what_is_due_is_what_a_plain_dict_would_say(writes: list[tuple[int, int | None]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    plain: dict[int, float] = {}
    for name, seconds in writes:
        if seconds is None:
            deadlines.clear(name)
            plain.pop(name, None)
        else:
            deadlines.set(name, float(seconds))
            plain[name] = float(seconds)
        assert deadlines.next() == min(plain.values(), default=None)
        assert len(deadlines) == len(plain)
    order = [plain[name] for name in deadlines.due(25.0)]
    assert order == sorted(seconds for seconds in plain.values() if seconds <= 25.0)
