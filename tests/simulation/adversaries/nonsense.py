"""Commands that no sound router sends: from one of another version, with another tokenizer, or in other hands.

Each is sound but for one thing, so that a check that is left out is missed. A worker may only refuse them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from shared.scheduling.sound_commands import ADDRESS_MAX, LEASES_MAX
from shared.wire.baton import Baton, Holder
from shared.wire.messages import Decode, Generated, Hello, Message, Prefill, Refused, Serve
from shared.wire.sampling_params import SamplingParams
from tests.simulation.oracle.model import VOCAB_SIZE

TOKENS = (3, 5, 7)
PARAMS = SamplingParams(max_new_tokens=8, seed=1)
COMMANDS: tuple[Mapping[str, Any], ...] = (
    {"token_ids": (3, -1, 7)},
    {"token_ids": (3, VOCAB_SIZE, 7)},
    {"prompt_len": 0},
    {"prompt_len": 4},
    {"params": replace(PARAMS, temperature=math.nan)},
    {"params": replace(PARAMS, stop_token_ids=(VOCAB_SIZE,))},
)
BATONS: tuple[Mapping[str, Any], ...] = (
    {"pages": ()},
    {"pages": (0, 1, 2, 3)},
    {"lease": LEASES_MAX},
)
HOLDERS: tuple[Mapping[str, Any], ...] = (
    {"page_bytes": 0},
    {"agent": "another"},
    {"pages_address": ADDRESS_MAX - 1},
)


def unsound_command(worker: Hello, rid: str, holder: Holder, choice: int) -> Prefill | Decode | Serve:
    """One for this worker; `holder` is one that there is."""
    if worker.role == "prefill":
        return replace(Prefill(rid, 1, TOKENS, len(TOKENS), PARAMS), **COMMANDS[choice % len(COMMANDS)])
    changes = (*COMMANDS, *BATONS, *HOLDERS)[choice % (len(COMMANDS) + len(BATONS) + len(HOLDERS))]
    baton = Baton(rid, 1, holder, worker.kv_format, 0, 77, len(TOKENS) - 1, len(TOKENS), (0,))
    command = Decode(rid, 1, TOKENS, len(TOKENS), PARAMS, baton)
    if changes in COMMANDS and choice % 2 and worker.reads(Serve):
        return replace(Serve(rid, 1, TOKENS, len(TOKENS), PARAMS), **changes)
    if changes in COMMANDS:
        return replace(command, **changes)
    if changes in BATONS:
        return replace(command, baton=replace(baton, **changes))
    return replace(command, baton=replace(baton, holder=replace(holder, **changes)))


class RefusedNonsense:
    """What workers answer to unsound commands."""

    def __init__(self, count: Callable[[str], None]):
        self.rids: set[str] = set()
        self._count = count

    def judge(self, message: Message) -> None:
        """A worker says this. About an unsound command it may only say that it refuses it."""
        rids = (
            {row.rid for row in message.rows}
            if isinstance(message, Generated)
            else {getattr(message, "rid", "")}
        )
        if about := rids & self.rids:
            assert isinstance(message, Refused), f"a worker acted on {sorted(about)}: {message}"
            self._count("path unsound command refused")
