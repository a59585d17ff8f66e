"""`helm install` serves, KV really moves between pods, and `kubectl scale` is all there is to scaling."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import httpx2
import pytest

from shared.process.api_keys import key_line, new_key
from tests.cluster.conftest import LATER
from tests.cluster.kubernetes import image_tag
from tests.cluster.load import Plan, run_streams
from tests.cluster.release import ADMIN_PORT, NAME, HelmRelease
from tests.waiting import until

# The first one's set-up starts a cluster and asks for all undisturbed answers, which takes minutes of a slow machine.
pytestmark = pytest.mark.timeout(300, func_only=True)

SIZES_MAX = {"segue-router": 400e6, "segue-worker": 1.6e9}  # bytes


def test_images_are_as_small_as_promised() -> None:
    listed = subprocess.run(
        ["buildah", "images", "--json"], capture_output=True, text=True, check=True
    ).stdout
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
    sizes = {}
    for image in json.loads(listed):
        number, unit = image["size"].split()
        sizes.update(dict.fromkeys(image["names"] or [], float(number) * units[unit]))
    for name, bytes_max in SIZES_MAX.items():
        assert 0 < sizes[f"localhost/{name}:{image_tag()}"] < bytes_max


def test_an_installed_release_serves_and_its_own_test_passes(
    release: HelmRelease, undisturbed: dict[str, str]
) -> None:
    assert all(len(text) > 100 for text in undisturbed.values())
    fetched_bytes = release.total("decode", "segue_kv_fetched_bytes_total")
    found = release.cluster.helm("test", NAME, "--logs")
    assert release.total("decode", "segue_kv_fetched_bytes_total") > fetched_bytes
    assert re.search(r"\d+ bytes of KV moved for it in .* MB/s", found), found


def test_on_a_network_that_enforces_no_policies_a_release_fails_its_own_test(release: HelmRelease) -> None:
    if release.cluster.context:
        pytest.skip("of the cluster beside the checkout it is known that it enforces none")
    release.upgrade("--set", "networkPolicy.verify=true")
    with pytest.raises(AssertionError, match="isolation"):
        release.cluster.helm("test", NAME)
    said = release.cluster.kubectl("logs", f"{NAME}-isolation")
    assert "does not enforce NetworkPolicies" in said
    release.cluster.kubectl("delete", "pod", f"{NAME}-isolation")
    release.upgrade()


def test_the_commands_that_an_installation_prints_lead_to_an_answer(release: HelmRelease) -> None:
    if release.cluster.context:
        pytest.skip("the printed commands are for the current context")
    release.wait_for("router", 1)
    notes = release.cluster.helm("get", "notes", NAME)
    commands = [line.strip() for line in notes.splitlines() if line.startswith("  ")][:4]
    assert [command.split()[0] for command in commands] == ["kubectl", "kubectl", "export", "curl"]
    script = "\n".join(["trap 'kill $(jobs -p)' EXIT", *commands])
    done = subprocess.run(
        ["bash", "-c", script], env=release.cluster.environment, capture_output=True, text=True, timeout=120
    )
    assert "data: [DONE]" in done.stdout, done.stdout + done.stderr


def test_a_key_is_given_and_revoked_in_the_secret_without_a_restart(release: HelmRelease) -> None:
    """The kubelet brings a changed Secret into a pod within two minutes, and at once where the pod changes, too."""
    restarts = [pod.restarts for pod in release.cluster.pods("router")]
    first = release.cluster.get("secret", f"{NAME}-api-keys")["data"]["keys"]
    second = new_key()

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx2.get(f"{release.url}/v1/models", headers=headers, timeout=30).status_code

    def write(keys: str) -> None:
        patch = json.dumps({"data": {"keys": keys}})
        release.cluster.kubectl("patch", "secret", f"{NAME}-api-keys", "--patch", patch)
        for pod in release.cluster.pods("router"):
            release.cluster.kubectl("annotate", "pod", pod.name, "--overwrite", f"tests/keys={monotonic()}")

    assert (status(release.api_key), status(second), status("")) == (200, 401, 401)
    line = f"{key_line('second', second)}\n".encode()
    try:
        write(base64.b64encode(line).decode())
        until(lambda: (status(release.api_key), status(second)) == (401, 200), 180, "the Secret in the pod")
    finally:
        write(first)
    until(lambda: (status(release.api_key), status(second)) == (200, 401), 180, "the first Secret again")
    assert [pod.restarts for pod in release.cluster.pods("router")] == restarts


def test_every_router_tells_of_a_request_that_one_of_them_served(release: HelmRelease) -> None:
    release.scale("router", 2)
    release.wait_for("router", 2)
    body = {"model": "smollm2", "prompt": "One", "max_tokens": 2}
    rid = httpx2.post(
        f"{release.url}/v1/completions", json=body, headers=release.headers, timeout=30
    ).headers["x-request-id"]
    routers = release.cluster.pods("router")
    shown = [release.cluster.page(pod, ADMIN_PORT, f"/debug/requests/{rid}") for pod in routers]
    assert len(shown) == 2
    assert shown[0] == shown[1]
    for component in ("prefill", "decode"):
        assert f'"{release.cluster.pods(component)[0].name}/' in shown[0]
    release.scale("router", 1)
    release.wait_for("router", 1)


def test_a_new_decode_pod_gets_traffic_within_two_seconds_of_its_readiness(release: HelmRelease) -> None:
    old = {pod.name for pod in release.cluster.pods("decode")}
    release.scale("decode", 2)
    until(lambda: len(release.cluster.pods("decode")) == 2, 30, "a second pod")
    new = next(pod.name for pod in release.cluster.pods("decode") if pod.name not in old)
    release.cluster.kubectl("wait", "--for=condition=Ready", f"pod/{new}", "--timeout=4m")
    ready_at = monotonic()

    def served() -> bool:
        body = {"model": "smollm2", "prompt": "One", "max_tokens": 2}
        answer = httpx2.post(
            f"{release.url}/v1/completions", json=body, headers=release.headers, timeout=30
        ).raise_for_status()
        workers = release.debug(answer.headers["x-request-id"])["workers"]
        return any(visit["worker"].startswith(f"{new}/") for visit in workers)

    until(served, 30, "a request on the new pod")
    assert monotonic() - ready_at < 2
    release.scale("decode", 1)
    release.wait_for("decode", 1)


def test_with_no_decode_pod_requests_are_held_until_one_is_back(release: HelmRelease) -> None:
    release.scale("decode", 0)
    until(lambda: not release.cluster.pods("decode"), 60, "the end of all decode pods")
    plans = [Plan(plan.prompt, 8) for plan in LATER]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run_streams, release.url, release.api_key, plans, "held")
        until(
            lambda: release.total("router", "segue_requests_running{state=waiting}") >= 4, 30, "held requests"
        )
        release.scale("decode", 1)
        report = waiting.result(120)
    assert [stream.ends for stream in report.streams] == [["length"]] * 4
    release.wait_for("decode", 1)


def test_by_default_prompts_go_the_shorter_way(release: HelmRelease, undisturbed: dict[Plan, str]) -> None:
    """The other tests have prefill pods compute them all."""
    release.upgrade("--set", "router.config.localPrefill=short")
    release.wait_for("router", 1)
    for _ in range(2):  # at first nobody has told how fast it is
        report = run_streams(release.url, release.api_key, LATER, "the shorter way")
        assert {stream.text for stream in report.streams} == {undisturbed[plan] for plan in LATER}
    assert release.total("router", "segue_router_local_prompts_total{why=sooner}") > 0
    assert release.total("prefill", "segue_worker_requests_total{outcome=received}") > 0
    found = release.cluster.helm("test", NAME, "--logs")
    assert re.search(r"\d+ bytes of KV moved for it in .* MB/s", found), found
    release.upgrade()
    release.wait_for("router", 1)


def test_kv_moves_by_the_other_transport_where_it_is_acknowledged(
    release: HelmRelease, undisturbed: dict[Plan, str]
) -> None:
    """The other tests run over the transport that the chart takes; this one goes to NIXL over TCP and back."""
    assert transports(release) == {"tls"}
    release.upgrade("--set", "kv.transport=nixl,kv.allowUnauthenticatedTcp=true")
    for component in ("prefill", "decode"):
        release.wait_for(component, 1)
    fetched_bytes = release.total("decode", "segue_kv_fetched_bytes_total")
    report = run_streams(release.url, release.api_key, LATER, "nixl over tcp")
    assert {stream.text for stream in report.streams} == {undisturbed[plan] for plan in LATER}
    assert release.total("decode", "segue_kv_fetched_bytes_total") > fetched_bytes
    assert transports(release) == {"nixl"}
    release.upgrade()
    for component in ("prefill", "decode"):
        release.wait_for(component, 1)


def transports(release: HelmRelease) -> set[str]:
    """What the Deployments tell their workers."""
    workers = [release.cluster.get("deployment", f"{NAME}-{role}") for role in ("prefill", "decode")]
    return {
        variable["value"]
        for worker in workers
        for variable in worker["spec"]["template"]["spec"]["containers"][0]["env"]
        if variable["name"] == "SEGUE_KV_TRANSPORT"
    }
