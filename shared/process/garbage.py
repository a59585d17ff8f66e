"""Python's garbage collector, kept out of the way of requests.

What a process has loaded when it becomes ready lives as long as the process. A full collection would look at all of it
again: 0.1 s in a worker, whose device waits meanwhile. So it is set aside. Requests make few cycles; what they hold
ends with its last reference, so young objects need a look seldom.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 50_000  # that are made and not freed until the next look at them; Python's own is 700


def spare_what_is_loaded() -> None:
    """Call once, when all that lives as long as the process is loaded."""
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *older)
