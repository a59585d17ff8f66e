"""What has happened on the links of a process so far: plain numbers, published by the shell and read by tests."""

from __future__ import annotations

from dataclasses import dataclass

from shared.primitives.metric_fields import CounterMetric, all_declared, counted, total

REFUSALS = CounterMetric(
    "segue_link_refusals_total", "Connections and handshakes that were refused, by cause.", ("cause",)
)
FAULTS = CounterMetric(
    "segue_link_faults_total",
    "Messages that could not be read, came after their session's end, or were not sent, by cause.",
    ("cause",),
)
SESSIONS = CounterMetric("segue_link_sessions_total", "Link sessions that began and that ended.", ("event",))


@all_declared
@dataclass(slots=True)
class LinkCounters:
    """Totals since the start."""

    # plain bytes, or a connection that sent nothing
    refused_no_handshake: int = counted(REFUSALS, cause="no_handshake")
    # no key; a peer that hangs up first counts as no handshake
    refused_unencrypted: int = counted(REFUSALS, cause="unencrypted")
    refused_foreign_key: int = counted(REFUSALS, cause="foreign_key")
    # one of our keys, but not one that may dial
    refused_wrong_role: int = counted(REFUSALS, cause="wrong_role")
    # another protocol or role, or a worker linked already
    refused_hello: int = counted(REFUSALS, cause="hello")
    # an admitted peer sent what cannot be read
    malformed: int = counted(FAULTS, cause="malformed")
    out_of_session: int = counted(FAULTS, cause="out_of_session")
    # a message that the peer's version does not know: a mistake of ours
    not_understood: int = counted(FAULTS, cause="not_understood")
    # for a peer that was down already; its PeerDown was on the way
    messages_unsent: int = counted(FAULTS, cause="unsent")
    # a worker's loop did not turn for step_seconds_max, and all its sessions were ended
    loop_hangs: int = total(
        "segue_loop_hangs_total",
        "Times that a worker's loop did not turn for step_seconds_max: its sessions ended.",
    )
    sessions_begun: int = counted(SESSIONS, event="begun")
    sessions_ended: int = counted(SESSIONS, event="ended")
