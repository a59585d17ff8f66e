"""Claims about worlds of two versions: who is of which, and what each can read of the other."""

from __future__ import annotations

import msgspec
import pytest

from shared.wire.messages import READABLE, Hello, Message, Role
from tests.doubles.novelty import Novelty
from tests.simulation.scenarios.drawing import draw
from tests.simulation.world.versions import NEWER, as_older, read, understood_by, written
from tests.unit.links.wire import INSTANCES

PLAIN = [
    message for message in INSTANCES if not isinstance(message, Hello)
]  # a world hands `Hello` over as it is


def hello(role: Role, understands: tuple[str, ...]) -> Hello:
    return Hello(session=0, role=role, uid=f"{role}-0", epoch=1, understands=understands)


@pytest.mark.parametrize("writer", [(), NEWER], ids=["older writer", "newer writer"])
@pytest.mark.parametrize("reader", [(), NEWER], ids=["older reader", "newer reader"])
@pytest.mark.parametrize("message", PLAIN, ids=lambda message: type(message).__name__)
def test_both_versions_read_each_others_messages(
    message: Message, writer: tuple[str, ...], reader: tuple[str, ...]
) -> None:
    wire = written(message, hello("router", writer))
    assert ("of_a_later_version" in msgspec.msgpack.decode(wire)) == bool(writer)
    for role, names in READABLE.items():
        if type(message).__name__ in names:
            said = message if writer else as_older(message)
            assert read(wire, hello(role, reader)) == said


def test_only_the_newer_version_reads_the_new_message() -> None:
    wire = written(Novelty("r"), hello("router", NEWER))
    assert read(wire, hello("decode", NEWER)) == Novelty("r")
    with pytest.raises(AssertionError, match=r"decode-0 cannot read .*Novelty"):
        read(wire, hello("decode", ()))


def test_in_a_rolling_upgrade_each_process_is_old_and_comes_again_as_new() -> None:
    def versions(seed: int) -> tuple[bool, ...]:
        luck = draw(seed).random
        return tuple(
            bool(understood_by(luck, uid, restarts))
            for uid in ("prefill-0", "router-1")
            for restarts in (0, 1)
        )

    worlds = [versions(seed) for seed in range(60)]
    assert worlds.count((False, True, False, True)) > 10, "rolling upgrades"
    assert worlds.count((False, False, True, True)) + worlds.count((True, True, False, False)) > 5, "both"
    assert worlds.count((False,) * 4) > 5
    assert worlds.count((True,) * 4) > 5
