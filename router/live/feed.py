"""What those see who watch a router: its fleet each second, and what becomes of its requests as it happens.

    notes of the core ──► events ──► a batch each BATCH_SECONDS ──► every watcher      EVENTS_A_SECOND_MAX, then sums
    books of the core ──► a picture each second ─────────────────► every watcher

With nobody watching no note is looked at and no timer runs. An event is encoded once for all watchers, who are
WATCHERS_MAX at most at each of the two ports, so that the cost has a bound: events and pictures a second, and twice
WATCHERS_MAX writes of each batch. Users of the API take no place of the operators, and a tenant takes
WATCHERS_OF_TENANT_MAX.
A watcher that does not read is dropped by whoever carries the bytes to it (`endpoint`, `shared.process.admin_port`).
The events are `fleet`, `flow`, `requests` (a picture each second), `request`, `moved`, `pod` and `sums`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from router.core.dispatch import RouterCore
from router.core.requests.lifecycle import TRANSITIONS
from router.live.picture import FleetPicture, pod_of, public_id
from router.live.router_pictures import RouterPictures
from router.shell import RouterShell
from shared.batch.effects import Note

WATCHERS_MAX = 4  # at the port of the API, and as many at the admin port
WATCHERS_OF_TENANT_MAX = 2
EVENTS_A_SECOND_MAX = 100
BATCH_SECONDS = 0.1
PICTURE_SECONDS = 1.0
ASKED_SECONDS = 3.0  # another router that has asked within these is a watcher, too
KNOWN = 4096  # requests whose hashed ids can be looked up

STREAMING = ("decoding", "ready", "extending")  # a request in these may have output that must go on
ENDED = frozenset(state.value for state in TRANSITIONS.ended)


class Watcher(Protocol):
    """Somebody who watches; called on the router's loop, and must not block."""

    def deliver(self, data: bytes) -> None:
        """Send these bytes, which are whole events."""

    def end(self) -> None:
        """Nothing follows."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A pod has lost a request, which will be computed again elsewhere."""

    pod: str
    cause: str
    token_at: float  # when its last token came; 0.0: there was none


