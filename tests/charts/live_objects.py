"""An API server that knows a few objects and can only be read: enough for Helm's `lookup`.

Discovery, `/version` and GET of one object; whatever else is asked for is not found. So a test can say what lives in a
cluster and see what an upgrade renders, without the cluster.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.charts.rendering import Object

RESOURCES = {  # by API version, the kinds that the chart makes: Helm asks where each is kept
    "v1": ("ConfigMap", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment",),
    "batch/v1": ("Job",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}
POLL_SECONDS = 0.01


def path_of(thing: Object) -> str:
    """Where the API has this object."""
    namespace, name = thing["metadata"]["namespace"], thing["metadata"]["name"]
    return f"{_root(thing['apiVersion'])}/namespaces/{namespace}/{_plural(thing['kind'])}/{name}"


@contextlib.contextmanager
def cluster_of(live: list[Object], folder: Path) -> Iterator[str]:
    """The path of a kubeconfig for a cluster in which these objects live."""
    answers = _discovery() | {path_of(thing): thing for thing in live}

    class ApiHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            missing = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "NotFound",
                "code": 404,
            }
            body = json.dumps(missing if answer is None else answer).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Nothing: pytest would show it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), ApiHandler) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,))
        serving.start()
        try:
            yield _kubeconfig(f"http://127.0.0.1:{server.server_address[1]}", folder)
        finally:
            server.shutdown()
            serving.join()


def _plural(kind: str) -> str:
    return "networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s"


def _group(api: str) -> Object:
    name, _, number = api.partition("/")
    version = {"groupVersion": api, "version": number}
    return {"name": name, "versions": [version], "preferredVersion": version}


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _discovery() -> dict[str, Any]:
    groups = [_group(api) for api in RESOURCES if "/" in api]
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "29", "gitVersion": "v1.29.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for api, kinds in RESOURCES.items():
        listed = [
            {"name": _plural(kind), "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
            for kind in kinds
        ]
        answers[_root(api)] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": api,
            "resources": listed,
        }
    return answers


def _kubeconfig(url: str, folder: Path) -> str:
    file = folder / "kubeconfig"
    context = {"name": "live", "context": {"cluster": "live", "user": "nobody"}}
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "live",
                "clusters": [{"name": "live", "cluster": {"server": url}}],
                "users": [{"name": "nobody", "user": {}}],
                "contexts": [context],
            }
        ),
        encoding="utf-8",
    )
    return str(file)
