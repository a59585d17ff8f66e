"""Mistakes in the ordinary way of a request, from its pages to its tokens: see `mutations`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from decode.lifecycle import DecodeEvent, DecodeState
from router.core.requests.lifecycle import RequestState
from shared.kv.page_pool import PageState
from shared.transfer.protocol import FetchLanded, FetchStale
from shared.wire.messages import Prefill
from tests.simulation.mistakes.mutation import Instead, Mistakes, gives, nothing
from tests.simulation.mistakes.roles import get
from tests.simulation.world.witness import Witness

CLIP = 96  # tokens; only requests without max_tokens generate more


def _drop_running_at_once(drop: Any, decode: Any, req: Any) -> None:
    if req.state is DecodeState.RUNNING:
        get(decode, "a request ends at decode")(req, DecodeEvent.CANCELLED)
    else:
        drop(decode, req)


def _drop_copied_at_once(drop: Any, decode: Any, req: Any) -> None:
    if req.state in (DecodeState.BACKING_UP, DecodeState.RESTORING):
        decode.memory.release(req, PageState.COPYING)
        get(decode, "a request ends at decode")(req, DecodeEvent.CANCELLED)
    else:
        drop(decode, req)


def _clear_later(clear: Any, words: Any, lease: int) -> None:
    nonce = words.values[lease]
    words.process.after(1.0, lambda: clear(words, lease) if words.values[lease] == nonce else None)


def _open_by_count() -> Instead:
    opened: Counter[Any] = Counter()

    def open_lease(_: Any, words: Any, lease: int, pages: Sequence[int]) -> int:
        opened[words] += 1
        words.write(lease, opened[words], pages)
        return opened[words]

    def named_by_uid(_: Any, uid: str, _epoch: int) -> str:
        return uid

    named = dict.fromkeys(("an agent is named", "a worker names its agent"), named_by_uid)
    return {"a lease begins": open_lease, **named}


def _open_with_seven(_: Any, words: Any, lease: int, pages: Sequence[int]) -> int:
    words.write(lease, 7, pages)
    return 7


def _cells_come_late() -> Instead:
    written: dict[tuple[int, int, int], float] = {}  # when a cell is there: 50 ms after the baton says so
    clock = [0.0]

    def append(real: Any, device: Any, slot: Any, cells: list[int], token_id: int) -> None:
        page, offset = divmod(len(cells), device.page_size)
        clock[0] = device.process.timeline.now
        written[id(device.pages), slot.pages[page] if page < len(slot.pages) else -1, offset] = (
            clock[0] + 0.05
        )
        real(device, slot, cells, token_id)

    def copy(real: Any, target: Any, page: int, source: Any, source_page: int, *slices: Any) -> None:
        real(target, page, source, source_page, *slices)
        for offset in range(len(target.cells[page])):
            if written.get((id(source), source_page, offset), 0.0) > clock[0]:
                target.cells[page][offset] = -1

    return {"a step writes a cell": append, "the content of a page is copied": copy}


def _landed(event: FetchStale) -> FetchLanded:
    return FetchLanded(event.fetch_id, 0, 0.0)


def _word_first() -> Instead:
    held: dict[tuple[int, int], bool] = {}

    def start(real: Any, agent: Any, fetch_id: int, baton: Any, start_page: int, into: Any) -> None:
        holder = agent.fabric.agents.get(baton.holder.agent)
        held[id(agent), fetch_id] = holder is not None and holder.words.read(baton.lease) == baton.nonce
        real(agent, fetch_id, baton, start_page, into)

    def tell(real: Any, agent: Any, event: Any) -> None:
        was_held = isinstance(event, FetchStale) and held.get((id(agent), event.fetch_id))
        real(agent, _landed(event) if was_held else event)

    return {"a fetch starts at the agent": start, "the agent tells of a fetch": tell}


def _tell_landed(tell: Any, agent: Any, event: Any) -> None:
    tell(agent, _landed(event) if isinstance(event, FetchStale) else event)


def _no_quarantine(_: Any, queue: Any, fetch_id: int, req: Any, ended: bool) -> None:
    del ended
    get(queue, "pages in quarantine").setdefault(fetch_id, [])
    queue.memory.release(req, PageState.ARRIVING)


def _join_if_roomy(join: Any, intake: Any, arrived: Any) -> None:
    if intake.memory.available_pages >= len(intake.batch.running):
        join(intake, arrived)


def _reclaim_launched(poll: Any, loop: Any, now: float) -> bool:
    if in_flight := get(loop, "steps in flight"):
        get(loop, "the scheduler of a loop").reclaim(in_flight[-1].step)
    return bool(poll(loop, now))


def _newest_first(settle: Any, loop: Any) -> None:
    if not get(loop, "whether launches cost time"):
        get(loop, "steps in flight").rotate(1)
    settle(loop)


def _deaf_while_settling(take_in: Any, loop: Any, patience_seconds: float) -> None:
    scheduler = get(loop, "the scheduler of a loop")
    if isinstance(scheduler, Witness) and scheduler.steps[-2:-1] == ["settles first"]:
        get(loop, "the links of a loop").receive(patience_seconds)
    take_in(loop, patience_seconds)


def _forget_retracted(on_copy: Any, retraction: Any, copy_id: int) -> Any:
    req = on_copy(retraction, copy_id)
    if len(retracted := get(retraction, "retracted requests")) > 1:
        retracted.pop()
    return req


def _newest_in_line_first(on_copy: Any, retraction: Any, copy_id: int) -> Any:
    req = on_copy(retraction, copy_id)
    if req.state is DecodeState.RETRACTED:
        get(retraction, "retracted requests").rotate(1)
    return req


def _first_in_line(queue: Any, retraction: Any, req: Any) -> None:
    queue(retraction, req)
    get(retraction, "retracted requests").rotate(1)


def _start_late(start: Any, prompts: Any, req: Any, *, samples: bool) -> None:
    if req.cached_len + prompts.memory.page_size < len(req.token_ids) - 1:
        req.cached_len += prompts.memory.page_size
    start(prompts, req, samples=samples)


def _back_up_settling(_: Any, retraction: Any) -> list[Any]:
    return [req for req in [*retraction.settling] if not get(retraction, "a request is backed up")(req)]


def _send_all_as_prompt(send: Any, reservations: Any, worker: Any, message: Any) -> None:
    if isinstance(message, Prefill):
        message = msgspec.structs.replace(message, prompt_len=len(message.token_ids))
    send(reservations, worker, message)


def _last_token_refused(never_fits: Any, admission: Any, command: Any) -> Any:
    if command.prompt_len + command.params.max_new_tokens >= get(admission, "the context of decode"):
        return "too_long", "it could fill the context"
    return never_fits(admission, command)


def _no_part(up: Any, fleet: Any, peer: str, hello: Any) -> Any:
    worker = up(fleet, peer, hello)
    if not isinstance(worker, str):
        worker.prefilling_max = int(hello.limits.slots * get(fleet, "prompts per slot"))
    return worker


MISTAKES: dict[str, Mistakes] = {
    "page_pool": {
        "pages are free before their last step has completed": {
            "pages are given back": lambda retire, pool, pages, before, _step: retire(pool, pages, before, 0)
        },
        "an aborted request's pages are forgotten": {"a request is dropped": _drop_running_at_once},
    },
    "radix_cache": {
        "locks do not keep pages from eviction": {
            "cached pages are locked": nothing,
            "cached pages are unlocked": nothing,
        },
        "an edge matches by its first page alone": {
            "an edge of the cache is compared": lambda _, cache, edge, tokens, start: min(
                len(edge), (len(tokens) - start) // cache.page_size * cache.page_size
            )
        },
    },
    "leases": {
        "the end of a lease leaves its word": {"a lease ends": nothing},
        "the word is cleared a while after the pages are free": {"a lease ends": _clear_later},
        "a nonce is used again": {"a lease begins": _open_with_seven},
        "the epoch is in neither the agent's name nor the nonce": _open_by_count,
    },
    "baton": {"a baton is made before its step has settled": _cells_come_late},
    "transfer": {
        "the word is read before the pages": _word_first,
        "stale bytes are taken for landed": {"the agent tells of a fetch": _tell_landed},
    },
    "transfer_queue": {
        "the target of a failed read is used again at once": {
            "pages of a fetch are given back": _no_quarantine
        },
        "a request that waits for a prefix is forgotten when its fetch fails": {
            "requests that waited for a fetch are taken": lambda take, queue: [
                entry for entry in take(queue) if entry[2]
            ]
        },
        "a landed request may not join when room is short": {
            "a request joins the running ones": _join_if_roomy
        },
        "the fetch starts one page late behind a cached prefix": {
            "a fetch starts at the agent": lambda start, agent, fetch_id, baton, start_page, into: start(
                agent, fetch_id, baton, 0 if start_page else start_page, into
            )
        },
    },
    "event_loop": {
        "launched steps count as completed": {"the loop looks at transfers": _reclaim_launched},
        "where launches cost nothing, a step is settled before the one launched earlier": {
            "the loop settles its oldest step": _newest_first
        },
        "what comes while a step is settled first is lost": {
            "the loop takes in messages": _deaf_while_settling
        },
    },
    "decode": {
        "rows are settled in another order": {
            "a step is settled": lambda settle, decode, batch, sampled, now: settle(
                decode, batch, replace(sampled, token_ids=sampled.token_ids[::-1]), now
            )
        },
        "the output index starts anew with each attempt": {
            "a row is made": lambda row, rid, attempt, index, token_ids, logprobs: row(
                rid, attempt, index if attempt == 1 else index - 1, token_ids, logprobs
            )
        },
        "an end overtakes the last tokens": {"the last tokens are flushed": gives([])},
        "penalties forget the tokens before a join": {
            "a request joins a batch": lambda join, req, last_token=None: replace(
                join(req, last_token), token_ids=()
            )
        },
    },
    "turns": {
        "the newest in line is served first": {"a copy is done": _newest_in_line_first},
        "turns never end": {"turns are over": gives([])},
        "a turn is over at once": {"how long a turn is": gives(0.0)},
    },
    "local_prompts": {
        "what is computed at decode starts a page late": {"a request is computed at decode": _start_late},
        "what is computed at decode joins after its first chunk": {
            "chunks of what is computed at decode": lambda chunks, prompts, rows: [
                replace(chunk, last=True) for chunk in chunks(prompts, rows)
            ]
        },
        "one without room in host memory is first in line": {
            "a request without room in host memory comes in line": _first_in_line
        },
    },
    "retraction": {
        "pages are backed up before the step in flight has settled": {"backups start": _back_up_settling},
        "a retracted request is lost": {"a copy is done": _forget_retracted},
        "a request that is cancelled while it is copied is dropped at once": {
            "a request is dropped": _drop_copied_at_once
        },
        "pages come back in another order": {
            "pages are copied": lambda real, retraction, copy, kind, source, target: real(
                retraction, copy, kind, source[::-1] if copy.restoring else source, target
            )
        },
    },
    "lifecycle": {
        "a request that lost its decode worker is ready again": {
            "a decoding request loses its worker": RequestState.READY
        },
        "a later attempt counts its output as prompt": {"a command is sent": _send_all_as_prompt},
        "requests of a lost worker are not tried again": {
            "a worker goes": lambda down, fleet, peer: gives(None)(down(fleet, peer))
        },
        "an answer without max_tokens ends where its reserve is clipped": {
            "a request finishes": lambda finish_reason, req, ends: (
                finish_reason(req, ends) or ("length" if req.output_len >= CLIP else None)
            )
        },
    },
    "placement": {
        "requests go where they do not fit": {"a request fits a worker": gives(True)},
        "pages go to workers of another KV format": {
            "a worker could decode": lambda _, need, worker, _fleet: (
                worker.fits(need.tokens_max) and need.features <= worker.features
            )
        },
        "a part of a request in flight per slot is none": {"a worker comes": _no_part},
    },
    "room": {
        "a request that may fill its context is a token too long for decode": {
            "a request can never fit": _last_token_refused
        },
    },
}
