"""Requests as they come: when, how long, and which of them share a prefix. Drawn one by one, so any number fits.

Prompts are bytes of a generator of their own: no two share a block unless they share a prefix by its name, or one
follows the other in a conversation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.benchmarks.virtual_cluster.device import output_seed, sampled_token

REST_OF_CONTEXT = 0  # of `max_new_tokens`: the client gave no max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request of a trace."""

    number: int
    at: float  # seconds
    prompt_len: int  # tokens, with the prefix
    output_len: int  # tokens after which the text ends
    max_new_tokens: int = REST_OF_CONTEXT
    prefix: int = -1  # requests of one prefix begin alike; -1: with nobody
    prefix_len: int = 0
    follows: TracedRequest | None = None  # its prompt begins with that one's, and its output
    tenant: str = ""
    kind: str = ""  # figures are also told by kind

    def prompt(self) -> tuple[int, ...]:
        """Its tokens, each a byte but for the ends of what was said before."""
        before = self.follows
        if before is not None:
            said = before.prompt() + before.output()
            own = random.Random(f"prompt {self.number}").randbytes(self.prompt_len - len(said))
            return said + tuple(own)
        own = random.Random(f"prompt {self.number}").randbytes(self.prompt_len - self.prefix_len)
        return tuple(random.Random(f"prefix {self.prefix}").randbytes(self.prefix_len) + own)

    def output(self) -> tuple[int, ...]:
        """Its whole text, as any device samples it."""
        seed = output_seed(self.number, self.output_len)
        return tuple(sampled_token(seed, index) for index in range(self.output_len))


Trace = Iterator[TracedRequest]
DrawTrace = Callable[[random.Random], Trace]


def poisson(rng: random.Random, per_second: float, seconds: float) -> Iterator[float]:
    """Times of independent arrivals."""
    at = rng.expovariate(per_second)
    while at < seconds:
        yield at
        at += rng.expovariate(per_second)


def bursty(rng: random.Random, per_second: float, seconds: float, shape: float = 8.0) -> Iterator[float]:
    """Times of arrivals whose rate is drawn anew each second, from a Gamma distribution of this shape."""
    for second in range(math.ceil(seconds)):
        rate = per_second * rng.gammavariate(shape, 1 / shape)
        for within in poisson(rng, rate, min(1.0, seconds - second)):
            yield second + within


def lognormal(rng: random.Random, median: float, mean: float, least: int, most: int) -> int:
    """A length by its median and mean."""
    sigma = math.sqrt(2 * math.log(mean / median))
    return max(least, min(most, round(rng.lognormvariate(math.log(median), sigma))))
