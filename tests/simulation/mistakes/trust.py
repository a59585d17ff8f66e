"""Mistakes in what a worker believes: see `mutations`."""

from __future__ import annotations

from typing import Any

from tests.simulation.mistakes.mutation import Instead, Mistakes, gives


def _counted_nonces() -> Instead:
    last: dict[Any, int] = {}

    def open_lease(_: Any, words: Any, lease: int, pages: Any) -> int:
        last[words] = last.get(words, len(last) << 32) + 1
        words.write(lease, last[words], pages)
        return last[words]

    return {"a lease begins": open_lease}


def _told_is_shown(tell: Any, grants: Any, shown: Any, lease: int) -> Any:
    shown[lease] = grants.read(lease)
    return tell(grants, shown, lease)


MISTAKES: dict[str, Mistakes] = {
    "trust": {
        "a worker computes whatever tokens and parameters it is sent": {
            "decode checks a command": gives(""),
            "prefill checks a command": gives(""),
        },
        "a worker reads whatever a baton names": {"decode checks a baton": gives("")},
        "a lease opens every page": {"a lease covers pages": gives(True)},
        "a lease opens all but its last page": {
            "a lease is granted": lambda write, grants, lease, nonce, pages: write(
                grants, lease, nonce, pages[:-1]
            )
        },
        "a word that was told opens the pages": {
            "a reader is told a word": lambda _, grants, _shown, lease: grants.read(lease)
        },
        "whoever was told a word counts as one that has shown it": {
            "a reader is told a word": _told_is_shown
        },
        "an older reader is told of no lease": {"a reader is told a word": gives(0)},
        "the next nonce can be computed": _counted_nonces,
        "a lease whose word was told holds for a reader that got no page": {
            "a lease holds for a reader": lambda _, grants, _shown, lease, nonce: grants.read(lease) == nonce
        },
    },
}
