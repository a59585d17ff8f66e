"""No property is judged by the time that an example takes: machines differ, and other work goes on beside the tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
