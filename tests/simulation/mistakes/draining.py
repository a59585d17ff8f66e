"""Mistakes in how workers drain and requests migrate: see `mutations`."""

from __future__ import annotations

from typing import Any

import msgspec

from decode.lifecycle import DecodeEvent
from decode.output_buffer import OutputBuffer
from router.core.queueing.backfill import PlacementPass
from shared.batch.effects import Send
from shared.wire.messages import Migrating
from tests.simulation.mistakes.mutation import Mistakes, gives, nothing
from tests.simulation.mistakes.roles import get


def _leased_early(lease_settled: Any, migrations: Any, now: float) -> Any:
    for req in migrations.settling:
        req.kv_len = req.launched_len
    return lease_settled(migrations, now)


def _stays(start: Any, migrations: Any) -> None:
    running = dict(migrations.batch.running)
    start(migrations)
    migrations.batch.running.update(running)


def _state_left(advance: Any, states: Any, req: Any, event: Any) -> None:
    if event is not DecodeEvent.MIGRATION_STARTED:
        advance(states, req, event)


def _move_first(lease_settled: Any, migrations: Any, now: float) -> Any:
    buffer, migrations.output_buffer = migrations.output_buffer, OutputBuffer(0.0)
    leased = lease_settled(migrations, now)
    migrations.output_buffer = buffer
    return leased


def _not_held(lease_settled: Any, migrations: Any, now: float) -> Any:
    leased = lease_settled(migrations, now)
    for req in leased:
        migrations.leases.cancel(req.rid, req.attempt)
    return leased


def _page_short(lease_settled: Any, migrations: Any, now: float) -> Any:
    leased = lease_settled(migrations, now)
    for number, effect in enumerate(migrations.effects):
        if isinstance(effect, Send) and isinstance(effect.message, Migrating):
            baton = effect.message.baton
            if len(baton.pages) > 1 and baton.pages[-1] != baton.pages[0]:
                short = msgspec.structs.replace(baton, pages=(*baton.pages[:-1], baton.pages[0]))
                message = msgspec.structs.replace(effect.message, baton=short)
                migrations.effects[number] = Send(effect.peer, message)
    return leased


def _target_stays(_: Any, reservations: Any, live: Any) -> None:
    del reservations
    live.target = None


def _new_ones_first(_: Any, core: Any, now: float) -> None:
    ready = get(core, "requests of a router").reservations.ready.in_order()
    attempts = PlacementPass(core.settings.backfill_max, core.fleet.only_versions)
    get(core, "a queue is served")(ready, get(core, "a request is sent to decode"), attempts, now)
    moves, find_reader = get(core, "streams of a router move"), get(core, "who reads the pages of a request")
    get(moves, "migrations are asked for")(find_reader, now)


def _wherever_there_is_room(
    place: Any, balance: Any, live: Any, workers: Any, _share: float, now: float, **_: Any
) -> Any:
    return place(balance, live, workers, 1.0, now, evens=False)


def _but_for_what_comes(headroom: Any, balance: Any, worker: Any) -> float:
    return float(headroom(balance, worker) + sum(worker.reserved.values()))


MISTAKES: dict[str, Mistakes] = {
    "migration": {
        "a baton promises what the step in flight will write": {"what has settled is leased": _leased_early},
        "a migrating request stays in the batch": {"migrations start": _stays},
        "the state of a migrating request is not advanced": {
            "a request at a worker changes its state": _state_left
        },
        "a migration overtakes the last tokens": {"what has settled is leased": _move_first},
        "the pages of a migrating request are given up at once": {"what has settled is leased": _not_held},
        "a migrating request is leased with one page too few": {"what has settled is leased": _page_short},
    },
    "draining": {
        "a draining worker ends while its pages are still leased": {
            "a decode worker is drained": lambda _, decode: not get(decode, "requests at decode")
        },
        "a worker does not wait until the routers know that it drains": {
            "a worker has told all routers that it drains": lambda _, sessions: (
                not get(sessions, "leases of sessions")
            )
        },
        "a draining worker is still given work": {
            "a worker takes work": lambda _, worker: worker.load.accepting
        },
        "room that was kept for a migration is never given back": {
            "the target of a migration is forgotten": _target_stays
        },
        "new requests take the room that streams of a draining worker need": {
            "ready requests are placed": _new_ones_first
        },
    },
    "balance": {
        "two workers pass one stream to and fro": {
            "how often a stream may move": 1000,
            "a worker was left by a stream that moves": gives(False),
            "a worker was left by a stream that is placed": gives(False),
        },
        "streams leave a worker that has pages": {
            "a worker lacks pages": lambda _, _balance, worker: (
                worker.load.running > 1 and worker.hello.limits.page_size > 0
            )
        },
        "no stream leaves a worker that lacks pages": {"streams leave workers that lack pages": nothing},
        "a stream makes the worker that it goes to as full as that which it leaves": {
            "where a stream that leaves goes": _wherever_there_is_room
        },
        "what has been asked to come is not counted where streams go": {
            "pages that are left when all has gone on": _but_for_what_comes
        },
        "streams leave only when what is kept for other tenants is all that is left": {
            "pages that are kept for tenants below their share": gives(0)
        },
    },
    "router_drain": {
        "a draining router does not wait for its open answers": {
            "a draining router goes on": lambda tick, drain, now, _open_answers: tick(drain, now, 0)
        },
        "a draining router refuses requests before proxies know": {
            "a router begins to drain": lambda begin, drain, lag_seconds, drain_seconds: begin(
                drain, 0 * lag_seconds, drain_seconds
            )
        },
        "a draining router cuts its answers with the end of the lag": {
            "a router begins to drain": lambda begin, drain, lag_seconds, drain_seconds: begin(
                drain, lag_seconds, 0 * drain_seconds
            )
        },
    },
}
