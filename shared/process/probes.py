"""The pages of every process's admin port: `/livez`, `/readyz` and `/metrics`.

/livez     200 while the loop gets on, else 503: the kubelet, or `segue up`, then starts the process anew
/readyz    200 while the process takes new work, else 503; what it does, and what it has chosen
/metrics   what was published last, for Prometheus
"""

from __future__ import annotations

from shared.process.admin_port import AdminPage, AnswerPath
from shared.process.health import Health
from shared.process.metrics import CONTENT_TYPE, Metrics

NOTHING_HERE = AdminPage(404, "text/plain", b"there is nothing at this path\n")


def probe_pages(health: Health, metrics: Metrics) -> AnswerPath:
    """Answers of a process whose loop publishes its metrics by itself."""

    async def answer(path: str) -> AdminPage:
        if path == "/livez":
            alive = health.alive()
            return (
                AdminPage(200, "text/plain", b"ok\n")
                if alive
                else AdminPage(503, "text/plain", b"the loop hangs\n")
            )
        if path == "/readyz":
            return AdminPage(200 if health.ready else 503, "application/json", health.report())
        if path == "/metrics":
            return AdminPage(200, CONTENT_TYPE, metrics.render())
        return NOTHING_HERE

    return answer
