"""List and watch of pods at the Kubernetes API server: one blocking conversation, every wait of it bounded.

The official client brings the credentials (a pod's service account, or the file that KUBECONFIG names), TLS and the
request. The answers are read here, as bytes, and only the few fields that discovery needs are decoded: a list of
hundreds of pods is megabytes, and `client.Watch` would build the client's full model of each of them.

Knows neither links nor what a pod means; its caller decides what to do after an error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import urllib3
from kubernetes import client, config

from router.discovery.known_pods import (
    Changed,
    Denied,
    Listed,
    Observation,
    Pod,
    Removed,
    Unreachable,
    Watching,
)
from shared.errors import SegueError, StartError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
COMPONENT = "app.kubernetes.io/component"
# By component: the scheme of its URL, and the name of its container port.
PORTS = {"router": ("http", "admin"), "prefill": ("tcp", "links"), "decode": ("tcp", "links")}
CONNECT_SECONDS_MAX = 3.0
LIST_SECONDS_MAX = 10.0  # hundreds of pods are some megabytes
GRACE_SECONDS = 2.0  # for the last bytes of a watch that the server ends in time
FORBIDDEN, GONE = 403, 410
READING_ERRORS = (urllib3.exceptions.HTTPError, OSError, msgspec.MsgspecError)


class NoAnswerError(SegueError):
    """The API server was not reached or refused; `observation` says which."""

    def __init__(self, observation: Unreachable | Denied):
        super().__init__(str(observation))
        self.observation = observation


class WatchEndedError(SegueError):
    """A watch ended otherwise than by its time limit, or cannot begin where the last one ended: list again."""


class _Metadata(msgspec.Struct, rename="camel"):
    uid: str = ""
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Port(msgspec.Struct, rename="camel"):
    container_port: int
    name: str = ""


class _Container(msgspec.Struct):
    ports: list[_Port] | None = None


class _Spec(msgspec.Struct):
    containers: list[_Container] | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct):
    phase: str = ""
    ip: str = msgspec.field(name="podIP", default="")
    conditions: list[_Condition] | None = None


class _PodObject(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _PodList(msgspec.Struct):
    metadata: _Metadata
    items: list[_PodObject] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Failure(msgspec.Struct):
    """The API server's `Status`."""

    code: int = 0
    message: str = ""


class PodApi:
    """The pods of one namespace that a label selector selects. For one thread, but for `interrupt`."""

    def __init__(self, api: client.CoreV1Api, namespace: str, selector: str):
        self._api = api
        self._namespace = namespace
        self._selector = selector
        self._version = ""  # of the last list or event
        self._watched: urllib3.BaseHTTPResponse | None = None

    def list_pods(self) -> Listed:
        """All pods as of now. Raises `NoAnswerError`."""
        deadline = time.monotonic() + LIST_SECONDS_MAX
        with (
            self._request("list", LIST_SECONDS_MAX) as response,
            _no_answer_for_trouble("list", self._namespace),
        ):
            listed = msgspec.json.decode(b"".join(_chunks(response, deadline)), type=_PodList)
        self._version = listed.metadata.resource_version
        return Listed(tuple(_pod(each) for each in listed.items or ()))

    def watch_pods(self, seconds: int) -> Iterator[Observation]:
        """`Watching`, then the changes since the last list or event, for at most this many seconds.

        Raises `NoAnswerError` when the watch is not accepted, `WatchEndedError` when it ends before its time or the
        history since then is no longer kept (410).
        """
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        since = {"watch": True, "timeout_seconds": seconds, "resource_version": self._version}
        with self._request("watch", seconds + GRACE_SECONDS, **since) as response:
            self._watched = response
            yield Watching()
            try:
                for line in _lines(_chunks(response, deadline)):
                    yield from self._event(msgspec.json.decode(line, type=_Event))
            except READING_ERRORS as error:
                raise WatchEndedError(_sentence(error)) from error
            finally:
                self._watched = None

    def interrupt(self) -> None:
        """Let a watch that is being read end at once; from any thread."""
        watched = self._watched
        if watched is not None:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # it ended by itself meanwhile
                watched.shutdown()

    def _event(self, event: _Event) -> Iterator[Observation]:
        if event.type == "ERROR":
            failure = msgspec.json.decode(event.object, type=_Failure)
            raise WatchEndedError(f"{failure.code}: {failure.message}")
        found = msgspec.json.decode(event.object, type=_PodObject)
        self._version = found.metadata.resource_version
        if event.type in ("ADDED", "MODIFIED"):
            yield Changed(_pod(found))
        elif event.type == "DELETED":
            yield Removed(found.metadata.uid)

    @contextmanager
    def _request(self, verb: str, read_seconds: float, **limits: Any) -> Iterator[urllib3.BaseHTTPResponse]:
        """The open answer to a request that was accepted."""
        with _no_answer_for_trouble(verb, self._namespace):
            response: Any = self._api.list_namespaced_pod(
                self._namespace,
                label_selector=self._selector,
                _preload_content=False,
                _request_timeout=(CONNECT_SECONDS_MAX, read_seconds),
                **limits,
            )
        try:
            yield response
        finally:
            response.close()  # not back to the pool: the rest of a watch may still be in it


