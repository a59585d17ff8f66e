"""Settings that every process of a deployment has: its name, where it listens, its links and its log.

What only workers have is in `worker_config`; what only one role has is in that role's `config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from shared.process.settings import Port, Seconds, Settings

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "console"]


class ProcessConfig(Settings):
    """Settings of every process."""

    groups: ClassVar[Mapping[str, str]] = {
        "network": "host admin_host admin_port link_keys_file",
        "tenants": "tenant_share_max",
        "time limits": "silence_seconds",
        "observation": "log_level log_format",
    }

    uid: str = Field(
        default="",
        description="Name of this process among the others, in a pod the pod's. Empty: host name and random digits.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on, * for all of both IP families. Loopback opens no port by accident.",
    )
    admin_host: str = Field(
        default="",
        description="Address that the admin port listens on, in the form of host. Empty: the same as host.",
    )
    link_keys_file: str = Field(
        default="",
        description="PEM file: the private key of this process for its links, and the certificates of all roles.",
    )
    admin_port: Port = Field(
        default=8001,
        description="Port of /livez, /readyz and /metrics, on a router of /debug as well. 0: any free port.",
    )
    heartbeat_seconds: Seconds = Field(
        default=1.0,
        description="Seconds of silence before a link sends a heartbeat. A third of silence_seconds lets one be late.",
    )
    silence_seconds: Seconds = Field(
        default=3.0,
        description="Seconds without a message before a peer counts as lost. Raise it where cores are shared.",
    )
    loop_seconds_max: Seconds = Field(
        default=60.0,
        description="Seconds without a turn of the main loop or a layer of a step before /livez fails. The slowest "
        "layer must fit.",
    )
    tenant_share_max: float = Field(
        default=0.95,
        gt=0.0,
        le=1.0,
        description="Share of queues, slots and KV pages that one tenant may take. The rest is kept for others, so "
        "that a newcomer finds room at once.",
    )
    log_level: LogLevel = Field(
        default="info",
        description="Least severe level that is logged. info logs one line a request, debug each of its steps.",
    )
    log_format: LogFormat = Field(
        default="json",
        description="json writes one object a line, for machines. console writes text, for people.",
    )
    lifeline_fd: int = Field(
        default=-1,
        ge=-1,
        description="Descriptor of a pipe whose end ends this process. `segue up` uses it. -1: none.",
    )
