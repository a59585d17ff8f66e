"""List and watch of EndpointSlices at the Kubernetes API server: one blocking conversation, every wait of it bounded.

A slice has all that discovery needs of a pod: its uid, name, address, ports, and whether it is Ready or terminating.
A router needs no permission to read pods, whose specs hold the environment of every container of the namespace.

The official client brings the credentials (a pod's service account, or the file that KUBECONFIG names), TLS and the
request. It keeps a token for a minute; so it is made anew after each failure, and a rotated token is read at once (the
CA bundle is read for each connection). The answers are read here, as bytes, and only the few fields that discovery
needs are decoded: `client.Watch` would build the client's full model of each object.

Knows neither links nor what a pod means; its caller decides what to do after an error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import urllib3
from kubernetes import client, config

from router.discovery.known_pods import Changed, Denied, Listed, Observation, Removed, Unreachable, Watching
from router.discovery.pods_of_slices import Pod, PodSlice
from shared.primitives.errors import SegueError, StartError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
COMPONENT = "app.kubernetes.io/component"
# By component: the scheme of its URL, and the name of its Service's port.
PORTS = {"router": ("http", "admin"), "prefill": ("tcp", "links"), "decode": ("tcp", "links")}
CONNECT_SECONDS_MAX = 3.0
LIST_SECONDS_MAX = 10.0
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
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None


class _Port(msgspec.Struct):
    port: int | None = None
    name: str | None = None


class _Conditions(msgspec.Struct):
    """None: the API server does not say."""

    ready: bool | None = None  # serving and not terminating
    serving: bool | None = None  # the pod is Ready, also while it terminates
    terminating: bool | None = None


class _Target(msgspec.Struct):
    kind: str = ""
    uid: str = ""
    name: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    target_ref: _Target | None = None


class _SliceObject(msgspec.Struct, rename="camel"):
    metadata: _Metadata
    address_type: str = ""
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _SliceList(msgspec.Struct):
    metadata: _Metadata
    items: list[_SliceObject] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Failure(msgspec.Struct):
    """The API server's `Status`."""

    code: int = 0
    message: str = ""


class SliceApi:
    """The EndpointSlices of one namespace that a label selector selects. For one thread, but for `interrupt`."""

    def __init__(self, connect: Callable[[], client.DiscoveryV1Api], namespace: str, selector: str):
        """`connect` makes a client; what it raises at this first time is the caller's."""
        self._connect = connect
        self._client: client.DiscoveryV1Api | None = connect()
        self._namespace = namespace
        self._selector = selector
        self._version = ""  # of the last list or event
        self._watched: urllib3.BaseHTTPResponse | None = None

    def list_slices(self) -> Listed:
        """All slices as of now. Raises `NoAnswerError`."""
        deadline = time.monotonic() + LIST_SECONDS_MAX
        with self._request("list", LIST_SECONDS_MAX) as response, self._no_answer_for_trouble("list"):
            listed = msgspec.json.decode(b"".join(_chunks(response, deadline)), type=_SliceList)
        self._version = listed.metadata.resource_version
        return Listed(tuple(_slice(each) for each in listed.items or ()))

    def watch_slices(self, seconds: int) -> Iterator[Observation]:
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
        found = msgspec.json.decode(event.object, type=_SliceObject)
        self._version = found.metadata.resource_version
        if event.type in ("ADDED", "MODIFIED"):
            yield Changed(_slice(found))
        elif event.type == "DELETED":
            yield Removed(found.metadata.name)

    @contextmanager
    def _request(self, verb: str, read_seconds: float, **limits: Any) -> Iterator[urllib3.BaseHTTPResponse]:
        """The open answer to a request that was accepted."""
        with self._no_answer_for_trouble(verb):
            if self._client is None:
                self._client = self._connect()
            response: Any = self._client.list_namespaced_endpoint_slice(
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

    @contextmanager
    def _no_answer_for_trouble(self, verb: str) -> Iterator[None]:
        try:
            yield
        except client.ApiException as error:
            if error.status == GONE:
                raise WatchEndedError(f"{GONE}: the history is no longer kept") from error
            self._client = None
            raise NoAnswerError(_refusal(verb, self._namespace, error)) from error
        except (StartError, config.ConfigException, *READING_ERRORS) as error:
            self._client = None
            raise NoAnswerError(Unreachable(f"{verb} of endpointslices: {_sentence(error)}")) from error


def connect() -> client.DiscoveryV1Api:
    """A client with the credentials of KUBECONFIG, where that is set, else of this pod's service account.

    Raises `StartError` where there are none.
    """
    settings = client.Configuration()
    settings.retries = False  # its caller retries, at its own pace
    try:
        if file := os.environ.get("KUBECONFIG"):
            config.load_kube_config(file, client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            settings.proxy = None  # a proxy of the environment leads out of the cluster
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise StartError(
            f"--discovery kubernetes needs a pod's service account, or KUBECONFIG: {_sentence(error)}"
        ) from None
    return client.DiscoveryV1Api(client.ApiClient(settings))


def own_namespace() -> str:
    """The namespace of the pod that this process is in; raises `StartError` where it is in none."""
    try:
        return (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        raise StartError("--namespace is required outside a pod: where are the workers' pods?") from None


def _slice(found: _SliceObject) -> PodSlice:
    role = (found.metadata.labels or {}).get(COMPONENT, "")
    endpoints = (found.endpoints or ()) if found.address_type in ("IPv4", "IPv6") else ()
    pods = (_pod(each, each.target_ref, role, found.ports or []) for each in endpoints if each.target_ref)
    return PodSlice(found.metadata.name, tuple(pod for pod in pods if pod.uid))


def _pod(endpoint: _Endpoint, target: _Target, role: str, ports: list[_Port]) -> Pod:
    said = endpoint.conditions
    serving = said.serving if said.serving is not None else said.ready is not False
    return Pod(
        uid=target.uid if target.kind == "Pod" else "",
        name=target.name,
        role=role,
        url=_url(endpoint.addresses[0], ports, *PORTS[role]) if role in PORTS else "",
        ready=serving,
        terminating=said.terminating is True,
    )


def _url(address: str, ports: list[_Port], scheme: str, name: str) -> str:
    port = next((each.port for each in ports if each.name == name), None)
    host = f"[{address}]" if ":" in address else address
    return f"{scheme}://{host}:{port}" if port else ""


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


def _refusal(verb: str, namespace: str, error: client.ApiException) -> Unreachable | Denied:
    try:
        detail = msgspec.json.decode(error.body or b"", type=_Failure).message
    except msgspec.MsgspecError:
        detail = error.reason or ""
    if error.status == FORBIDDEN:
        return Denied(verb, namespace, detail)
    return Unreachable(f"{verb} of endpointslices was answered by {error.status}: {' '.join(detail.split())}")


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
