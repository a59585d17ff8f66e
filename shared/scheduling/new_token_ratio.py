"""How much output will come: the guess that decides how many requests decode at a time.

It knows only numbers, no request and no pool. The rule and its constants are SGLang's (schedule_policy.py).
"""

from __future__ import annotations

from collections.abc import Sequence


class NewTokenRatio:
    """The share of the output still allowed that requests are expected to use: a congestion window for KV memory.

    Falls linearly while all goes well, to `min_factor` of its start over `decay_steps` decode steps, and jumps up
    when a retraction proves it too low.
    """

    def __init__(
        self,
        *,
        init: float,
        conservativeness: float,
        min_factor: float,
        decay_steps: int,
        headroom_steps: int,
    ):
        self._headroom_steps = headroom_steps  # decode steps that fit after a retraction
        self._init = min(1.0, init * conservativeness)
        self._least = self._init * min_factor
        self._decay = (self._init - self._least) / decay_steps
        self.value = self._init

    def decay(self) -> None:
        """A decode step went well."""
        self.value = max(self._least, self.value - self._decay)

    def after_retraction(self, output_lens: Sequence[int], max_new_tokens: Sequence[int]) -> None:
        """Set to what the requests that stayed have used, and will after the steps that now fit."""
        used = sum(output_lens) + self._headroom_steps * len(output_lens)
        self.value = min(1.0, used / (sum(max_new_tokens) + 1))

    def reset(self) -> None:
        """No request is left: start over."""
        self.value = self._init
