"""Writes `charts/segue/files/dashboard.json`, the Grafana dashboard that the chart offers as a ConfigMap.

`python -m tests.monitoring.dashboard` (or `make docs`); a test compares the file with what this would write. A row is a
question, a panel an answer to it. What is asked of Prometheus stands here as a person would type it, with `<release>`
for the labels of the release that Grafana's variables choose, and `<rate>` for the interval that fits the time shown.
The file has the form of Grafana 11 (schema 41); a test lets Grafana's own library read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.charts.rendering import CHART

FILE = CHART / "files" / "dashboard.json"
RELEASE = 'namespace="$namespace",segue_release="$release"'
RATE = "$__rate_interval"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
ROUTER, PREFILL, DECODE = 'role="router"', 'role="prefill"', 'role="decode"'


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked of Prometheus, and what a line of the answer is called."""

    expression: str
    legend: str
    has_exemplars: bool = False  # Grafana draws them over the lines, where Prometheus keeps them

    def text(self) -> str:
        """As Grafana sends it, but for its variables."""
        return self.expression.replace("<release>", RELEASE).replace("<rate>", RATE)


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture; `stacked` ones add up."""

    title: str
    unit: str  # by Grafana's names: s, Bps, percentunit, reqps, short
    queries: tuple[Query, ...]
    stacked: bool = False
    text: str = ""


def rate(metric: str, labels: str = "", by: str = "") -> str:
    """A counter's increase a second, summed."""
    given = f"{labels},<release>" if labels else "<release>"
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{{{given}}}[<rate>]))"


def one(metric: str, legend: str, labels: str = "", by: str = "") -> Query:
    return Query(rate(metric, labels, by), legend)


def quantiles(metric: str, *, has_exemplars: bool = False) -> tuple[Query, ...]:
    """The median, and what one of twenty and of a hundred exceed; each exemplar once, by the last of them."""
    buckets = rate(f"{metric}_bucket", by="le")
    return tuple(
        Query(f"histogram_quantile({share}, {buckets})", f"p{share * 100:g}", has_exemplars and share == 0.99)
        for share in (0.5, 0.95, 0.99)
    )


def mean(metric: str, legend: str, by: str = "") -> Query:
    return Query(f"{rate(f'{metric}_sum', by=by)} / {rate(f'{metric}_count', by=by)}", legend)


def gauge(metric: str, labels: str, by: str) -> Query:
    given = f"{labels},<release>" if labels else "<release>"
    return Query(f"sum by ({by}) ({metric}{{{given}}})", f"{{{{{by}}}}}")


def slots_used(role: str) -> Query:
    """The part of the slots of workers of a role that have a request, by pod."""
    used, all_of_them = (
        f"sum by (pod) ({name}{{{role},<release>}})" for name in ("segue_slots_used", "segue_slots")
    )
    return Query(f"{used} / {all_of_them}", "{{pod}}")


def share_of_ends(status: str, legend: str) -> Query:
    """The part of all requests, in the queues and refused before them, that ended with such a status."""

    def each_second(outcome: str, refusal: str) -> str:
        ended, refused = (
            rate("segue_requests_total", f"{ROUTER}{outcome}"),
            rate("segue_http_refusals_total", refusal),
        )
        return f"(({ended} or vector(0)) + ({refused} or vector(0)))"

    such = each_second(f',outcome=~"{status}"', f'status=~"{status}"')
    return Query(f"{such} / {each_second('', '')}", legend)


