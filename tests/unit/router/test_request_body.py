"""What still comes of a body that was refused."""

from __future__ import annotations

import asyncio
from typing import Any

from router.http.request_body import LINGER_BYTES_MAX, _discard

PIECE = bytes(1 << 20)


def discarded_bytes(pieces: int) -> int:
    """How much is read of a body of so many pieces."""
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += len(PIECE)
        return {"type": "http.request", "body": PIECE, "more_body": read < pieces * len(PIECE)}

    asyncio.run(_discard(receive))
    return read


def test_the_rest_of_a_refused_body_is_discarded_up_to_a_bound() -> None:
    assert discarded_bytes(3) == 3 * len(PIECE)
    assert discarded_bytes(1000) == LINGER_BYTES_MAX
