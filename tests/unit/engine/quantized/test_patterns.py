"""Patterns of module names match what Python's regular expressions match, and none takes long."""

from __future__ import annotations

import re
import time

import pytest

from shared.engine.quantized.patterns import STEPS_MAX, NameMatch, NamePattern, NamesKept
from shared.primitives.errors import ModelError

MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.gate",
    "mlp.down_proj",
)
NAMES = [f"model.layers.{layer}.{module}" for layer in (0, 1, 9, 10, 11) for module in MODULES] + ["lm_head"]
PUBLISHED = (  # of checkpoints on the Hub
    r".*lm_head",
    r".*self_attn.*",
    r".*mlp.gate$",
    r".*mlp\.gate$",
    r"^lm_head$",
    r"model\.layers\.\d+\.mlp\.gate$",
    r"model.layers.[0-9]+.self_attn.*",
    r".*\.(q_proj|k_proj)$",
    r".*(gate|down)_proj",
    r"^model\.layers\.(?:0|1[01])\..*",
    r"vision_tower.*",
    r".*?mlp",
    r"lm",
    r"x*",
    r"model\.layers\.1\d?\.\w+",
    r"(model.layers.0.mlp.gate|lm_head)$",
)


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_a_pattern_matches_what_python_matches(pattern: str) -> None:
    found = [name for name in NAMES if NamePattern(pattern).ends(name)]
    assert found == [name for name in NAMES if re.match(pattern, name)]


UNREAD = (
    *(
        r"(.+)+#",
        r"((a{1000}){1000}){1000}",
        r"(a|b)*",
        r"a(",
        r"[a",
        "a\\",
        r"(?!x).*",
        r"(?=x)",
        r"*a",
        r"\b",
        r"a)",
    ),
    "(a|b)" * 7,
)


@pytest.mark.parametrize("pattern", UNREAD)
def test_what_is_not_read_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(ModelError, match="unsupported pattern of module names"):
        NamePattern(pattern)


def test_a_long_pattern_and_many_are_refused() -> None:
    with pytest.raises(ModelError, match="has 300 characters, at most 256"):
        NamePattern("a" * 300)
    with pytest.raises(ModelError, match="65 patterns of module names, at most 64"):
        NamesKept(["re:a"] * 65, NameMatch.WHOLE)
    with pytest.raises(ModelError, match="65,537 entries, at most 65,536"):
        NamesKept(["a"] * 65537, NameMatch.WHOLE)


def test_the_longest_search_takes_seconds_and_a_longer_one_is_refused() -> None:
    """In CPU seconds of this thread: patterns for which a backtracking search would never end."""
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(1024)]
    lengths = sum(map(len, names))
    pattern = "re:" + ".*" * 100 + "#"
    count = STEPS_MAX // (101 * lengths)
    began = time.thread_time()
    assert NamesKept([pattern] * count, NameMatch.WHOLE).among(names) == frozenset()
    assert time.thread_time() - began < 20
    with pytest.raises(ModelError, match="at most 10,000,000 are made"):
        NamesKept([pattern] * (count + 1), NameMatch.WHOLE).among(names)


def test_names_are_exact_but_for_transformers_lists() -> None:
    layer = "model.layers.1"
    assert NamesKept([f"{layer}.mlp"], NameMatch.WHOLE).among(NAMES) == frozenset()
    within = NamesKept([f"{layer}.mlp"], NameMatch.PREFIXES).among(NAMES)
    assert within == {f"{layer}.mlp.{part}" for part in ("gate_proj", "gate", "down_proj")}
    assert NamesKept(["mlp.gate"], NameMatch.PREFIXES).among(NAMES) == {
        f"model.layers.{number}.mlp.gate" for number in (0, 1, 9, 10, 11)
    }
    pattern = NamesKept(["model.layers.*.mlp.gate"], NameMatch.PREFIXES).among(NAMES)
    assert pattern == {f"model.layers.{number}.mlp.gate" for number in (0, 1, 9, 10, 11)}, "not gate_proj"
