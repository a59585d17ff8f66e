"""Which transport the chart gives its workers: nothing that strangers can reach without a value that says so."""

from __future__ import annotations

import pytest

from tests.charts.rendering import environment, objects, pods

ACKNOWLEDGED_RDMA = ("rdma.enabled=true", "rdma.acknowledgeOpenFabric=true", "rdma.devices=mlx5_0:1")


@pytest.mark.parametrize(
    ("sets", "transport", "tcp", "devices"),
    [
        ((), "tls", "false", ""),
        (ACKNOWLEDGED_RDMA, "nixl", "false", "mlx5_0:1"),
        (("kv.transport=nixl", "kv.allowUnauthenticatedTcp=true"), "nixl", "true", ""),
    ],
)
def test_pods_use_tls_unless_rdma_or_open_tcp_is_acknowledged(
    sets: tuple[str, ...], transport: str, tcp: str, devices: str
) -> None:
    for role in ("prefill", "decode"):
        variables = environment(pods(objects(None, *sets))[role])
        assert variables["SEGUE_KV_TRANSPORT"] == transport
        assert variables["SEGUE_KV_ALLOW_UNAUTHENTICATED_TCP"] == tcp
        assert variables["SEGUE_KV_DEVICES"] == devices
