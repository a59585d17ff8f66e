"""The `restricted` level of Kubernetes' Pod Security Standards, as a function over a pod's spec.

Written from https://kubernetes.io/docs/concepts/security/pod-security-standards/ and nothing else; each rule yields the
field and the reason. Windows pods and the user-namespace relaxations are left out: the chart has neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Spec = dict[str, Any]

VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected",
    "secret",
}  # fmt: skip
SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
}  # fmt: skip
SECCOMP = {"RuntimeDefault", "Localhost"}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def violations(spec: Spec) -> list[str]:
    """What keeps this pod out of a namespace of level `restricted`."""
    found = list(_of_the_pod(spec))
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind, []):
            found += [f"{container['name']}: {each}" for each in _of_a_container(container, spec)]
    return found


def _of_the_pod(spec: Spec) -> Iterator[str]:
    context = spec.get("securityContext", {})
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    for volume in spec.get("volumes", []):
        yield from (f"volume {kind}" for kind in sorted(set(volume) - {"name"} - VOLUMES))
    unsafe = {each["name"] for each in context.get("sysctls", [])} - SYSCTLS
    yield from (f"sysctl {name}" for name in sorted(unsafe))
    yield from _of_identity(context)


def _of_identity(context: Spec) -> Iterator[str]:
    """Fields that pods and containers have alike."""
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type", "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions"
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") == "Unconfined":
        yield "appArmorProfile"


def _of_a_container(container: Spec, spec: Spec) -> Iterator[str]:
    own, pod = container.get("securityContext", {}), spec.get("securityContext", {})
    yield from _of_identity(own)
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in SECCOMP:
        yield "seccompProfile"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities are not dropped"
    added = set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}
    yield from (f"capability {name}" for name in sorted(added))
    yield from (f"hostPort {port['hostPort']}" for port in container.get("ports", []) if port.get("hostPort"))
