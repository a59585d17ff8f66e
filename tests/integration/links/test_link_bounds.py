"""What an admitted router can make a worker keep: each bound on messages, met by a process with little memory.

The worker has an address space of 1 GiB. At each bound the session ends, nothing else does, and the next one is served.
"""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shared.links.events import PeerDown
from shared.wire.baton import NAME_CHARACTERS_MAX, RANKS_MAX, Baton, Holder, HolderRank, agent_name
from shared.wire.bounds import NUMBERS_MAX
from shared.wire.grammar import GRAMMAR_CHARACTERS_MAX, Grammar
from shared.wire.messages import Cancel, Decode, Message, Refused
from shared.wire.sampling_params import SamplingParams
from tests.abuse.procfs import PeakMemory
from tests.integration.links.echo_worker import DEAF
from tests.integration.links.watched_links import KEY_FILES, Watched, dial, start_echo
from tests.link_settings import link_settings

ADDRESS_SPACE_BYTES = 1 << 30
BOUNDS = link_settings()
WITHOUT_BOUNDS = link_settings(
    message_bytes_max=1 << 30, unsent_bytes_max=1 << 30, unsent_messages_max=1 << 20
)
COSTLY = (-30,)
COSTLY_PAGES = (300,)  # none is below 0
TOKENS = tuple(range(40_000, 48_000))
RANK = HolderRank("p-1", b"", 0, 1, 1)
BATON = Baton("a", 0, Holder("p", 1, agent_name("p", 1), b"", 0, 4096, 0), "kv", 3, 77, 1, 1, (0,))
OF_MANY_RANKS = replace(BATON, holder=replace(BATON.holder, ranks=(RANK,) * RANKS_MAX))


class Abused:
    """A worker process, and a router that is admitted and sends what it likes."""

    def __init__(self, stack: ExitStack, folder: Path):
        keys = folder / "worker.pem"
        keys.touch(0o600)
        keys.write_bytes(KEY_FILES["worker"])
        self.process: subprocess.Popen[str]
        self.process, self.address = start_echo(stack, keys, epoch=1)
        resource.prlimit(self.process.pid, resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
        self.router = Watched(dial(stack, self.address, WITHOUT_BOUNDS))
        self.peer = self.router.until_up().peer

    def send(self, message: Message) -> None:
        self.router.links.send(self.peer, message)

    @contextmanager
    def growth_below(self, mib: int) -> Iterator[None]:
        """The worker's peak exceeds what it had by no more than this."""
        peak = PeakMemory(self.process.pid)
        yield
        assert peak.growth() < mib << 20

    def is_served(self, rid: str) -> None:
        """An answer comes in the session that is up now."""
        self.send(Cancel(rid, 0))
        self.router.until(lambda: Refused(rid, 0, "stale") in self.router.messages(), "the answer")


@pytest.fixture
def abused(tmp_path: Path) -> Iterator[Abused]:
    with ExitStack() as stack:
        yield Abused(stack, tmp_path)


def prompt(tokens: tuple[int, ...], pages: tuple[int, ...] = (0,), **params: Any) -> Decode:
    params = {"max_new_tokens": 1, "seed": 1} | params
    return Decode("a", 0, tokens, 1, SamplingParams(**params), replace(BATON, pages=pages))


def test_the_costliest_command_costs_a_worker_84_mib_and_no_session(abused: Abused) -> None:
    """Numbers of few bytes that Python does not share."""
    with abused.growth_below(128):
        abused.send(prompt(COSTLY * NUMBERS_MAX, COSTLY_PAGES * NUMBERS_MAX))
        abused.is_served("after it")
    assert abused.router.of(PeerDown) == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        pytest.param(prompt(COSTLY * BOUNDS.message_bytes_max), "a message of more than", id="bytes"),
        pytest.param(prompt(COSTLY * (NUMBERS_MAX + 1)), "token_ids", id="token ids"),
        pytest.param(prompt((1,), COSTLY * (NUMBERS_MAX + 1)), "baton.pages", id="pages"),
        pytest.param(prompt((1,), stop_token_ids=COSTLY * NUMBERS_MAX), "stop_token_ids", id="stop ids"),
        pytest.param(
            prompt((1,), logit_bias=dict.fromkeys(range(NUMBERS_MAX // 2), 1.0)), "logit_bias", id="biases"
        ),
        pytest.param(
            prompt((1,), allowed_token_ids=COSTLY * NUMBERS_MAX), "allowed_token_ids", id="allowed ids"
        ),
        pytest.param(prompt((1,), bad_words=((1,),) * NUMBERS_MAX), "bad_words", id="bad words"),
        pytest.param(prompt((1,), bad_words=(COSTLY * NUMBERS_MAX,)), "bad_words", id="a bad word"),
        pytest.param(
            prompt((1,), grammar=Grammar("lark", "a" * (GRAMMAR_CHARACTERS_MAX + 1))),
            "grammar",
            id="a grammar",
        ),
        pytest.param(Cancel("a" * (NAME_CHARACTERS_MAX + 1), 0), "rid", id="a name"),
        pytest.param(
            Decode("a", 0, (1,), 1, SamplingParams(max_new_tokens=1, seed=1), OF_MANY_RANKS),
            "ranks",
            id="ranks",
        ),
    ],
)
def test_a_command_beyond_a_bound_ends_its_session_alone_and_is_never_built(
    abused: Abused, command: Message, reason: str
) -> None:
    with abused.growth_below(64):
        abused.send(command)
        assert reason in abused.router.until_down().reason
    abused.router.until_up(2)
    abused.is_served("after it")


@pytest.mark.parametrize(
    ("command", "count"),
    [
        pytest.param(Cancel("a", 0), BOUNDS.unread_messages_max, id="messages"),
        pytest.param(prompt(TOKENS), BOUNDS.unread_bytes_max // (3 * len(TOKENS)), id="bytes"),
    ],
)
def test_what_a_worker_that_computes_may_leave_unread_is_bounded(
    abused: Abused, command: Message, count: int
) -> None:
    with abused.growth_below(640):
        abused.is_served(DEAF)
        for _ in range(count + 1000):
            abused.send(command)
        assert "unread" in abused.router.until_down().reason
    abused.process.send_signal(signal.SIGUSR1)
    abused.router.until_up(2)
    abused.is_served("after it")