ROWS: dict[str, tuple[Panel, ...]] = {
    "What readers see": (
        Panel("Time to first token", "s", quantiles("segue_ttft_seconds", has_exemplars=True)),
        Panel("Inter-token latency", "s", quantiles("segue_itl_seconds")),
        Panel("Whole requests", "s", quantiles("segue_request_seconds", has_exemplars=True)),
        Panel(
            "Requests by their end",
            "reqps",
            (one("segue_requests_total", "{{outcome}}", ROUTER, by="outcome"),),
            stacked=True,
        ),
        Panel(
            "Refused before the queue, by status",
            "reqps",
            (one("segue_http_refusals_total", "{{status}}", by="status"),),
            stacked=True,
        ),
        Panel(
            "Share of 429 and 5xx",
            "percentunit",
            (share_of_ends("429", "429"), share_of_ends("5..", "5xx")),
        ),
        Panel(
            "Answered with 429, by code",
            "reqps",
            (one("segue_rejections_total", "{{code}}", by="code"),),
            stacked=True,
        ),
        Panel(
            "Requests by state", "short", (gauge("segue_requests_running", ROUTER, "state"),), stacked=True
        ),
        Panel(
            "Tokens a second",
            "short",
            (
                one("segue_prompt_tokens_total", "of prompts", ROUTER),
                one("segue_generated_tokens_total", "of answers", ROUTER),
            ),
        ),
        Panel(
            "Pauses of more than a second, by cause",
            "short",
            (Query("sum by (cause) (increase(segue_pause_seconds_count{<release>}[<rate>]))", "{{cause}}"),),
            stacked=True,
            text="Between two tokens of a stream. A stream that moved or lost its worker goes on with the same tokens.",
        ),
    ),
    "Who takes it": (
        Panel(
            "Open requests, by API key", "short", (gauge("segue_key_requests_open", "", "key"),), stacked=True
        ),
        Panel(
            "Tokens of running streams, by API key",
            "short",
            (gauge("segue_key_context_tokens", "", "key"),),
            stacked=True,
        ),
        Panel(
            "Tokens a second, by API key",
            "short",
            (one("segue_usage_tokens_total", "{{key}}: {{kind}}", by="key, kind"),),
        ),
        Panel("Tokens of a prompt", "short", quantiles("segue_request_prompt_tokens")),
        Panel("Tokens of an answer", "short", quantiles("segue_request_generation_tokens")),
        Panel(
            "Longest time without a token, by state",
            "s",
            (Query("max by (state) (segue_oldest_request_seconds{<release>})", "{{state}}"),),
        ),
    ),
    "Where the time goes": (
        Panel(
            "Mean seconds of each stage",
            "s",
            tuple(
                mean(f"segue_{stage}_seconds", stage)
                for stage in (
                    "body",
                    "tokenize",
                    "queue",
                    "prefill_queue",
                    "prefill_compute",
                    "ready",
                    "transfer",
                )
            ),
            stacked=True,
        ),
        Panel(
            "Mean seconds from first to second token, by part",
            "s",
            (mean("segue_second_token_part_seconds", "{{part}}", by="part"),),
            stacked=True,
        ),
        Panel(
            "Why prompts went where they went",
            "reqps",
            (one("segue_router_placements_total", "{{worker_role}}: {{why}}", by="worker_role, why"),),
            stacked=True,
        ),
    ),
    "Prompts": (
        Panel(
            "Tokens computed a second, by pod",
            "short",
            (one("segue_extend_tokens_total", "{{pod}}", by="pod"),),
        ),
        Panel(
            "Share of prompts found in caches",
            "percentunit",
            (
                Query(
                    f"{rate('segue_cached_tokens_total', ROUTER)} / {rate('segue_prompt_tokens_total', ROUTER)}",
                    "cached",
                ),
            ),
        ),
        Panel(
            "Prompts computed by decode workers",
            "reqps",
            (one("segue_local_prompts_total", "computed there"), one("segue_put_back_total", "put back")),
        ),
        Panel("Share of prefill's slots in use, by pod", "percentunit", (slots_used(PREFILL),)),
        Panel("Leases, by pod", "short", (gauge("segue_leases", "", "pod"),)),
        Panel(
            "KV pages of prefill, by state", "short", (gauge("segue_pages", PREFILL, "state"),), stacked=True
        ),
    ),
    "Streams": (
        Panel("Share of decode's slots in use, by pod", "percentunit", (slots_used(DECODE),)),
        Panel(
            "KV pages of decode, by state", "short", (gauge("segue_pages", DECODE, "state"),), stacked=True
        ),
        Panel(
            "Share of KV pages that requests hold, by pod",
            "percentunit",
            (Query('max by (pod) (segue_kv_used_ratio{role="decode",<release>})', "{{pod}}"),),
        ),
        Panel(
            "Mean seconds of a step, by pod",
            "s",
            (mean("segue_step_seconds", "{{pod}}: {{mode}}", by="pod, mode"),),
        ),
        Panel("Mean rows of a step, by pod", "short", (mean("segue_step_rows", "{{pod}}", by="pod"),)),
        Panel("Steps a second, by mode", "short", (one("segue_steps_total", "{{mode}}", DECODE, by="mode"),)),
        Panel(
            "Tokens a step",
            "short",
            (
                Query(
                    f"{rate('segue_sampled_tokens_total')} / {rate('segue_steps_total', DECODE)}",
                    "mean",
                ),
            ),
        ),
        Panel(
            "Streams that lacked pages",
            "reqps",
            tuple(
                one(f"segue_{name}_total", legend)
                for name, legend in (
                    ("retractions", "retracted"),
                    ("resumes", "resumed"),
                    ("backups", "copied to the host"),
                    ("recomputed", "computed again"),
                    ("returned_to_router", "sent back"),
                    ("no_room", "refused"),
                )
            ),
        ),
        Panel(
            "Rows that missed a step",
            "short",
            (
                one("segue_rows_without_page_total", "no page"),
                one("segue_rows_without_mask_total", "no time for its grammar"),
                one("segue_extra_tokens_total", "computed in vain"),
            ),
        ),
    ),
    "KV between workers": (
        Panel(
            "Bytes fetched a second, by pod",
            "Bps",
            (one("segue_kv_fetched_bytes_total", "{{pod}}", DECODE, by="pod"),),
        ),
        Panel(
            "Bytes brought to decode workers, by purpose",
            "Bps",
            (one("segue_kv_moved_bytes_total", "{{purpose}}", by="purpose"),),
            stacked=True,
        ),
        Panel(
            "Fetches a second, by transport",
            "reqps",
            (one("segue_kv_transport_fetches_total", "{{transport}}", by="transport"),),
            stacked=True,
        ),
        Panel(
            "Without a fetch",
            "reqps",
            (
                one("segue_full_hits_total", "all cached"),
                one("segue_prefix_waits_total", "waited for a prefix that another one brought"),
            ),
        ),
        Panel(
            "Speed of links",
            "Bps",
            (
                Query(
                    "max by (pod, peer, transport) (segue_kv_link_bytes_per_second{<release>})",
                    "{{pod}} from {{peer}} by {{transport}}",
                ),
            ),
        ),
        Panel(
            "Fetches that failed",
            "reqps",
            (
                one("segue_fetch_failures_total", "{{cause}}", by="cause"),
                one("segue_leases_ended_total", "lease expired", 'cause="expired"'),
            ),
        ),
        Panel(
            "Slow links, and pages in quarantine",
            "short",
            (
                Query("sum(segue_kv_links_slow{<release>})", "slow links"),
                Query('sum(segue_pages{state="quarantined",<release>})', "pages in quarantine"),
            ),
        ),
    ),
    "Faults and moves": (
        Panel(
            "Streams that moved",
            "reqps",
            (one("segue_migrations_total", "{{cause}}: {{outcome}}", ROUTER, by="cause, outcome"),),
            stacked=True,
        ),
        Panel(
            "New attempts, by cause",
            "reqps",
            (one("segue_continuations_total", "{{cause}}", by="cause"),),
            stacked=True,
        ),
        Panel(
            "Pods as routers know them", "short", (gauge("segue_discovery_pods", "", "state"),), stacked=True
        ),
        Panel(
            "Workers linked, by router",
            "short",
            (Query("sum by (pod, worker_role) (segue_workers{<release>})", "{{pod}}: {{worker_role}}"),),
        ),
        Panel("Seconds that workers drained", "s", (mean("segue_drain_seconds", "mean"),)),
        Panel("Link sessions", "short", (one("segue_link_sessions_total", "{{event}}", by="event"),)),
        Panel(
            "Refused at links and KV ports",
            "short",
            (
                one("segue_link_refusals_total", "link: {{cause}}", by="cause"),
                one("segue_kv_refusals_total", "KV: {{cause}}", by="cause"),
            ),
        ),
    ),
    "Routers": (
        Panel("Requests, by router", "short", (gauge("segue_requests_running", ROUTER, "pod"),)),
        Panel(
            "Lag of the event loop (p99), by router",
            "s",
            (
                Query(
                    f"histogram_quantile(0.99, {rate('segue_loop_lag_seconds_bucket', by='pod, le')})",
                    "{{pod}}",
                ),
            ),
        ),
        Panel("Prompts at the tokenizer", "short", (gauge("segue_tokenizing", "", "state"),), stacked=True),
        Panel("Client connections, by router", "short", (gauge("segue_http_connections", "", "pod"),)),
        Panel(
            "Age of what routers know of pods",
            "s",
            (Query("max by (pod) (segue_discovery_age_seconds{<release>})", "{{pod}}"),),
        ),
    ),
    "Processes": (
        Panel("CPU cores in use, by pod", "short", (one("process_cpu_seconds_total", "{{pod}}", by="pod"),)),
        Panel("Memory, by pod", "bytes", (gauge("process_resident_memory_bytes", "", "pod"),)),
        Panel("Open files, by pod", "short", (gauge("process_open_fds", "", "pod"),)),
    ),
}


