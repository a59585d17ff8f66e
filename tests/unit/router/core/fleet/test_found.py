"""What own workers had of prompts that nobody was known to have: shares by model and role, of a bounded number."""

from __future__ import annotations

import pytest

from router.core.fleet.prefix_index import MODELS_MAX, Found, PrefixIndex


def test_what_was_found_is_forgotten_where_models_come_and_go() -> None:
    index = PrefixIndex(8)
    for number in range(MODELS_MAX + 1):
        for _ in range(150):
            index.looked(f"m{number}", "decode", found=True, share=0.8)
    assert index.found("m0", "decode") == Found(), "nothing is known of it any more"
    assert index.found("m1", "prefill") == Found(), "the other role is another one"
    assert index.found("m1", "decode").prompts == pytest.approx(1.0, abs=0.05)
    assert index.found("m1", "decode").tokens == pytest.approx(0.8, abs=0.05)
