"""The numbers that a worker may tell a router, by what they count: bounds that are checked where bytes are decoded.

A router takes no number from a worker that its own arithmetic could stumble over: none is below zero, infinite or
not a number, and none is so large that sums are no longer exact. A message with another one cannot be read, and ends
its session. Whether a number is *true* is not decided here.

All bounds are far above what a worker has: no worker in order has ever sent what they refuse.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

NUMBERS_MAX = 1 << 20  # of one request, in a list: Python takes 42 bytes of memory for one byte on the wire
COUNT_MAX = 1 << 48  # tokens, pages, bytes or requests: the sum of 32 of them is exact even as a float
VOCABULARY_MAX = 1 << 21  # tokens: ten times what the largest published models have
ADDRESS_MAX = 2**63 - 1  # no memory lies beyond
SECONDS_MAX = 1e7  # four months
BYTES_PER_SECOND_MAX = 1e18  # a gigabyte within a nanosecond, as a clock may see it
LOGPROB_ROUNDING = 1e-3  # a logprob of 0 may be rounded up

Bits64 = Annotated[int, Meta(ge=0)]  # msgpack has no larger ones
Nonce = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Address = Annotated[int, Meta(ge=0, le=ADDRESS_MAX)]
Page = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
CountOrNone = Annotated[int, Meta(ge=-1, le=COUNT_MAX)]  # -1: none, or not told
TokenId = Annotated[int, Meta(ge=0, lt=VOCABULARY_MAX)]
Pages = Annotated[tuple[Page, ...], Meta(max_length=NUMBERS_MAX)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=NUMBERS_MAX)]
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
PagesPerSecond = Annotated[float, Meta(ge=0, le=COUNT_MAX)]
TokensPerSecond = Annotated[float, Meta(ge=0, le=COUNT_MAX)]
BytesPerSecond = Annotated[float, Meta(ge=0, le=BYTES_PER_SECOND_MAX)]
# Workers of version 0.1.0 send -inf for a token that cannot come; NaN and inf are refused.
Logprob = Annotated[float, Meta(le=LOGPROB_ROUNDING)]
# What may end a request by its own fault or a worker's: each has a phrase in HTTP.
ErrorStatus = Literal[400, 403, 404, 408, 409, 413, 415, 422, 429, 500, 501, 502, 503, 504]
