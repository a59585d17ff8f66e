"""Mistakes in the ordinary way of a request, from its pages to its tokens: see `mutations`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

import shared.wire.baton
from decode import output_buffer, retraction, transfer_queue
from decode.lifecycle import DecodeEvent, DecodeState
from decode.scheduler import DecodeScheduler
from router.core.fleet import placement
from router.core.fleet.workers import Fleet, Worker
from router.core.requests.lifecycle import TRANSITIONS, RequestEvent, RequestState
from router.core.requests.reservations import Reservations
from shared.batch.req import Req
from shared.kv.page_pool import PagePool, PageState
from shared.kv.radix_cache import RadixCache
from shared.scheduling.event_loop import EventLoop
from shared.transfer.protocol import FetchLanded, FetchStale
from shared.wire.messages import Prefill, Row
from shared.wire.sampled import Logprobs, Sampled
from tests.simulation.mistakes.mutation import Mutation, Patch, into
from tests.simulation.oracle.device import OracleDevice, Pages, Slot
from tests.simulation.world import worker
from tests.simulation.world.fabric import Agent, FabricWords
from tests.simulation.world.witness import Witness

MISTAKES: dict[str, Mutation] = {}
_mistake = into(MISTAKES)


# ---- pages -----------------------------------------------------------------------------------------------------


@_mistake("page_pool", "pages are free before their last step has completed")
def _free_before_retire() -> list[Patch]:
    real = PagePool.retire

    def retire(self: PagePool, pages: Any, before: PageState, after_step: int) -> None:
        del after_step
        real(self, pages, before, 0)

    return [(PagePool, "retire", retire)]


@_mistake("page_pool", "an aborted request's pages are forgotten")
def _leak() -> list[Patch]:
    def drop(self: DecodeScheduler, req: Req) -> None:
        if req.state is DecodeState.RUNNING:
            self._end(req, DecodeEvent.CANCELLED)
        else:
            real(self, req)

    real = DecodeScheduler._drop
    return [(DecodeScheduler, "_drop", drop)]


@_mistake("radix_cache", "locks do not keep pages from eviction")
def _locks_ignored() -> list[Patch]:
    def lock(self: RadixCache, node: Any) -> None:
        del self, node

    def unlock(self: RadixCache, node: Any, last_step: int) -> None:
        del self, node, last_step

    return [(RadixCache, "lock", lock), (RadixCache, "unlock", unlock)]


@_mistake("radix_cache", "an edge matches by its first page alone")
def _match_too_long() -> list[Patch]:
    def shared(self: RadixCache, edge: tuple[int, ...], tokens: tuple[int, ...], start: int) -> int:
        return min(len(edge), (len(tokens) - start) // self.page_size * self.page_size)

    return [(RadixCache, "_shared", shared)]


# ---- leases and fetches ----------------------------------------------------------------------------------------


@_mistake("leases", "the end of a lease leaves its word")
def _word_left() -> list[Patch]:
    def clear(self: FabricWords, lease: int) -> None:
        del self, lease

    return [(FabricWords, "clear", clear)]


@_mistake("leases", "the word is cleared a while after the pages are free")
def _word_cleared_late() -> list[Patch]:
    def clear(self: FabricWords, lease: int) -> None:
        nonce = self.values[lease]
        self.process.after(1.0, lambda: real(self, lease) if self.values[lease] == nonce else None)

    real = FabricWords.clear
    return [(FabricWords, "clear", clear)]


@_mistake("leases", "a nonce is used again")
def _nonce_again() -> list[Patch]:
    def open_lease(self: FabricWords, lease: int, pages: Sequence[int]) -> int:
        self.write(lease, 7, pages)
        return 7

    return [(FabricWords, "open", open_lease)]


@_mistake("leases", "the epoch is in neither the agent's name nor the nonce")
def _epoch_ignored() -> list[Patch]:
    opened: Counter[FabricWords] = Counter()

    def open_lease(self: FabricWords, lease: int, pages: Sequence[int]) -> int:
        opened[self] += 1
        self.write(lease, opened[self], pages)
        return opened[self]

    def agent_name(uid: str, epoch: int) -> str:
        del epoch
        return uid

    names = [(module, "agent_name", agent_name) for module in (shared.wire.baton, worker)]
    return [(FabricWords, "open", open_lease), *names]


@_mistake("baton", "a baton is made before its step has settled")
def _baton_too_early() -> list[Patch]:
    written: dict[tuple[int, int, int], float] = {}  # when a cell is there: 50 ms after the baton says so
    clock = [0.0]

    def append(self: OracleDevice, slot: Slot, cells: list[int], token_id: int) -> None:
        page, offset = divmod(len(cells), self.page_size)
        clock[0] = self.process.timeline.now
        written[id(self.pages), slot.pages[page] if page < len(slot.pages) else -1, offset] = clock[0] + 0.05
        real_append(self, slot, cells, token_id)

    def copy(self: Pages, page: int, source: Pages, source_page: int) -> None:
        real_copy(self, page, source, source_page)
        for offset in range(len(self.cells[page])):
            if written.get((id(source), source_page, offset), 0.0) > clock[0]:
                self.cells[page][offset] = -1

    real_append, real_copy = OracleDevice._append, Pages.copy
    return [(OracleDevice, "_append", append), (Pages, "copy", copy)]


@_mistake("transfer", "the word is read before the pages")
def _word_first() -> list[Patch]:
    held: dict[tuple[int, int], bool] = {}

    def start(self: Agent, fetch_id: int, baton: Any, start_page: int, into: Any) -> None:
        holder = self.fabric.agents.get(baton.holder.agent)
        held[id(self), fetch_id] = holder is not None and holder.words.read(baton.lease) == baton.nonce
        real(self, fetch_id, baton, start_page, into)

    def tell(self: Agent, event: Any) -> None:
        if isinstance(event, FetchStale) and held.get((id(self), event.fetch_id)):
            event = FetchLanded(event.fetch_id, 0, 0.0)
        real_tell(self, event)

    real, real_tell = Agent.start, Agent._tell
    return [(Agent, "start", start), (Agent, "_tell", tell)]


@_mistake("transfer", "stale bytes are taken for landed")
def _stale_landed() -> list[Patch]:
    def tell(self: Agent, event: Any) -> None:
        real(self, FetchLanded(event.fetch_id, 0, 0.0) if isinstance(event, FetchStale) else event)

    real = Agent._tell
    return [(Agent, "_tell", tell)]


@_mistake("transfer_queue", "the target of a failed read is used again at once")
def _no_quarantine() -> list[Patch]:
    def release_pages(self: transfer_queue.TransferQueue, fetch_id: int, req: Any, ended: bool) -> None:
        del ended
        self._quarantined.setdefault(fetch_id, [])
        self.memory.release(req, PageState.ARRIVING)

    return [(transfer_queue.TransferQueue, "_release_pages", release_pages)]


@_mistake("transfer_queue", "a request that waits for a prefix is forgotten when its fetch fails")
def _waiting_forgotten() -> list[Patch]:
    def take_waiting(self: transfer_queue.TransferQueue) -> list[Any]:
        return [entry for entry in real(self) if entry[2]]

    real = transfer_queue.TransferQueue.take_waiting
    return [(transfer_queue.TransferQueue, "take_waiting", take_waiting)]


@_mistake("transfer_queue", "a landed request may not join when room is short")
def _landed_turned_away() -> list[Patch]:
    def join(self: DecodeScheduler, arrived: Any) -> None:
        if self.memory.available_pages >= len(self._batch.running):
            real(self, arrived)

    real = DecodeScheduler._join
    return [(DecodeScheduler, "_join", join)]


@_mistake("transfer_queue", "the fetch starts one page late behind a cached prefix")
def _wrong_start_page() -> list[Patch]:
    def start(self: Agent, fetch_id: int, baton: Any, start_page: int, into: Any) -> None:
        real(self, fetch_id, baton, 0 if start_page else start_page, into)

    real = Agent.start
    return [(Agent, "start", start)]


# ---- steps -----------------------------------------------------------------------------------------------------


@_mistake("event_loop", "launched steps count as completed")
def _reclaim_launched() -> list[Patch]:
    def poll_transfers(self: EventLoop, now: float) -> bool:
        if self._in_flight:
            self._scheduler.reclaim(self._in_flight[-1].step)
        return real(self, now)

    real = EventLoop._poll_transfers
    return [(EventLoop, "_poll_transfers", poll_transfers)]


@_mistake("event_loop", "where launches cost nothing, a step is settled before the one launched earlier")
def _newest_first() -> list[Patch]:
    def settle(self: EventLoop) -> None:
        if not self._launches_cost:
            self._in_flight.rotate(1)
        real(self)

    real = EventLoop._settle_oldest
    return [(EventLoop, "_settle_oldest", settle)]


@_mistake("event_loop", "what comes while a step is settled first is lost")
def _deaf_while_settling() -> list[Patch]:
    def take_in(self: EventLoop, patience_seconds: float) -> None:
        steps = self._scheduler.steps if isinstance(self._scheduler, Witness) else []
        if steps[-2:-1] == ["settles first"]:
            self._links.receive(patience_seconds)
        real(self, patience_seconds)

    real = EventLoop._take_in
    return [(EventLoop, "_take_in", take_in)]


@_mistake("decode", "rows are settled in another order")
def _rows_swapped() -> list[Patch]:
    def settle(self: DecodeScheduler, batch: Any, sampled: Sampled, now: float) -> None:
        real(self, batch, dataclasses.replace(sampled, token_ids=sampled.token_ids[::-1]), now)

    real = DecodeScheduler.settle
    return [(DecodeScheduler, "settle", settle)]


@_mistake("decode", "the output index starts anew with each attempt")
def _index_of_attempt() -> list[Patch]:
    def row(rid: str, attempt: int, index: int, token_ids: tuple[int, ...], logprobs: Logprobs) -> Row:
        return Row(rid, attempt, index if attempt == 1 else index - 1, token_ids, logprobs)

    return [(output_buffer, "Row", row)]


@_mistake("decode", "an end overtakes the last tokens")
def _finished_first() -> list[Patch]:
    return [(output_buffer.OutputBuffer, "flush_of", lambda *_: [])]


@_mistake("decode", "penalties forget the tokens before a join")
def _history_lost() -> list[Patch]:
    def join(self: Req, last_token: int | None = None) -> Any:
        return dataclasses.replace(real(self, last_token), token_ids=())

    real = Req.join
    return [(Req, "join", join)]


@_mistake("retraction", "pages are backed up before the step in flight has settled")
def _early_backup() -> list[Patch]:
    def start_backups(self: retraction.Retraction) -> list[Any]:
        return [req for req in [*self.settling] if not self._back_up(req)]

    return [(retraction.Retraction, "start_backups", start_backups)]


@_mistake("retraction", "a retracted request is lost")
def _lost_retracted() -> list[Patch]:
    def on_copy(self: retraction.Retraction, copy_id: int) -> Any:
        req = real(self, copy_id)
        if len(self._retracted) > 1:
            self._retracted.pop()
        return req

    real = retraction.Retraction.on_copy
    return [(retraction.Retraction, "on_copy", on_copy)]


@_mistake("retraction", "a request that is cancelled while it is copied is dropped at once")
def _copy_ignored() -> list[Patch]:
    def drop(self: DecodeScheduler, req: Req) -> None:
        if req.state in (DecodeState.BACKING_UP, DecodeState.RESTORING):
            self.memory.release(req, PageState.COPYING)
            self._end(req, DecodeEvent.CANCELLED)
        else:
            real(self, req)

    real = DecodeScheduler._drop
    return [(DecodeScheduler, "_drop", drop)]


@_mistake("retraction", "pages come back in another order")
def _wrong_page_on_resume() -> list[Patch]:
    def copy(self: retraction.Retraction, copy: Any, kind: Any, source: list[int], target: list[int]) -> None:
        real(self, copy, kind, source[::-1] if copy.restoring else source, target)

    real = retraction.Retraction._copy
    return [(retraction.Retraction, "_copy", copy)]


# ---- router ----------------------------------------------------------------------------------------------------


@_mistake("lifecycle", "a request that lost its decode worker is ready again")
def _lost_is_ready() -> list[Patch]:
    return [(TRANSITIONS.rows[RequestState.DECODING], RequestEvent.LOST, RequestState.READY)]


@_mistake("lifecycle", "a later attempt counts its output as prompt")
def _prompt_len_lost() -> list[Patch]:
    def send(self: Reservations, worker: Worker, message: Any) -> None:
        if isinstance(message, Prefill):
            message = msgspec.structs.replace(message, prompt_len=len(message.token_ids))
        real(self, worker, message)

    real = Reservations.send
    return [(Reservations, "send", send)]


@_mistake("lifecycle", "requests of a lost worker are not tried again")
def _loss_ignored() -> list[Patch]:
    def down(self: Fleet, peer: str) -> None:
        real(self, peer)

    real = Fleet.down
    return [(Fleet, "down", down)]


@_mistake("placement", "requests go where they do not fit")
def _fits_ignored() -> list[Patch]:
    def fits(self: Worker, tokens: int) -> bool:
        del self, tokens
        return True

    return [(Worker, "fits", fits)]


@_mistake("placement", "pages go to workers of another KV format")
def _format_ignored() -> list[Patch]:
    def could_decode(need: Any, worker: Worker, _fleet: Any) -> bool:
        return worker.fits(need.tokens_max) and need.features <= worker.features

    return [(placement, "could_decode", could_decode)]