class LiveFeed:
    """The watchers of one router, on its event loop."""

    def __init__(self, core: RouterCore, shell: RouterShell, name: str, others: RouterPictures):
        self._core = core
        self._shell = shell
        self._name = name
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._watchers: dict[Watcher, str | None] = {}  # and their tenants; None: at the admin port
        self._closed = False
        self._asked_at = -ASKED_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.TimerHandle | None = None
        self._known: OrderedDict[str, str] = OrderedDict()  # rids by hashed id
        self._begin()

    def _begin(self) -> None:
        """Forget all but the ids: somebody begins to watch."""
        self._picture = FleetPicture(self._core, self._name, self._loop.time())
        self._shown: dict[str, Any] = {}
        self._batch: list[bytes] = []
        self._room = EVENTS_A_SECOND_MAX
        self._skipped: Counter[str] = Counter()
        self._flow: Counter[tuple[str, str, str]] = Counter()
        self._flow_shown: list[list[object]] = []
        self._fallen: dict[str, Fall] = {}  # by rid
        self._changes = self._core.fleet.changes
        self._pods = self._states()

    # ---- who watches -------------------------------------------------------------------------------------------

    def has_room(self, tenant: str | None) -> bool:
        """Whether one more of a tenant may watch; None: at the admin port."""
        tenants = list(self._watchers.values())
        on_admin = tenants.count(None)
        if self._closed or tenant is None:
            return not self._closed and on_admin < WATCHERS_MAX
        return len(tenants) - on_admin < WATCHERS_MAX and tenants.count(tenant) < WATCHERS_OF_TENANT_MAX

    def watch(self, watcher: Watcher, tenant: str | None = None) -> bool:
        """Deliver to it from now on, the present picture first; False: there are too many, or the router ends."""
        if not self.has_room(tenant):
            return False
        self._start()
        self._watchers[watcher] = tenant
        if self._shown:
            watcher.deliver(self._encoded_picture())
        return True

    def unwatch(self, watcher: Watcher) -> None:
        """Deliver nothing to it any more."""
        self._watchers.pop(watcher, None)

    def close(self) -> None:
        """End all watchers: the router ends, and does not wait for them."""
        self._closed = True
        for watcher in list(self._watchers):
            watcher.end()
        self._watchers.clear()
        self._stop()

    def own_picture(self) -> bytes:
        """The last picture, for another router that is watched; it takes one now if nobody has watched here."""
        self._asked_at = self._loop.time()
        self._start()
        return msgspec.json.encode({**self._shown, "flow": self._flow_shown})

    def find(self, shown_id: str) -> dict[str, object] | None:
        """What is known of a request by the id that watchers see, or by its own; None: nothing."""
        rid = self._known.get(shown_id, shown_id)
        found = self._core.debug(rid)
        return None if found is None else {**found, "id": public_id(rid)}

    # ---- the seconds -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._timer is None and not self._closed:
            self._begin()
            self._shell.watch_notes = self._noted
            self._show()

    def _stop(self) -> None:
        self._shell.watch_notes = None
        for timer in (self._timer, self._flushing):
            if timer is not None:
                timer.cancel()
        self._timer = self._flushing = None

    def _show(self) -> None:
        """Take a picture, and tell it to all; each second, while there is somebody."""
        now = self._loop.time()
        if not self._watchers and self._shown and now - self._asked_at >= ASKED_SECONDS:
            self._stop()
            return
        self._timer = self._loop.call_later(PICTURE_SECONDS, self._show)
        self._note_pods()
        self._shown = self._picture.take(now)
        for shown, rid in zip(self._shown["requests"], self._core.requests, strict=False):
            self._know(shown[0], rid)
        self._flow_shown = [[*pair, size] for pair, size in self._flow.items()]
        self._flow.clear()
        if self._skipped:
            self._batch.append(encoded("sums", self._skipped))
            self._skipped.clear()
        self._room = EVENTS_A_SECOND_MAX
        if self._watchers:
            self._others.ask()
            self._batch.append(self._encoded_picture())
            self._flush()

    def _encoded_picture(self) -> bytes:
        fleet, requests, flow = self._others.with_own(self._shown, self._flow_shown)
        return encoded("fleet", fleet) + encoded("flow", flow) + encoded("requests", requests)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._note_pods()
        data, self._batch = b"".join(self._batch), []
        if data:
            for watcher in list(self._watchers):
                watcher.deliver(data)

    # ---- what happens ------------------------------------------------------------------------------------------

    def _tell(self, kind: str, event: dict[str, object]) -> None:
        if not self._watchers:
            return
        if self._room <= 0:
            self._skipped[kind] += 1
            return
        self._room -= 1
        self._batch.append(encoded(kind, event))
        if self._flushing is None:
            self._flushing = self._loop.call_later(BATCH_SECONDS, self._flush)

    def _noted(self, note: Note) -> None:
        """Take in a note of the core, of which two kinds are told; the events of a pod are found by comparing."""
        self._note_pods()
        if note.event == "request.state":
            self._changed(note)
        elif note.event == "request.joined":
            self._joined(note)

    def _changed(self, note: Note) -> None:
        fields = note.fields
        rid, before, after = str(fields["rid"]), str(fields["from"]), str(fields["to"])
        pod = pod_of(str(fields["worker"]))
        live = self._core.requests.get(rid)
        if after == "waiting":
            if before in STREAMING and fields["cause"]:
                token_at = live.token_at if live is not None else self._loop.time()
                self._fallen[rid] = Fall(pod, str(fields["cause"]), token_at)
            pod = ""
        elif after == "ready" and live is not None and live.holder is not None:
            pod = live.holder.hello.uid
        elif after in ENDED:
            self._fallen.pop(rid, None)
        if live is not None and fields["on"] == "Prefilled" and live.attempt == 1:
            self._picture.first_token(live)
        shown = public_id(rid)
        self._know(shown, rid)
        self._tell("request", {"id": shown, "state": after, "pod": pod})
        if after == "decoding" and rid in self._fallen:
            self._continued(rid, shown, pod)

    def _continued(self, rid: str, shown: str, pod: str) -> None:
        """A request that has lost its pod is computed again elsewhere, and goes on."""
        fall, live = self._fallen.pop(rid), self._core.requests.get(rid)
        goes_on_at = (
            live.token_at if live is not None and live.token_at > fall.token_at else self._loop.time()
        )
        event = {"id": shown, "from": fall.pod, "to": pod, "cause": fall.cause, "bytes": 0}
        pause = round((goes_on_at - fall.token_at) * 1000) if fall.token_at else 0
        self._tell("moved", {**event, "outcome": "continued", "pause_ms": pause})

    def _joined(self, note: Note) -> None:
        fields: dict[str, Any] = dict(note.fields)
        source, target = pod_of(fields["from"]), pod_of(fields["worker"])
        self._flow[source, target, fields["transport"]] += fields["bytes"]
        if fields["moved"]:
            event = {"id": public_id(fields["rid"]), "from": source, "to": target, "cause": fields["moved"]}
            size, pause = fields["bytes"], round(fields["pause_seconds"] * 1000)
            self._tell("moved", {**event, "outcome": "migrated", "bytes": size, "pause_ms": pause})

    def _know(self, shown: str, rid: str) -> None:
        self._known[shown] = rid
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)

    def _states(self) -> dict[str, tuple[str, bool]]:
        """Pod and whether it drains, by peer."""
        return {peer: (each.hello.uid, each.draining) for peer, each in self._core.fleet.workers.items()}

    def _note_pods(self) -> None:
        """Tell which pods have come, gone or begun to drain since the last look."""
        if self._changes == self._core.fleet.changes:
            return
        self._changes, before, self._pods = self._core.fleet.changes, self._pods, self._states()
        for peer, (pod, draining) in self._pods.items():
            if peer not in before:
                self._tell("pod", {"pod": pod, "what": "joined"})
            elif draining and not before[peer][1]:
                self._tell("pod", {"pod": pod, "what": "draining"})
        for peer, (pod, draining) in before.items():
            if peer not in self._pods:
                self._tell("pod", {"pod": pod, "what": "drained" if draining else "lost"})


def encoded(kind: str, data: object) -> bytes:
    """One server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))
