"""A message of a version that does not exist: what two versions of one protocol may differ in."""

from __future__ import annotations

from shared.wire.messages import Message


class Novelty(Message, frozen=True):
    """A message that only a later version knows."""

    rid: str
