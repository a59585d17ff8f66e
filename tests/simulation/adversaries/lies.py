"""Workers that lie: what a message of theirs says is changed on its way out, one field at a time.

A lie waits for the next message of its kind. Its field goes to an extreme, of what its type admits or beyond; or the
message brings more tokens than were asked for, or a baton that is not its own; or a command is swallowed; or the router
meets an error of its own at it, in the middle of a step. Lies about a request may cost that request its right answer,
for nobody could tell; but nothing else, and never more tokens than it asked for.

A wrong page is no lie here: what a worker computes or offers is believed (docs/decisions/0029).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from shared.links.events import peer_name
from shared.wire.baton import agent_name
from shared.wire.bounds import COUNT_MAX, SECONDS_MAX
from shared.wire.messages import Decode, Hello, Message, Prefill, Serve
from tests.simulation.scenarios.faults import Fault

UNREADABLE = (-1, -(2**63), 2**63, COUNT_MAX + 1, math.nan, math.inf, -math.inf)
READABLE = (0, 1, COUNT_MAX, SECONDS_MAX, 5e-324)
SURPLUS = 200  # tokens; more than a context has
LINES_MAX = 90  # of the core that take a message
KINDS: Mapping[str, tuple[str, ...]] = {  # what workers of each role say
    "prefill": ("Prefilled", "Load", "Prefilled", "Refused", "Scored", "Failed"),
    "decode": (
        "Generated",
        "Joined",
        "Load",
        "Finished",
        "Generated",
        "Migrating",
        "Refused",
        "Failed",
        "Prefilled",
    ),
}
WAYS = ("number", "number", "number", "surplus", "baton", "error", "swallow")
PAGES = {"pages", "pages_address", "page_bytes", "words_address", "known_page", "device_id"}  # see above
NOT_LIED_ABOUT = PAGES | {"of_a_later_version"}
WRONG_BATONS: tuple[Mapping[str, Any], ...] = (
    {"rid": "another"},
    {"attempt": 77},
    {"kv_format": "another"},
    {"kv_len": 0},
    {"prompt_len": 0},
    {"pages": []},
)
WRONG_HOLDERS: tuple[Mapping[str, Any], ...] = (
    {"uid": "nobody"},
    {"epoch": 1},
    {"agent": "nobody"},  # or that of another worker, see `Lies`
)

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Lie:
    """What will be said, of the next message of a kind."""

    way: str
    kind: str
    choice: int


class Liar(Protocol):
    """A worker as far as it matters here."""

    @property
    def hello(self) -> Hello: ...


class Lies:
    """All lies of a world: those that wait to be told, and what was told."""

    def __init__(self, count: Callable[[str], None], deceived: Callable[[str], None]):
        self.liars: set[str] = set()  # peers that have lied
        self.swallowing: set[str] = set()  # peers that do nothing with any request …
        self.swallowed: set[str] = set()  # … or did nothing with any for a while
        self.forgetful: set[str] = set()  # peers that have lost a request
        self.dead: set[str] = set()  # peers whose process has ended
        self.told: set[bytes] = set()  # messages
        self.beyond: set[bytes] = set()  # messages with a number that no reader may take
        self.errors: dict[bytes, int] = {}  # messages that a core fails at, and at which of its lines
        self._count = count
        self._deceived = deceived  # told the rid of each request that may get a wrong answer now
        self._waiting: dict[str, deque[Lie]] = {}
        self._agents: dict[str, str] = {}  # of those that have said something, by uid

    def plan(self, liar: Liar | None, fault: Fault) -> None:
        """This worker will lie soon; None: there is none."""
        if liar is None:
            return
        hello = liar.hello
        self._count(f"fault {fault.kind}")
        kinds = KINDS[hello.role]
        choice = fault.choice
        way = WAYS[choice % len(WAYS)]
        kind = kinds[choice // len(WAYS) % len(kinds)]
        if way == "baton":
            kind = "Prefilled" if hello.role == "prefill" else "Migrating"
        elif way == "surplus":
            kind = "Prefilled" if hello.role == "prefill" else "Generated"
        lies = self._waiting.setdefault(peer_name(hello), deque())
        lies.append(Lie(way, kind, choice))
        self.liars.add(peer_name(hello))

    def tell_now(self, liar: Liar, lie: Lie) -> None:
        """It is about what this worker says next."""
        self._waiting.setdefault(peer_name(liar.hello), deque()).appendleft(lie)
        self.liars.add(peer_name(liar.hello))

    def swallow(self, liar: Liar | None, fault: Fault) -> None:
        """From now on this worker takes requests and does nothing with them; None: there is none."""
        if liar is not None:
            self._count(f"fault {fault.kind}")
            self.swallowing.add(peer_name(liar.hello))
            self.swallowed.add(peer_name(liar.hello))

    def recover(self, liar: Liar | None) -> None:
        """This worker serves what it takes from now on; what it has swallowed is lost."""
        if liar is not None:
            self.swallowing.discard(peer_name(liar.hello))

    def swallows(self, hello: Hello, message: Message) -> bool:
        """Whether a worker does as if it had not got this command."""
        if not isinstance(message, Prefill | Decode | Serve):
            return False
        if peer_name(hello) in self.swallowing:
            return True
        lies = self._waiting.get(peer_name(hello))
        if not lies or lies[0].way != "swallow":
            return False
        lies.popleft()
        self._count("lie: swallow")
        return True

    def tell(self, hello: Hello, message: Message, wire: bytes) -> bytes:
        """What a worker says instead of `wire`."""
        self._agents[hello.uid] = agent_name(hello.uid, hello.epoch)
        lies = self._waiting.get(peer_name(hello))
        if not lies or lies[0].kind != type(message).__name__ or lies[0].way == "swallow":
            return wire
        lie = lies.popleft()
        plain = msgspec.msgpack.decode(wire)
        told: Any = plain
        path: Path = ()
        beyond = False
        match lie.way:
            case "surplus":
                told = _with_surplus(plain)
            case "baton":
                told = _with_another_baton(plain, lie.choice, self._agent_besides(hello.uid))
            case "number":
                told, path, beyond = _with_another_number(plain, lie.choice)
            case _:
                told = plain | {"of_this_lie": len(self.errors)}
        if told is plain:
            return wire
        body = msgspec.msgpack.encode(told)
        self.told.add(body)
        self._count(f"lie: {lie.way}")
        if lie.way == "error":
            self.errors[body] = 1 + lie.choice % LINES_MAX
        elif lie.way == "number" and beyond:
            self.beyond.add(body)
        elif lie.way == "number":
            self._note_deceived(plain, path)
        return body

    def _agent_besides(self, uid: str) -> str:
        """The agent of another worker, if there is one."""
        return next((agent for other, agent in self._agents.items() if other != uid), "nobody")

    def read(self, wire: bytes, read: Callable[[], Message]) -> Message | None:
        """What a router makes of a message; None: it cannot be read, and its session must end."""
        if wire not in self.told:
            return read()
        try:
            message = read()
        except AssertionError:
            self._count("path a lie ended its session")
            return None
        assert wire not in self.beyond, f"a router has read {message}"
        return message

    def _note_deceived(self, plain: Any, path: Path) -> None:
        """A request that is lied about within the bounds may get a wrong answer."""
        rid = plain["rows"][path[1]][0] if "rows" in plain else plain.get("rid")
        if rid is not None:
            self._deceived(rid)


def _with_surplus(plain: Any) -> Any:
    """More tokens than anybody has asked for, each with as many logprobs as the others."""
    if "rows" in plain:
        return plain | {"rows": [_longer_row(plain["rows"][0]), *plain["rows"][1:]]}
    longer = {"token_ids": [*plain["token_ids"], *plain["token_ids"] * SURPLUS]}
    if plain.get("logprobs"):
        longer["logprobs"] = plain["logprobs"] * (SURPLUS + 1)
    return plain | longer


def _longer_row(row: list[Any]) -> list[Any]:
    rid, attempt, index, token_ids, *logprobs = row
    return [rid, attempt, index, token_ids * (SURPLUS + 1), *[told * (SURPLUS + 1) for told in logprobs]]


def _with_another_baton(plain: Any, choice: int, agent: str) -> Any:
    """A baton that cannot be the request's, in one regard."""
    baton = plain.get("baton")
    if baton is None:
        return plain
    changes = (*WRONG_BATONS, *WRONG_HOLDERS)[choice // len(WAYS) % (len(WRONG_BATONS) + len(WRONG_HOLDERS))]
    if "agent" in changes:
        changes = {"agent": agent}
    if changes.keys() & {"uid", "epoch", "agent"}:
        return plain | {"baton": baton | {"holder": baton["holder"] | changes}}
    return plain | {"baton": baton | changes}


def _with_another_number(plain: Any, choice: int) -> tuple[Any, Path, bool]:
    """One of its numbers is at an extreme; and whether none may take it."""
    places = [path for path in numbers_in(plain) if not set(path) & NOT_LIED_ABOUT]
    if not places:
        return plain, (), False
    path, turn = places[choice // len(WAYS) % len(places)], choice // (len(WAYS) * len(places))
    value = (*READABLE, *UNREADABLE)[turn % (len(READABLE) + len(UNREADABLE))]
    before = _at(plain, path)
    if isinstance(value, float) and isinstance(before, int):
        value = UNREADABLE[turn % 4]  # a number of another type is another fault
    return changed(plain, path, value), path, value in UNREADABLE and not _may_be(path, before, value)


def _may_be(path: Path, before: object, value: float) -> bool:
    """What one type admits although others do not: 64 bits, a logprob below zero, and no word of free pages."""
    if path[-1] in ("pages_for_new", "slots_for_new", "pages_foreseen"):
        return value == -1
    if path[-1] in ("epoch", "nonce"):
        return value > 0
    told = "logprobs" in path or (len(path) > 3 and path[0] == "rows")
    return told and isinstance(before, float) and value <= 0


def numbers_in(plain: Any, path: Path = ()) -> Iterator[Path]:
    """Where the numbers of a message are, as plain data."""
    if isinstance(plain, int | float) and not isinstance(plain, bool):
        yield path
    pairs = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in pairs:
        yield from numbers_in(value, (*path, key))


def changed(plain: Any, path: Path, value: object) -> Any:
    """A copy with another value at one place."""
    if not path:
        return value
    copied: Any = dict(plain) if isinstance(plain, dict) else list(plain)
    copied[path[0]] = changed(plain[path[0]], path[1:], value)
    return copied


def _at(plain: Any, path: Path) -> Any:
    for key in path:
        plain = plain[key]
    return plain
