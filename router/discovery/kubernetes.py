"""Discovery by EndpointSlices: a thread that asks the API server, and the event loop that dials.

The official client blocks, so it has a thread. The thread lists and watches as `polling` decides and posts each
observation to the event loop. There `known_pods` decides, and this file carries out what it decided: it dials, hangs
up and writes notes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping

import structlog

from router.discovery.known_pods import (
    POD_STATES,
    Change,
    DialPod,
    HangUpPod,
    KnownPods,
    Observation,
    RedialPod,
    TimePassed,
    Unreachable,
)
from router.discovery.polling import ListSlices, Pace, Polling, Step
from router.discovery.slice_api import NoAnswerError, SliceApi, WatchEndedError
from router.discovery.static import Dialer
from router.discovery.worker_address import WorkerAddress
from shared.batch.effects import Note
from shared.primitives.cell import CELL_WORKERS_MAX
from shared.primitives.errors import InvariantError
from shared.process import gauges
from shared.process.health import Health
from shared.process.metrics import Metrics

CLOSING_SECONDS_MAX = 1.0  # the thread may be in the middle of a list, which nothing interrupts

log = structlog.get_logger(__name__)


class KubernetesDiscovery:
    """All methods belong to the event loop's thread; the class has one more of its own."""

    def __init__(
        self,
        api: SliceApi,
        pace: Pace,
        links: Dialer,
        health: Health,
        write_note: Callable[[Note], None],
        router: str = "",
        cell_workers_max: int = CELL_WORKERS_MAX,
    ):
        """`router` is the name of this router's pod."""
        self._api = api
        self._polling = Polling(pace)
        self._links = links
        self._health = health
        self._write_note = write_note
        self._loop = asyncio.get_running_loop()
        self._pods = KnownPods(self._loop.time(), router, cell_workers_max)
        self._refreshing: asyncio.TimerHandle | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="discovery", daemon=True)

    def start(self) -> None:
        """Begin to list and watch; the router is ready when both have worked."""
        self._health.become_unready(f"waiting for {self._pods.waiting_for}")
        self._thread.start()

    def routers(self) -> Mapping[str, str]:
        """URLs by pod name, which is the uid of a process in a pod."""
        return self._pods.routers

    def routers_ready(self) -> int:
        """How many share the clients."""
        return self._pods.routers_ready

    def fault(self) -> str:
        """Without its thread the fleet would never be updated again."""
        ended = self._thread.ident is not None and not self._thread.is_alive()
        return "discovery has ended" if ended and not self._closing.is_set() else ""

    def publish(self, metrics: Metrics) -> None:
        """Set the gauges."""
        metrics.set(gauges.DISCOVERY_REACHABLE, self._pods.reachable, source="kubernetes")
        age_seconds = self._pods.age_seconds(self._loop.time())
        metrics.set(gauges.DISCOVERY_AGE_SECONDS, age_seconds, source="kubernetes")
        pods = self._pods.pods_by_state
        for state in POD_STATES:
            metrics.set(gauges.DISCOVERY_PODS, pods[state], state=state)

    def close(self) -> None:
        """Stop asking, and end the thread."""
        self._closing.set()
        if self._refreshing:
            self._refreshing.cancel()
        self._api.interrupt()
        if self._thread.ident is not None:
            self._thread.join(CLOSING_SECONDS_MAX)

    # ---- on the event loop -------------------------------------------------------------------------------------

    def _observe(self, observation: Observation) -> None:
        if self._closing.is_set():
            return
        try:
            for change in self._pods.observe(observation, self._loop.time()):
                self._carry_out(change)
        except Exception as error:
            raise InvariantError("what is known of the pods cannot be trusted any more") from error
        self._refresh_in_time()
        if self._health.ready:
            return
        if self._pods.ready:
            self._health.become_ready()
        else:
            self._health.become_unready(f"waiting for {self._pods.waiting_for}")

    def _refresh_in_time(self) -> None:
        if self._refreshing:
            self._refreshing.cancel()
        refresh_at = self._pods.refresh_at
        self._refreshing = (
            None if refresh_at is None else self._loop.call_at(refresh_at, self._observe, TimePassed())
        )

    def _carry_out(self, change: Change) -> None:
        match change:
            case DialPod(worker):
                self._links.connect(worker.url)
                log.info("discovery.dialed", **_fields(worker))
            case RedialPod(worker):
                self._links.redial(worker.url)
            case HangUpPod(worker):
                self._links.disconnect(worker.url)
                log.info("discovery.gone", **_fields(worker))
            case Note() as note:
                self._write_note(note)

    # ---- on the thread -----------------------------------------------------------------------------------------

    def _poll(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            step = self._polling.next_step(began)
            worked = self._ask(step)
            pause_seconds = self._polling.ended(step, began, time.monotonic(), failed=not worked)
            self._closing.wait(pause_seconds)

    def _ask(self, step: Step) -> bool:
        """Carry out one step and post what comes; False where it failed."""
        try:
            if isinstance(step, ListSlices):
                self._post(self._api.list_slices())
            else:
                for observation in self._api.watch_slices(step.seconds):
                    self._post(observation)
        except NoAnswerError as error:
            self._post(error.observation)
        except WatchEndedError as error:
            log.debug("discovery.watch_ended", reason=str(error))
        except Exception as error:
            # A fault of the client or of ours. Without the thread the fleet would never be updated again.
            log.exception("discovery.failed")
            self._post(Unreachable(f"asking for endpointslices failed: {type(error).__name__}"))
        else:
            return True
        return False

    def _post(self, observation: Observation) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: the router has ended
            self._loop.call_soon_threadsafe(self._observe, observation)


def _fields(worker: WorkerAddress) -> dict[str, str]:
    return {"pod": worker.pod, "worker_role": worker.role, "address": worker.url}
