"""Keys of the links are replaced by rolling restarts, while sessions run; and what the keys of one role open."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from shared.links.events import PeerDown, PeerUp
from shared.links.keys import Identity, key_file, new_identity, parse_keys
from shared.links.sockets import RouterLinks, WorkerLinks
from shared.wire.messages import Cancel, Hello
from tests.integration.links.watched_links import (
    KEYS,
    ROUTER_HELLO,
    WORKER_HELLO,
    Watched,
    address_of,
    dial,
    listen,
    stranger,
)
from tests.link_settings import link_settings, write_note

OLD_ROUTER, NEW_ROUTER = new_identity("router"), new_identity("router")
OLD_WORKER, NEW_WORKER = new_identity("worker"), new_identity("worker")
BOTH = (NEW_ROUTER, OLD_ROUTER, NEW_WORKER, OLD_WORKER)


@dataclass(frozen=True)
class RotationStep:
    """What the two roles are given: own key, and who is listed."""

    name: str
    router: Identity
    worker: Identity
    listed: tuple[Identity, ...]


STEPS = (
    RotationStep("before", OLD_ROUTER, OLD_WORKER, (OLD_ROUTER, OLD_WORKER)),
    RotationStep("both are listed", OLD_ROUTER, OLD_WORKER, BOTH),
    RotationStep("the new are used", NEW_ROUTER, NEW_WORKER, BOTH),
    RotationStep("the old are removed", NEW_ROUTER, NEW_WORKER, (NEW_ROUTER, NEW_WORKER)),
)


class Rolling:
    """Routers and workers that are replaced one after the other, each linked with all of the other role."""

    def __init__(self, stack: ExitStack):
        self._stack = stack
        self._workers: list[Watched] = []
        self._routers: list[Watched] = []
        self._epoch = 0

    def start_worker(self, at: RotationStep) -> None:
        keys = parse_keys(key_file(at.worker, *at.listed), "worker")
        links = WorkerLinks(
            "127.0.0.1", 0, keys, self._hello(WORKER_HELLO), link_settings(), write_note=write_note
        )
        self._workers.append(self._watch(links))
        for router in self._routers:
            self._dial(router, self._workers[-1])

    def start_router(self, at: RotationStep) -> None:
        keys = parse_keys(key_file(at.router, *at.listed), "router")
        self._routers.append(
            self._watch(RouterLinks(keys, self._hello(ROUTER_HELLO), link_settings(), write_note=write_note))
        )
        for worker in self._workers:
            self._dial(self._routers[-1], worker)

    def end_oldest_worker(self) -> None:
        self._end(self._workers, self._routers)

    def end_oldest_router(self) -> None:
        self._end(self._routers, self._workers)

    def _hello(self, hello: Hello) -> Hello:
        self._epoch += 1
        return msgspec.structs.replace(hello, epoch=self._epoch)

    def _watch(self, links: RouterLinks | WorkerLinks) -> Watched:
        self._stack.callback(links.close)
        return Watched(links)

    def _dial(self, router: Watched, worker: Watched) -> None:
        """Both sides come up, and messages cross."""
        assert isinstance(router.links, RouterLinks)
        ups, sent = len(router.of(PeerUp)), len(worker.messages())
        router.links.connect(address_of(worker))
        peer = router.until_up(ups + 1).peer
        router.links.send(peer, Cancel("a", 0))
        worker.until(lambda: len(worker.messages()) == sent + 1, "a command")

    def _end(self, ones: list[Watched], others: list[Watched]) -> None:
        """The oldest goes, and with it one session of each of the others, and no other session."""
        downs = [len(each.of(PeerDown)) for each in others]
        ones.pop(0).links.close()
        for each, before in zip(others, downs, strict=True):
            each.until_down(before + 1)
            assert len(each.of(PeerDown)) == before + 1


def test_a_rotation_in_three_rolling_restarts_ends_no_session_but_those_of_the_process_that_is_replaced(
    stack: ExitStack,
) -> None:
    rolling = Rolling(stack)
    for _ in range(2):
        rolling.start_worker(STEPS[0])
        rolling.start_router(STEPS[0])
    for step in STEPS[1:]:
        for _ in range(2):
            rolling.start_worker(step)
            rolling.end_oldest_worker()
            rolling.start_router(step)
            rolling.end_oldest_router()


def test_a_router_and_a_worker_whose_keys_were_switched_at_once_do_not_meet(stack: ExitStack) -> None:
    """So the steps above are needed, and the test above can fail."""
    after = parse_keys(key_file(NEW_WORKER, NEW_ROUTER, NEW_WORKER), "worker")
    before = parse_keys(key_file(OLD_ROUTER, OLD_ROUTER, OLD_WORKER), "router")
    worker = Watched(listen(stack, keys=after))
    dial(stack, address_of(worker), keys=before)
    worker.until(lambda: worker.links.counters.refused_foreign_key > 1, "refusals")
    assert worker.seen == []


def test_a_worker_with_all_that_it_is_given_can_pose_as_a_router_to_no_worker(stack: ExitStack) -> None:
    mine = KEYS["worker"]
    worker = Watched(listen(stack))
    stranger(stack, address_of(worker), mine.own.secret, mine.own.public)
    worker.until(lambda: worker.links.counters.refused_wrong_role > 0, "the refusal")
    assert worker.seen == []
