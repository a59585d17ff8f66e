"""Python's garbage collector, kept out of the way of requests.

What a process has loaded when it becomes ready lives as long as the process. A full collection would look at all of it
again: 0.1 s in a worker, whose device waits meanwhile. So it is set aside.
"""

from __future__ import annotations

import gc

# Objects of a worker that are made and not freed until the next look at them; Python's own is 700. What a scheduler
# gives up ends with its last reference. At a router it may not: a refused request or a closed connection can leave a
# cycle with a prompt in it, and is found early.
YOUNG_OBJECTS_OF_WORKER = 50_000


def spare_what_is_loaded(young_objects: int = 0) -> None:
    """Call once, when all that lives as long as the process is loaded. `young_objects` 0: Python's own threshold."""
    gc.collect()
    gc.freeze()
    if young_objects:
        _, *older = gc.get_threshold()
        gc.set_threshold(young_objects, *older)