def connect() -> client.CoreV1Api:
    """A client with the credentials of KUBECONFIG, where that is set, else of this pod's service account.

    Raises `StartError` where there are none.
    """
    settings = client.Configuration()
    settings.retries = False  # its caller retries, at its own pace
    try:
        if file := os.environ.get("KUBECONFIG"):
            config.load_kube_config(file, client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise StartError(
            f"--discovery kubernetes needs a pod's service account, or KUBECONFIG: {_sentence(error)}"
        ) from None
    return client.CoreV1Api(client.ApiClient(settings))


def own_namespace() -> str:
    """The namespace of the pod that this process is in; raises `StartError` where it is in none."""
    try:
        return (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        raise StartError("--namespace is required outside a pod: where are the workers' pods?") from None


def _pod(found: _PodObject) -> Pod:
    conditions = {each.type: each.status for each in found.status.conditions or ()}
    role = (found.metadata.labels or {}).get(COMPONENT, "")
    return Pod(
        uid=found.metadata.uid,
        name=found.metadata.name,
        role=role,
        url=_url(found, *PORTS[role]) if role in PORTS else "",
        ready=conditions.get("Ready") == "True",
        terminating=found.metadata.deletion_timestamp is not None,
        ended=found.status.phase in ("Succeeded", "Failed"),
    )


def _url(found: _PodObject, scheme: str, name: str) -> str:
    containers = found.spec.containers or ()
    ports = [port for container in containers for port in container.ports or () if port.name == name]
    if not ports or not found.status.ip:
        return ""
    host = f"[{found.status.ip}]" if ":" in found.status.ip else found.status.ip
    return f"{scheme}://{host}:{ports[0].container_port}"


def _chunks(response: urllib3.BaseHTTPResponse, deadline: float) -> Iterator[bytes]:
    """The body as it comes. The client's own limit is on each wait; this one is on a server that trickles."""
    for chunk in response.stream(amt=None):
        yield chunk
        if time.monotonic() > deadline:
            raise TimeoutError("it went on past its time limit")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)


@contextmanager
def _no_answer_for_trouble(verb: str, namespace: str) -> Iterator[None]:
    try:
        yield
    except client.ApiException as error:
        if error.status == GONE:
            raise WatchEndedError(f"{GONE}: the history is no longer kept") from error
        raise NoAnswerError(_refusal(verb, namespace, error)) from error
    except (config.ConfigException, *READING_ERRORS) as error:
        raise NoAnswerError(Unreachable(f"{verb} of pods: {_sentence(error)}")) from error


def _refusal(verb: str, namespace: str, error: client.ApiException) -> Unreachable | Denied:
    try:
        detail = msgspec.json.decode(error.body or b"", type=_Failure).message
    except msgspec.MsgspecError:
        detail = error.reason or ""
    if error.status == FORBIDDEN:
        return Denied(verb, namespace, detail)
    return Unreachable(f"{verb} of pods was answered by {error.status}: {' '.join(detail.split())}")


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
