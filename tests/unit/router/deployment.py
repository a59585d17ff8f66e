"""Hand-made workers around a router core: feed it what workers say, look at what it wants done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.effects import ClientRequest, FleetPaired, NewTokens, Outcome, RequestEnded, RouterEffect
from router.core.fleet.prefix_index import NAME_BYTES
from shared.batch.effects import Note, Send
from shared.kv.page_pool import pages_for_tokens
from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.wire.baton import Baton, Holder, agent_name
from shared.wire.messages import (
    Decode,
    Finished,
    FinishReason,
    Generated,
    Hello,
    Joined,
    Limits,
    Load,
    Message,
    Migrating,
    Prefill,
    Prefilled,
    RefusalReason,
    Refused,
    Role,
    Row,
    Serve,
)
from shared.wire.sampling_params import SamplingParams

LIMITS = Limits(context_len=4096, page_size=16, pages=512, slots=4, vocab_size=1000)
M = TypeVar("M", bound=Message)


def hello(role: Role, uid: str, **fields: object) -> Hello:
    known: dict[str, object] = {"model_name": "m", "model": "weights", "kv_format": "kv", "limits": LIMITS}
    return Hello(session=1, role=role, uid=uid, epoch=1, **(known | fields))  # type: ignore[arg-type]


def named(blocks: Iterable[int]) -> tuple[bytes, ...]:
    """Names of blocks that the prefix index takes, told apart by numbers."""
    return tuple(block.to_bytes(NAME_BYTES) for block in blocks)


def request(
    rid: str, prompt: tuple[int, ...] = (1, 2, 3), max_new_tokens: int = 8, **fields: object
) -> ClientRequest:
    params = SamplingParams(max_new_tokens=max_new_tokens, seed=0)
    known: dict[str, object] = {"model": "m", "token_ids": prompt, "params": params}
    return ClientRequest(rid=rid, **(known | fields))  # type: ignore[arg-type]


def baton(
    rid: str, attempt: int, kv_len: int, uid: str = "p0", *, prompt_len: int = 0, page_size: int = 16
) -> Baton:
    """Of the worker `uid`; without a `prompt_len` the prompt is all that it has."""
    holder = Holder(uid, 1, agent_name(uid, 1), b"", 0, 64, 0)
    pages = tuple(range(pages_for_tokens(kv_len, page_size)))
    return Baton(rid, attempt, holder, "kv", 0, 1, kv_len, prompt_len or kv_len, pages)


def _sent(effects: Iterable[object], kind: type[M], rid: str | None) -> Iterator[tuple[str, M]]:
    for each in effects:
        if isinstance(each, Send) and isinstance(each.message, kind):
            message = each.message
            if rid in (None, getattr(message, "rid", None)):
                yield each.peer, message


class ScriptedDeployment:
    """A core, its time, and all effects so far."""

    def __init__(self, prefill: int = 1, decode: int = 1, *, limits: Limits = LIMITS, **settings: object):
        self.core = RouterCore(RouterConfig(served_model_name="m", **settings), 0.0)  # type: ignore[arg-type]
        self.now = 0.0
        self.effects: list[RouterEffect] = []
        self._outcomes: dict[str, list[Outcome]] = {}
        self.unread = 0
        for number in range(prefill):
            self.up("prefill", f"p{number}", limits=limits)
        for number in range(decode):
            self.up("decode", f"d{number}", limits=limits)

    # ---- inputs

    def up(self, role: Role, uid: str, **fields: object) -> None:
        self.link(PeerUp(uid, hello(role, uid, **fields)))

    def down(self, uid: str) -> None:
        self.link(PeerDown(uid, "test"))

    def say(self, uid: str, *words: Message) -> None:
        for message in words:
            self.link(Received(uid, message))

    def link(self, *batch: LinkEvent) -> None:
        """Events that the links bring together."""
        for event in batch:
            self.core.link(event, self.now)
        self.core.settle(self.now)
        self._take_effects()

    def submit(self, client: ClientRequest) -> None:
        self.core.submit(client, self.now)
        self._take_effects()

    def cancel(self, rid: str) -> None:
        self.core.cancel(rid, self.now)
        self._take_effects()

    def stop(self, rid: str) -> None:
        self.core.stop(rid, self.now)
        self._take_effects()

    def wait(self, seconds: float) -> None:
        """Let time pass, stopping at every deadline as a shell does."""
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.core.tick(self.now)
            self._take_effects()
        self.now = end

    # ---- what workers say, in short

    def prefilled(
        self,
        uid: str,
        rid: str,
        token: int,
        *,
        attempt: int = 1,
        index: int = 0,
        finish: FinishReason | None = None,
    ) -> None:
        pages = None if finish else self.baton(uid, rid, attempt, index + 1)
        self.say(uid, Prefilled(rid, attempt, index, (token,), pages, finish, cached_tokens=2))

    def joined(self, uid: str, rid: str, attempt: int = 1) -> None:
        self.say(uid, Joined(rid, attempt, 64, 0, 0.01, "tcp/eth0", 5e9))

    def generated(self, uid: str, rid: str, index: int, *tokens: int, attempt: int = 1) -> None:
        self.say(uid, Generated((Row(rid, attempt, index, tokens),)))

    def finished(self, uid: str, rid: str, output_len: int, attempt: int = 1) -> None:
        self.say(uid, Finished(rid, attempt, output_len, "length"))

    def migrating(self, uid: str, rid: str, output_len: int, attempt: int = 1) -> None:
        self.say(uid, Migrating(rid, attempt, output_len, self.baton(uid, rid, attempt, output_len)))

    def refused(self, uid: str, rid: str, reason: RefusalReason, attempt: int = 1) -> None:
        self.say(uid, Refused(rid, attempt, reason))

    def loaded(self, uid: str, **fields: object) -> None:
        full: dict[str, object] = {"free_pages": LIMITS.pages, "slots_free": LIMITS.slots}
        self.say(uid, Load(**(full | fields)))  # type: ignore[arg-type]

    def baton(self, uid: str, rid: str, attempt: int, output_len: int) -> Baton:
        """What this worker would give out for a request with so many tokens of output."""
        prompts = [command.token_ids[: command.prompt_len] for _, command in self.sent(Prefill, rid)]
        prompt_len = len(prompts[-1]) if prompts else 3
        worker = self.core.fleet.workers.get(uid)
        page_size = worker.hello.limits.page_size if worker else 0
        kv_len = prompt_len + output_len - 1
        return baton(rid, attempt, kv_len, uid, prompt_len=prompt_len, page_size=page_size or 16)

    # ---- outputs

    def news(self) -> list[RouterEffect]:
        """Effects about requests since the last call."""
        fresh, self.unread = self.effects[self.unread :], len(self.effects)
        return [effect for effect in fresh if not isinstance(effect, Note | FleetPaired)]

    def notes(self, event: str) -> list[Note]:
        """All log lines of an event so far."""
        return [effect for effect in self.effects if isinstance(effect, Note) and effect.event == event]

    def sent(self, kind: type[M], rid: str | None = None) -> list[tuple[str, M]]:
        """All messages of a kind that were ever sent, with their receivers."""
        return list(_sent(self.effects, kind, rid))

    def placed(self, kind: type[Prefill] | type[Decode] | type[Serve], rid: str) -> str | None:
        """Where a request was sent last."""
        return next((peer for peer, _ in _sent(reversed(self.effects), kind, rid)), None)

    def output(self, rid: str) -> list[int]:
        """Tokens delivered to the client, which must come in order."""
        output: list[int] = []
        for effect in self.effects:
            if isinstance(effect, NewTokens) and effect.rid == rid:
                assert effect.index == len(output), "a token was doubled or left out"
                output.extend(effect.token_ids)
        return output

    def outcome(self, rid: str) -> Outcome | None:
        """How a request ended, which it does at most once."""
        ends = self._outcomes.get(rid, [])
        assert len(ends) <= 1, "a request ended twice"
        return ends[0] if ends else None

    def state(self, rid: str) -> object:
        shown = self.core.debug(rid)
        assert shown is not None
        return shown["state"]

    def assert_nothing_left(self) -> None:
        """No request, tenant, assignment, lease or deadline remains."""
        assert not any(self.core.requests_by_state.values())
        assert not self.core._requests.tenants
        for worker in self.core.fleet.workers.values():
            assert not worker.assigned
            assert not worker.leases
            assert not worker.reserved

    def _take_effects(self) -> None:
        taken = self.core.take_effects()
        self.effects += taken
        for each in taken:
            if isinstance(each, RequestEnded):
                self._outcomes.setdefault(each.rid, []).append(each.outcome)


def decoding(**settings: float) -> ScriptedDeployment:
    """One request, two workers a role, two tokens delivered by p0 and d0."""
    world = ScriptedDeployment(2, 2, limits=LIMITS, **settings)
    world.submit(request("r"))
    world.prefilled("p0", "r", 10)
    world.joined("d0", "r")
    world.generated("d0", "r", 1, 11)
    assert world.output("r") == [10, 11]
    return world
