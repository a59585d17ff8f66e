"""Discovery among the pods of a namespace: a thread that asks the API server, and the event loop that dials.

The official client blocks, so it has a thread. That thread lists, watches until the next list is due, and posts each
observation to the event loop, where the core (`known_pods`) decides and the links are told. A watch that ends
otherwise than by its time limit is followed by a new list; attempts that fail come ever more slowly, up to
`PAUSE_SECONDS_MAX`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from router.discovery.known_pods import (
    POD_STATES,
    Change,
    DialPod,
    HangUpPod,
    KnownPods,
    Observation,
    PodLeaving,
    RedialPod,
    Unreachable,
)
from router.discovery.pod_api import NoAnswerError, PodApi, WatchEndedError
from router.discovery.static import Dialer
from shared.process import gauges
from shared.process.metrics import Metrics
from shared.process.probes import Health

PAUSE_SECONDS = 0.1
PAUSE_SECONDS_MAX = 5.0  # so soon after its return an API server that was away is asked again
WORKING_SECONDS = 1.0  # a watch that lasted so long was a good one, however it ended
CLOSING_SECONDS_MAX = 1.0  # the thread may be in the middle of a list; it is not waited for

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """How often there is a full list, and how long one watch lasts at most."""

    relist_seconds: float
    watch_read_seconds: float


class KubernetesDiscovery:
    """All methods belong to the event loop's thread; the class has one more of its own."""

    def __init__(self, api: PodApi, pace: Pace, links: Dialer, health: Health):
        self._api = api
        self._pace = pace
        self._links = links
        self._health = health
        self._loop = asyncio.get_running_loop()
        self._pods = KnownPods(self._loop.time())
        self._closing = threading.Event()
        self._attempts = 0  # that failed, in a row
        self._thread = threading.Thread(target=self._ask_for_ever, name="discovery", daemon=True)

    def start(self) -> None:
        """Begin to list and watch; the router is ready when both have worked."""
        self._health.become_unready(f"waiting for {self._pods.waiting_for}")
        self._thread.start()

    def routers(self) -> Mapping[str, str]:
        """URLs by pod name: the uid that a process in a pod has."""
        return self._pods.routers

    def publish(self, metrics: Metrics) -> None:
        """Set the gauges."""
        metrics.set(gauges.DISCOVERY_REACHABLE, self._pods.reachable, source="kubernetes")
        age_seconds = self._pods.age_seconds(self._loop.time())
        metrics.set(gauges.DISCOVERY_AGE_SECONDS, age_seconds, source="kubernetes")
        pods = self._pods.pods_by_state
        for state in POD_STATES:
            metrics.set(gauges.DISCOVERY_PODS, pods[state], state=state)

    def close(self) -> None:
        """Ask no more."""
        self._closing.set()
        self._api.interrupt()
        if self._thread.ident is not None:
            self._thread.join(CLOSING_SECONDS_MAX)

    # ---- on the event loop -------------------------------------------------------------------------------------

    def _observe(self, observation: Observation) -> None:
        if self._closing.is_set():
            return
        for change in self._pods.observe(observation, self._loop.time()):
            self._carry_out(change)
        if self._health.ready:
            return
        if self._pods.ready:
            self._health.become_ready()
        else:
            self._health.become_unready(f"waiting for {self._pods.waiting_for}")

    def _carry_out(self, change: Change) -> None:
        worker = change.worker
        about = {"pod": worker.pod, "worker_role": worker.role, "address": worker.url}
        match change:
            case DialPod():
                self._links.connect(worker.url)
                log.info("discovery.dialed", **about)
            case RedialPod():
                self._links.redial(worker.url)
            case PodLeaving():
                log.info("discovery.leaving", **about)  # its link stays; what runs there goes on
            case HangUpPod():
                self._links.disconnect(worker.url)
                log.info("discovery.gone", **about)

    # ---- on the thread -----------------------------------------------------------------------------------------

    def _ask_for_ever(self) -> None:
        while not self._closing.is_set():
            try:
                self._list_and_watch()
            except NoAnswerError as error:
                self._tell(error.observation)
            except WatchEndedError as error:
                log.debug("discovery.watch_ended", reason=str(error))
            except (
                Exception
            ) as error:  # of the client or ours: a fleet that is never updated again would be worse
                log.exception("discovery.failed")
                self._tell(Unreachable(f"asking for pods failed: {type(error).__name__}"))
            else:
                continue
            pause_seconds = min(PAUSE_SECONDS * 2 ** min(self._attempts, 16), PAUSE_SECONDS_MAX)
            self._attempts += 1
            self._closing.wait(pause_seconds)

    def _list_and_watch(self) -> None:
        """One list, and what happens until the next one is due."""
        self._tell(self._api.list_pods())
        relist_at = time.monotonic() + self._pace.relist_seconds
        while (rest_seconds := relist_at - time.monotonic()) > 0 and not self._closing.is_set():
            self._watch(math.ceil(min(rest_seconds, self._pace.watch_read_seconds)))

    def _watch(self, seconds: int) -> None:
        began = time.monotonic()
        try:
            for observation in self._api.watch_pods(seconds):
                self._tell(observation)
        finally:
            if time.monotonic() - began >= WORKING_SECONDS:
                self._attempts = 0
        if time.monotonic() - began < WORKING_SECONDS / 2:
            raise WatchEndedError("it was ended before its time")

    def _tell(self, observation: Observation) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._observe, observation)
