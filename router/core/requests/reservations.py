"""What a request claims while it lives: a place in a queue, deadlines, room on a worker, a lease of its pages.

Each claim is made and given up here, so that the queue, the worker and the deadlines agree with the request. Which
claims belong to which state stands in `request_table`, which takes the steps; this file decides nothing and changes
no state.
"""

from __future__ import annotations

from typing import Literal

from router.config import RouterConfig
from router.core.effects import RouterEffect
from router.core.fleet.prefix_index import PrefixIndex, block_names
from router.core.fleet.worker import Worker
from router.core.requests.deadlines import Deadlines
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from router.core.requests.request_queue import RequestQueue
from router.placement_policies import Placement
from shared.batch.effects import Note, Send
from shared.wire import messages
from shared.wire.baton import Baton
from shared.wire.messages import Message

Deadline = Literal[
    "wait", "patience", "gone", "late", "request", "renew", "rest", "pause", "stall", "silent", "trial"
]
LATE = 2  # of `ready_seconds` since its last token: a stream is offered to workers that may refuse it


class Reservations:
    """The queues and deadlines, and what requests have of workers. Messages to workers are appended to `effects`."""

    def __init__(self, settings: RouterConfig, prefixes: PrefixIndex, effects: list[RouterEffect]):
        self._prefixes = prefixes
        self.waiting = RequestQueue(RequestState.WAITING)
        self.ready = RequestQueue(RequestState.READY)
        self.deadlines: Deadlines[tuple[Deadline, str]] = Deadlines()
        self._effects = effects
        self._settings = settings
        self._foreseen_changed: dict[Worker, None] = {}  # since `tell_foreseen`

    def send(self, worker: Worker, message: Message) -> None:
        """Send to a worker, unless it is gone."""
        if worker.up:
            self._effects.append(Send(worker.peer, message))

    def note(self, event: str, worker: Worker, live: LiveRequest, reason: str) -> None:
        """A warning about what a worker said of a request."""
        self._effects.append(
            Note(event, {"worker": worker.peer, "rid": live.rid, "reason": reason}, "warning")
        )

    # ---- queues ------------------------------------------------------------------------------------------------

    def enqueue(self, live: LiveRequest) -> None:
        """Put it into the queue of its state, with the deadline that it has there."""
        live.refresh_need()
        live.fleet_looked_at = -1
        if live.state is RequestState.WAITING:
            self.waiting.push(live, live.request.charged_tokens)
            if not live.output:  # a stream that has begun waits for room as long as it takes
                self.deadlines.set(("wait", live.rid), live.wait_until)
        elif live.state is RequestState.READY:
            self.ready.push(live, live.request.params.max_new_tokens)
            self.deadlines.set(("late", live.rid), self.late_at(live))

    def late_at(self, live: LiveRequest) -> float:
        """When the stream has waited so long that workers are asked whatever they tell of their room."""
        return live.token_at + LATE * self._settings.ready_seconds

    def dequeue(self, live: LiveRequest) -> None:
        """Take it out of the queue of its state, if it is in one."""
        if live.state is RequestState.WAITING:
            self.waiting.remove(live)
            self.deadlines.clear(("wait", live.rid))
        elif live.state is RequestState.READY:
            self.ready.remove(live)
            self.deadlines.clear(("late", live.rid))
        self.deadlines.clear(("patience", live.rid))
        self.deadlines.clear(("gone", live.rid))

    # ---- workers -----------------------------------------------------------------------------------------------

    def assign(self, live: LiveRequest, choice: Placement[Worker], tokens: int, now: float) -> None:
        """The chosen worker has `tokens` of it to work on from now on."""
        worker = choice.worker
        pages = worker.pages_for(live.need.tokens, choice.shared_tokens)
        if not worker.assigned:
            self.deadlines.set(("silent", worker.peer), now + self._settings.silent_seconds)
        worker.assign(live.rid, tokens, pages, live.tenant.name, choice.hit_tokens, now, own=choice.own)
        self._prefixes.insert(worker.peer, live.need.blocks)
        live.worker = worker
        live.visit(worker, choice.why, now)
        live.heard_at, live.answered = now, False
        self.deadlines.set(("stall", live.rid), now + self._settings.stall_seconds)

    def unassign(self, live: LiveRequest) -> None:
        """Release a request's place at its worker, which has no more work with it, and any room reserved elsewhere."""
        assert live.worker is not None, live.rid
        worker, live.worker = live.worker, None
        if live.heard_at > worker.assigned[live.rid].sent_at:
            worker.heard_at = max(worker.heard_at, live.heard_at)
        worker.unassign(live.rid)
        if not worker.assigned:
            self.deadlines.clear(("silent", worker.peer))
        self.deadlines.clear(("stall", live.rid))
        self.forget_target(live)

    def correct_index(self, live: LiveRequest, cached_tokens: int, *, fetched: bool) -> None:
        """Correct the prefix index if the worker had less of the prompt in its cache than expected, or more.

        `fetched`: a decode worker has fetched the rest of it; if not, a worker has computed it.
        """
        assert live.worker is not None, live.rid
        assignment = live.worker.assigned[live.rid]
        if assignment.own:
            more = cached_tokens - assignment.hit_tokens  # other routers sent it there
            share = max(0.0, min(1.0, more / live.need.tokens))
            found = more >= self._settings.cache_hit_tokens_min
            asked = "fetched" if fetched else live.worker.hello.role
            self._prefixes.looked(live.need.model_name, asked, found=found, share=share)
        missed = assignment.hit_tokens - cached_tokens
        if missed > 0:
            self._prefixes.forget_oldest(live.worker.peer, missed)

    def index_output(self, live: LiveRequest) -> None:
        """Index prompt and output at the decode worker, which caches them but for the last token: that has no KV."""
        if (
            live.worker is not None
            and live.worker.hello.role == "decode"
            and live.worker.peer in self._prefixes
        ):
            names = block_names(live.token_ids[:-1], live.extra_key, live.blocks)
            self._prefixes.insert(live.worker.peer, names)

    def reserve_target(self, live: LiveRequest, worker: Worker) -> None:
        """Keep room on a worker for its migration."""
        live.target = worker
        worker.reserved[live.rid] = worker.pages_for(live.need.tokens)

    def forget_target(self, live: LiveRequest) -> None:
        """Give up the room that is reserved for its migration, if any."""
        if live.target is not None:
            del live.target.reserved[live.rid]
            live.target = None

    def foresee(self, live: LiveRequest, worker: Worker | None) -> None:
        """Count its pages at the decode worker that it will probably go to; None: at nobody."""
        if live.foreseen_at is not None:
            live.foreseen_at.foreseen.pop(live.rid, None)
            self.look_at_foreseen(live.foreseen_at)
        live.foreseen_at = worker
        if worker is not None:
            worker.foreseen[live.rid] = worker.pages_for(live.need.tokens)
            self.look_at_foreseen(worker)

    def look_at_foreseen(self, worker: Worker) -> None:
        """What is begun for a worker may have changed, or by its new load there are other routers to hear of it."""
        self._foreseen_changed[worker] = None

    def tell_foreseen(self) -> None:
        """Tell decode workers what is begun for them, where that changed and another router wants to know it."""
        for worker in self._foreseen_changed:
            if worker.load.pages_foreseen < 0 or not worker.understands(messages.Foreseen):
                continue
            pages = sum(worker.foreseen.values())
            if pages != worker.foreseen_told:
                worker.foreseen_told = pages
                self.send(worker, messages.Foreseen(pages))
        self._foreseen_changed.clear()

    def has_stalled(self, live: LiveRequest, now: float) -> bool:
        """Whether its worker has been silent about it for too long; if not, look again when it may have been.

        Moving the deadline with every token would cost more than this.
        """
        due = live.heard_at + self._settings.stall_seconds
        if now < due:
            self.deadlines.set(("stall", live.rid), due)
        return now >= due

    # ---- leases ------------------------------------------------------------------------------------------------

    def hold_lease(self, live: LiveRequest, holder: Worker, baton: Baton, now: float) -> None:
        """`holder` keeps its pages under a lease, which must be renewed."""
        live.holder, live.baton, live.unread_by = holder, baton, ()
        holder.leases[live.rid] = None
        self.deadlines.set(("renew", live.rid), now + self._settings.renew_seconds)

    def renew(self, live: LiveRequest, now: float) -> None:
        """Keep the lease for one more period."""
        if live.holder is not None:
            self.send(live.holder, messages.Renew(live.rid, live.attempt))
            self.deadlines.set(("renew", live.rid), now + self._settings.renew_seconds)

    def end_lease(self, live: LiveRequest, message: messages.Release | messages.Cancel) -> None:
        """The pages are not needed any more: the holder, if there is one, gets `message`."""
        if live.holder is not None:
            self.send(live.holder, message)
            self.forget_lease(live)

    def forget_lease(self, live: LiveRequest) -> None:
        """The holder has given the pages up, or is gone."""
        if live.holder is not None:
            live.holder.leases.pop(live.rid)
            live.holder, live.baton, live.unread_by = None, None, ()
            self.deadlines.clear(("renew", live.rid))

    # ---- all at once -------------------------------------------------------------------------------------------

    def withdraw(self, live: LiveRequest, worker_has_released: bool) -> None:
        """Take it out of queue, worker and lease."""
        self.dequeue(live)
        self.foresee(live, None)
        if live.worker is not None:
            if not worker_has_released:
                self.send(live.worker, messages.Cancel(live.rid, live.attempt))
            self.unassign(live)
        self.end_lease(live, messages.Cancel(live.rid, live.attempt))

    def close(self, live: LiveRequest) -> None:
        """The request has ended and is withdrawn.

        Its tenant is given back what it was charged for and did not need: an unread prompt, unspent output.
        """
        self.deadlines.clear(("request", live.rid))
        self.deadlines.clear(("rest", live.rid))
        self.waiting.ended(live, 0 if live.visits else live.request.charged_tokens)
        self.ready.ended(live, live.request.params.max_new_tokens - len(live.output))
