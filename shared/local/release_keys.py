"""Keeps the keys of a release on Kubernetes: makes its Secrets where they are missing, and removes those that it made.

    python -m shared.local.release_keys create --unless-deployment=NAME --links-router=SECRET …
    python -m shared.local.release_keys remove --unless-deployment=NAME SECRET…

The chart runs the first before each installation and upgrade and the second when the release is gone, each in a Job
with a service account of its own (charts/segue/templates/_keys.tpl). A Secret that is there is never changed, whoever
made it, but those of the links have to admit each other. They are drawn together, since each has the certificates of
both: one without the other is an error that a person has to look at, unless a Job that was ended has left it before
there was a release. Secrets are made, never written over, so two Jobs at a time cannot mix their keys.

It asks for three things of the API, so it speaks HTTP itself: the official client is known to discovery alone.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from shared.links.keys import LINK_ROLES, LinkKeys, LinkRole, new_key_files, parse_keys
from shared.primitives.errors import StartError
from shared.process.api_keys import key_line, new_key

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAKER, MADE_HERE = "app.kubernetes.io/managed-by", "segue-keys"  # the label of what this made, and may remove
COMPONENT = "app.kubernetes.io/component"
REQUEST_SECONDS_MAX = 20.0
REACH_SECONDS_MAX = 60.0  # a network may let a new pod out some seconds late
RETRY_SECONDS = 1.0
HALF_SECONDS = 45.0  # so long an evicted pod may be at the other half: its grace is 30 s
ANSWER_BYTES_MAX = 4 << 20
NOT_FOUND, CONFLICT = 404, 409


class ApiUnreachableError(StartError):
    """The API server gave no answer at all."""


class _StaysHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token would go along, to wherever it points."""

    def redirect_request(self, *_redirect: object) -> None:
        """None: the answer counts as a refusal."""


@dataclass(frozen=True, slots=True)
class ReleaseApi:
    """The Secrets and Deployments of one namespace, as a pod's service account reaches them."""

    url: str
    namespace: str
    token: str = field(repr=False)
    authority: Path | None = None  # a file of certificates; None: what the machine trusts

    @classmethod
    def of_this_pod(cls, account: Path = ACCOUNT) -> ReleaseApi:
        """What Kubernetes tells every pod. Raises StartError outside one."""
        try:
            host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            token, namespace = (
                (account / name).read_text(encoding="utf-8").strip() for name in ("token", "namespace")
            )
        except (KeyError, OSError):
            raise StartError(
                "expected to run in a pod with the token of a service account, and met none"
            ) from None
        return cls(
            f"https://{f'[{host}]' if ':' in host else host}:{port}", namespace, token, account / "ca.crt"
        )

    def secret(self, name: str) -> dict[str, Any] | None:
        """The Secret of this name; None where there is none. Raises StartError."""
        return self._read(f"{self._secrets}/{name}")

    def create(self, secret: Mapping[str, Any]) -> bool:
        """Whether it was made; False where another of its name is there. Raises StartError."""
        try:
            return (
                self._asked("POST", self._secrets, json.dumps(secret).encode(), absent=CONFLICT) is not None
            )
        except ApiUnreachableError:  # perhaps only the answer was lost
            found = self.secret(secret["metadata"]["name"])
            if found is None:
                raise
            return bool(found.get("data") == secret["data"])

    def delete(self, name: str) -> bool:
        """Whether there was a Secret to delete. Raises StartError."""
        return self._asked("DELETE", f"{self._secrets}/{name}", absent=NOT_FOUND) is not None

    def has_deployment(self, name: str) -> bool:
        """Whether there is one that nobody has deleted. Raises StartError."""
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{name}"
        found = self._read(path)
        return found is not None and "deletionTimestamp" not in found["metadata"]

    @property
    def _secrets(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/secrets"

    def _read(self, path: str) -> dict[str, Any] | None:
        """What is there. Only this is asked again where no answer comes: whatever comes first is a question."""
        deadline = monotonic() + REACH_SECONDS_MAX
        while True:
            try:
                return self._asked("GET", path, absent=NOT_FOUND)
            except ApiUnreachableError:
                if monotonic() > deadline:
                    raise
                sleep(RETRY_SECONDS)

    def _asked(
        self, verb: str, path: str, body: bytes | None = None, *, absent: int
    ) -> dict[str, Any] | None:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data=body, headers=headers, method=verb)
        try:
            trust = ssl.create_default_context(cafile=str(self.authority)) if self.authority else None
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}),  # no proxy of the environment sees the token, either
                urllib.request.HTTPSHandler(context=trust),
                _StaysHere,
            )
            with opener.open(request, timeout=REQUEST_SECONDS_MAX) as response:
                answer: dict[str, Any] = json.loads(response.read(ANSWER_BYTES_MAX))
                return answer
        except urllib.error.HTTPError as error:
            with error:
                if error.code == absent:
                    return None
                said = _message(error.read(ANSWER_BYTES_MAX))
            raise StartError(f"the API server answered {verb} {path} with {error.code}: {said}") from None
        except (OSError, ValueError) as error:
            raise ApiUnreachableError(
                f"the API server gave no answer to {verb} {path} at {self.url}: {error}; may this pod reach it "
                "(networkPolicy.egress.apiServerPorts, apiServerTo)?"
            ) from None