def panels() -> Iterator[dict[str, Any]]:
    """Rows and panels in Grafana's form, each at its place."""
    number, top = 0, 0
    for title, row in ROWS.items():
        number += 1
        yield {
            "id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1},
        }  # fmt: skip
        top += 1
        for place, panel in enumerate(row):
            number += 1
            x, y = place % COLUMNS * WIDTH, top + place // COLUMNS * HEIGHT
            yield _panel(panel, number, {"x": x, "y": y, "w": WIDTH, "h": HEIGHT})
        top += -(-len(row) // COLUMNS) * HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    drawn = {
        "fillOpacity": 30 if panel.stacked else 0,
        "stacking": {"mode": "normal" if panel.stacked else "none"},
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": query.text(),
                "legendFormat": query.legend,
                **({"exemplar": True} if query.has_exemplars else {}),
            }
            for at, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": drawn}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _variable(name: str, label: str, values: str) -> dict[str, Any]:
    """A choice among the values of a label."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": {"query": f"label_values({values}, {label})", "refId": name},
        "refresh": 2,
        "sort": 1,
    }


def dashboard() -> dict[str, Any]:
    """All of it."""
    rollouts = {
        "name": "A version that was not there a minute ago",
        "enable": True,
        "iconColor": "blue",
        "datasource": SOURCE,
        "expr": Query(
            "count by (version, role) (segue_build_info{<release>} unless segue_build_info{<release>} offset 1m)",
            "",
        ).text(),
    }
    return {
        "uid": "segue",
        "title": "Segue",
        "tags": ["segue"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "data source", "query": "prometheus"},
                _variable("namespace", "namespace", "segue_build_info"),
                _variable("release", "segue_release", 'segue_build_info{namespace="$namespace"}'),
            ]
        },
        "annotations": {"list": [rollouts]},
        "panels": list(panels()),
    }


def page() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
