"""How many tokens of a prompt a step may take beside rows that decode, so that these get their next token in time.

    bound ├── d(rows) ──┼─ f ─┼─ e0 · c + e1 · positions ─┤      c tokens, in whole pages

Seconds bound the time between two tokens, and a number of tokens does not: the same chunk costs more the further back
in a prompt it lies.
"""

from __future__ import annotations

import math

from shared.scheduling.step_cost import StepCost


def chunk_tokens(
    cost: StepCost, *, rows: int, position: int, bound_seconds: float, page_size: int, tokens_max: int
) -> int:
    """Tokens from `position` on that fit a step of `bound_seconds` beside `rows` of DECODE.

    They end with a page, and are at most `tokens_max`. The rest of one page always fits, so that a prompt goes on
    whatever it costs. While no step has told what EXTEND costs, no more than that fits.
    """
    page_end = position // page_size * page_size + page_size
    if (extend := cost.extend) is None:
        return page_end - position
    left = bound_seconds - cost.decode_seconds(rows) - extend.fixed
    if left <= 0:
        return page_end - position
    # left = (token + position cost at the start) · c + position cost / 2 · c²
    linear = extend.token + extend.position * (position - 0.5)
    divisor = linear + math.sqrt(max(0.0, linear * linear + 2 * extend.position * left))
    fitting = tokens_max if divisor * tokens_max <= 2 * left else math.floor(2 * left / divisor)
    end = (position + fitting) // page_size * page_size
    return max(page_end, end) - position
