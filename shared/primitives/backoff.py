"""How long to wait before something that failed is tried again; pure, and the same wherever Segue tries again."""

from __future__ import annotations

DOUBLINGS_MAX = 64  # beyond any sensible bound, and far from the largest float


def backoff_seconds(failures: int, first: float, most: float) -> float:
    """The wait after this many failures in a row, the latest included: `first`, doubled by each further one.

    `first` and `most` are seconds. The wait is never longer than `most`; without a failure it is `first`.
    """
    doublings = min(max(failures - 1, 0), DOUBLINGS_MAX)
    return min(first * 2.0**doublings, most)
