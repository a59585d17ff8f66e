"""NetworkPolicies as Kubernetes means them, over pods on paper: who may reach whom, at which port.

A pod that no policy selects takes everything; one that is selected takes what any of its policies allows. Both ends
have a say: the egress rules of the sender and the ingress rules of the receiver. Named ports are the receiver's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.charts.rendering import Object, selects


@dataclass(frozen=True)
class PolicyEndpoint:
    """Somebody on the network: a pod if it has labels, else an address outside."""

    labels: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    namespace: str = "serving"
    outside: bool = False


def may_reach(policies: Sequence[Object], source: PolicyEndpoint, target: PolicyEndpoint, port: int) -> bool:
    """Whether a connection from `source` to this TCP port of `target` is allowed."""
    return _side_allows(policies, "Ingress", target, source, target, port) and _side_allows(
        policies, "Egress", source, target, target, port
    )


def _side_allows(
    policies: Sequence[Object],
    direction: str,
    here: PolicyEndpoint,
    there: PolicyEndpoint,
    target: PolicyEndpoint,
    port: int,
) -> bool:
    mine = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"]["policyTypes"]
        and not here.outside
        and policy["metadata"]["namespace"] == here.namespace
        and selects(policy["spec"]["podSelector"], here.labels)
    ]
    ends = "from" if direction == "Ingress" else "to"
    rules = [rule for spec in mine for rule in spec.get(direction.lower(), [])]
    return not mine or any(
        _peers_allow(rule.get(ends), here, there) and _ports_allow(rule.get("ports"), target, port)
        for rule in rules
    )


def _peers_allow(peers: list[Object] | None, here: PolicyEndpoint, there: PolicyEndpoint) -> bool:
    """No peers: anybody. A block of addresses holds no pods here."""
    return peers is None or any(_is_peer(peer, here, there) for peer in peers)


def _is_peer(peer: Object, here: PolicyEndpoint, there: PolicyEndpoint) -> bool:
    if "ipBlock" in peer:
        return there.outside
    if there.outside:
        return False
    if "namespaceSelector" in peer:
        in_namespace = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": there.namespace})
    else:
        in_namespace = there.namespace == here.namespace
    return in_namespace and selects(peer.get("podSelector", {}), there.labels)


def _ports_allow(ports: list[Object] | None, target: PolicyEndpoint, port: int) -> bool:
    return ports is None or any(_is_port(each, target, port) for each in ports)


def _is_port(rule: Object, target: PolicyEndpoint, port: int) -> bool:
    if rule.get("protocol", "TCP") != "TCP":
        return False
    if isinstance(rule["port"], str):
        return target.ports.get(rule["port"]) == port
    return int(rule["port"]) == port
