"""`docs/models.md` is what the code says of popular models."""

from __future__ import annotations

import re

from shared.engine.checkpoint.model_config import architectures
from tests.tidy.models_page import FALLBACK, OWN, PAGE, REFUSED, page
from tests.unit.engine.checkpoint.popular_models import POPULAR


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make docs"


def test_sixty_models_each_have_one_row() -> None:
    rows = re.findall(r"^\| (\S+/\S+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(POPULAR) == 60
    assert sorted(rows) == sorted(POPULAR)
    assert all(len(architectures(config)) == 1 for config in POPULAR.values())


def test_no_model_is_refused_for_a_file_that_cannot_be_read() -> None:
    """What no code foresaw ends in such a sentence, not in a traceback: then the code is wrong, or our copy."""
    text = page()
    places = [text.index(head.strip().splitlines()[0]) for head in (OWN, FALLBACK, REFUSED)]
    assert places == sorted(places)
    assert not re.search(r"cannot be read|malformed|lacks |/tmp", text)