def _message(answer: bytes) -> str:
    """The sentence in an answer that refuses."""
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:500].decode("utf-8", "replace")


def create_links(
    api: ReleaseApi, names: Mapping[LinkRole, str], metadata: Mapping[str, Any], deployment: str
) -> list[str]:
    """Make both Secrets of the links, if there is none, and return a line for each. Raises StartError.

    Whoever made them, they have to admit each other at the end. Half of a pair is deleted and drawn anew where no pod
    can have it: it was made here, and there is no such Deployment.
    """
    found = _both_or_none(api, names, deployment)
    told = [_stays(each) for each in found.values()] if found else _draw_links(api, names, metadata)
    keys = {role: _link_keys(api, name, role) for role, name in names.items()}
    router, worker = keys["router"], keys["worker"]
    if not (router.own.public in worker.peers and worker.own.public in router.peers):
        raise StartError(
            f"the keys in Secrets {names['router']} and {names['worker']} do not admit each other, so nothing could be "
            "linked: expected the certificate of each in the other; bring back a pair, or delete both and try again"
        )
    return told


def _both_or_none(
    api: ReleaseApi, names: Mapping[LinkRole, str], deployment: str
) -> dict[LinkRole, dict[str, Any]]:
    deadline = monotonic() + HALF_SECONDS
    while True:
        found = {role: one for role, name in names.items() if (one := api.secret(name)) is not None}
        if len(found) != 1:
            return found
        [(role, half)] = found.items()
        there, [missing] = names[role], set(names.values()) - {names[role]}
        if not _made_here(half) or api.has_deployment(deployment):
            raise StartError(
                f"Secret {there} is there and Secret {missing} is not, but their keys belong together: bring {missing} "
                f"back from where it is kept, or delete {there}, too, try again, and restart all pods of the release"
            )
        if monotonic() >= deadline:
            api.delete(there)
            return {}
        sleep(RETRY_SECONDS)


def _draw_links(api: ReleaseApi, names: Mapping[LinkRole, str], metadata: Mapping[str, Any]) -> list[str]:
    files = new_key_files()
    made: list[str] = []
    try:
        for role in LINK_ROLES:
            if not api.create(secret(names[role], "links", {"keys.pem": files[role]}, metadata)):
                raise StartError(f"Secret {names[role]} was made by somebody else meanwhile: try again")
            made.append(names[role])
    except StartError:
        for name in made:  # half of a pair is of no use
            api.delete(name)
        raise
    return [f"Secret {name} is made" for name in made]


