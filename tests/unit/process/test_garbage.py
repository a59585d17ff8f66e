"""The garbage collector leaves what was loaded alone, and still finds cycles."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from shared.process.garbage import YOUNG_OBJECTS_OF_WORKER, spare_what_is_loaded

class Ring:
    def __init__(self):
        self.itself = self

loaded = [[] for _ in range(1000)]
garbage = weakref.ref(Ring())
spare_what_is_loaded(YOUNG_OBJECTS_OF_WORKER)
assert garbage() is None, "garbage was set aside"
assert gc.get_freeze_count() > 1000
assert not any(each is loaded for each in gc.get_objects()), "a collection looks at what was loaded"
later = weakref.ref(Ring())
kept = [[] for _ in range(YOUNG_OBJECTS_OF_WORKER + 1)]
assert later() is None, "a cycle is never found"
"""


def test_what_is_loaded_is_set_aside_and_later_cycles_are_found() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
