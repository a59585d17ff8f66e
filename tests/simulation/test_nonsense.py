"""Each unsound command is unsound for one reason, and judged by one check."""

from __future__ import annotations

import pytest

from shared.scheduling.sound_commands import unsound, unsound_baton
from shared.wire.baton import Holder, agent_name
from shared.wire.messages import Decode, Hello, Prefilled, Refused, Role
from tests.simulation.adversaries.nonsense import BATONS, COMMANDS, HOLDERS, RefusedNonsense, unsound_command
from tests.simulation.oracle.model import VOCAB_SIZE

HOLDER = Holder("p", 1, agent_name("p", 1), b"", 0, 4096, 0)
KINDS = len(COMMANDS) + len(BATONS) + len(HOLDERS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("choice", range(KINDS))
def test_one_check_alone_finds_it(role: Role, choice: int) -> None:
    command = unsound_command(Hello(session=0, role=role, uid="w", epoch=1), "r", HOLDER, choice)
    in_baton = unsound_baton(command.baton, page_size=4) if isinstance(command, Decode) else ""
    assert bool(unsound(command, VOCAB_SIZE)) != bool(in_baton)


def test_anything_but_a_refusal_is_a_finding() -> None:
    counted: list[str] = []
    refused = RefusedNonsense(counted.append)
    refused.rids.add("nonsense-0")
    refused.judge(Refused("nonsense-0", 1, "internal"))
    assert counted == ["path unsound command refused"]
    with pytest.raises(AssertionError, match="acted on"):
        refused.judge(Prefilled("nonsense-0", 1, 0, (3,), None))