def _link_keys(api: ReleaseApi, name: str, role: LinkRole) -> LinkKeys:
    """What the pods will read there."""
    found = api.secret(name)
    if found is None:
        raise StartError(f"Secret {name} was deleted by somebody else meanwhile: try again")
    try:
        return parse_keys(base64.b64decode((found.get("data") or {}).get("keys.pem", "")), role)
    except ValueError as error:
        raise StartError(
            f"Secret {name} is there, but its keys.pem {error}; bring back the Secret, or delete both of the links and "
            "try again"
        ) from None


def _made_here(found: Mapping[str, Any]) -> bool:
    return (found["metadata"].get("labels") or {}).get(MAKER) == MADE_HERE


def _stays(found: Mapping[str, Any]) -> str:
    about = found["metadata"]
    maker = (about.get("labels") or {}).get(MAKER, "nobody")
    made_at = about.get("creationTimestamp", "a time that is not known")
    stays = f"Secret {about['name']} is there and stays as it is"
    return f"{stays}: it names {maker} as its maker, and was made at {made_at}"


def create_api_keys(api: ReleaseApi, name: str, metadata: Mapping[str, Any]) -> str:
    """Make the Secret of the clients' keys, if there is none, and return a line. Raises StartError."""
    key = new_key()
    content = {"api-key": key.encode(), "keys": f"{key_line('default', key)}\n".encode()}
    found = api.secret(name)
    if found is None and api.create(secret(name, "router", content, metadata)):
        return f"Secret {name} is made, with one key for clients"
    return _stays(found or api.secret(name) or {"metadata": {"name": name}})


def remove(api: ReleaseApi, names: Sequence[str], deployment: str) -> list[str]:
    """Delete those of the Secrets that were made here, and return a line for each. Raises StartError.

    Nothing while this Deployment is there: then the release is, and somebody has applied all objects of the chart, also
    the Jobs that belong to its end.
    """
    if api.has_deployment(deployment):
        return [f"Deployment {deployment} is there, and so is the release: its keys stay"]
    told = []
    for name in names:
        found = api.secret(name)
        if found is not None and _made_here(found) and api.delete(name):
            told.append(f"Secret {name} is removed")
        else:
            told.append(
                f"Secret {name} is not there"
                if found is None
                else f"Secret {name} is not of this Job and stays"
            )
    return told


def secret(
    name: str, component: str, files: Mapping[str, bytes], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """A Secret with these files, labels and annotations, as Kubernetes wants it."""
    labels = {**metadata.get("labels", {}), COMPONENT: component, MAKER: MADE_HERE}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**metadata, "name": name, "labels": labels},
        "type": "Opaque",
        "data": {file: base64.b64encode(content).decode() for file, content in files.items()},
    }


def run(arguments: Sequence[str], api: ReleaseApi) -> list[str]:
    """Do what the command line says, and return what was done, a line each. Raises StartError."""
    said = _parser().parse_args(arguments)
    if said.verb == "remove":
        return remove(api, said.secrets, said.unless_deployment)
    told = []
    if said.links_router:
        names: dict[LinkRole, str] = {"router": said.links_router, "worker": said.links_worker}
        told += create_links(api, names, said.metadata, said.unless_deployment)
    if said.api_keys:
        told.append(create_api_keys(api, said.api_keys, said.metadata))
    return told


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="release_keys")
    verbs = parser.add_subparsers(dest="verb", required=True)
    create = verbs.add_parser("create")
    for name in ("--links-router", "--links-worker", "--api-keys"):
        create.add_argument(name, default="")
    create.add_argument("--metadata", type=json.loads, default={})
    removing = verbs.add_parser("remove")
    for each in (create, removing):
        each.add_argument("--unless-deployment", required=True)
    removing.add_argument("secrets", nargs="+")
    return parser


def main() -> None:
    """Print what was done and exit with 0, or print one sentence and exit with 1."""
    try:
        told = run(sys.argv[1:], ReleaseApi.of_this_pod())
    except StartError as error:
        sys.exit(f"segue keys: {error}")
    sys.stdout.writelines(f"{line}\n" for line in told)


if __name__ == "__main__":
    main()
