"""Workers that say `Paused` where nothing pauses: of a request that runs, is forgotten, is another's, old or unknown.

It is a message as good as any. So a router may only believe that the request is paused, and only of the worker that has
this attempt: it costs nobody anything, and the worker keeps its session. Where one of its numbers is at an extreme, or
the core fails at it, it is a lie like others (`lies`).
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.wire.bounds import COUNT_MAX
from shared.wire.messages import Paused

SOUND = ("own", "own", "older", "later", "another's", "unknown", "many")  # for its type
WAYS = (*SOUND, "number", "error")
CAUSES = ("retracted", "", "another cause", "retracted " * 10)

Attempts = Mapping[str, int]  # by rid


def false_pauses(way: str, own: Attempts, others: Attempts, choice: int) -> list[Paused]:
    """What a worker says that has the requests `own`, beside workers that have `others`."""
    cause = CAUSES[choice % len(CAUSES)]
    unknown = [Paused(f"nobody's-{choice}", 1, cause)]
    if way == "many":
        all_known = {**others, **own}.items()
        told = [(rid, said) for rid, attempt in all_known for said in (0, attempt, attempt + 1, COUNT_MAX)]
        return [Paused(rid, said, cause) for rid, said in told] + unknown
    known = list((others if way == "another's" else own).items())
    if way == "unknown" or not known:
        return unknown
    rid, attempt = known[choice // len(CAUSES) % len(known)]
    said = {"older": max(0, attempt - 1), "later": attempt + 1}.get(way, attempt)
    return [Paused(rid, said, cause)]
