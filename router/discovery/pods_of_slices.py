"""The pods that a set of EndpointSlices names.

Slices in, pods out; no clock, thread or I/O. Three things make this more than a union:

- A pod can be in several slices: while the controller moves it from one to another, when two Services select it, and
  once for each address family. It is one pod here, known by its uid: Ready if one slice says so, terminating if one
  says so, and its address is the IPv4 one where it has both.
- A slice can go although its pods live: somebody deletes it, or its Service is replaced, and the controller writes it
  anew. So a pod that no slice names is kept for `ABSENT_SECONDS`, not Ready, before it is gone.
- A pod whose slice has no port of the expected name has no URL.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

ABSENT_SECONDS = 3.0  # the controller writes a deleted slice anew in less than a second


@dataclass(frozen=True, slots=True)
class Pod:
    """What discovery needs of a pod."""

    uid: str
    name: str
    role: str  # the component label of its Service; pods of other components are not looked at
    url: str = ""  # tcp://address:port of a worker's links, http://address:port of a router; "": no such port
    ready: bool = False
    terminating: bool = False  # it has a deletionTimestamp


@dataclass(frozen=True, slots=True)
class PodSlice:
    """One EndpointSlice: some of the pods of one Service."""

    name: str
    pods: tuple[Pod, ...]


class PodsOfSlices:
    """The slices there are, and their pods. `now` in seconds, of any steady clock."""

    def __init__(self) -> None:
        self.by_uid: dict[str, Pod] = {}
        self._slices: dict[str, PodSlice] = {}
        self._absent_since: dict[str, float] = {}  # by uid

    def replace_all(self, slices: Iterable[PodSlice], now: float) -> None:
        """Replace what is known: `slices` are all there are."""
        self._slices = {each.name: each for each in slices}
        self.refresh(now)

    def put(self, changed: PodSlice, now: float) -> None:
        """A slice is new or has changed."""
        self._slices[changed.name] = changed
        self.refresh(now)

    def remove(self, name: str, now: float) -> None:
        """A slice has gone."""
        self._slices.pop(name, None)
        self.refresh(now)

    def refresh(self, now: float) -> None:
        """Let pods go that have been absent for long enough."""
        present = _united(pod for each in self._slices.values() for pod in each.pods)
        since = {uid: self._absent_since.get(uid, now) for uid in self.by_uid if uid not in present}
        self._absent_since = {uid: at for uid, at in since.items() if now < at + ABSENT_SECONDS}
        absent = {uid: replace(self.by_uid[uid], ready=False) for uid in self._absent_since}
        self.by_uid = present | absent

    @property
    def absent(self) -> Collection[str]:
        """The uids of the pods that no slice names."""
        return self._absent_since.keys()

    @property
    def refresh_at(self) -> float | None:
        """When the next absent pod is gone, if nothing else comes; None: no pod is absent."""
        return min(self._absent_since.values()) + ABSENT_SECONDS if self._absent_since else None


def _united(pods: Iterable[Pod]) -> dict[str, Pod]:
    found: dict[str, Pod] = {}
    for pod in pods:
        other = found.get(pod.uid, pod)
        best = min(other, pod, key=lambda each: (not each.url, "[" in each.url, each.url, each.role))
        found[pod.uid] = replace(
            best, ready=pod.ready or other.ready, terminating=pod.terminating or other.terminating
        )
    return found
