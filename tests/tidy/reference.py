"""Writes `docs/reference.md`: every setting, metric and message, out of the code that declares them.

`python -m tests.tidy.reference` (or `make docs`); a test compares the page with what this would write.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from decode.config import DecodeConfig
from decode.counters import DecodeCounters
from prefill.config import PrefillConfig
from prefill.counters import PrefillCounters
from router.access.key_ring import KeyCounters
from router.config import RouterConfig
from router.core.counters import RouterCounters
from router.listener.connections import ClientCounters
from router.listener.tls import CertificateCounters
from router.metrics_publisher import LoopCounters
from router.openai.answers.resumable_streams import ResumingCounters
from router.openai.prompts.prompts import PromptCounters
from router.openai.request_log import HttpCounters
from shared.engine.cuda.counters import DeviceCounters
from shared.links.counters import LinkCounters
from shared.local.config import LocalConfig
from shared.primitives.metric_fields import (
    CounterMetric,
    DeclaredMetric,
    GaugeMetric,
    HistogramMetric,
    shown_fields,
)
from shared.process import gauges
from shared.process.logs import LogCounters
from shared.process.process_config import ProcessConfig
from shared.process.settings import Settings, flag_of, groups_of, schema_of, variable_of
from shared.scheduling.step_counters import StepCounters
from shared.transfer.counters import KvCounters
from shared.wire import messages
from shared.worker.worker_config import WorkerConfig
from tests.abuse.bounds.answers import ANSWER_BOUNDS
from tests.abuse.bounds.bound import Bound
from tests.abuse.bounds.links import KV_BOUNDS, LINK_BOUNDS
from tests.abuse.bounds.live import LIVE_BOUNDS
from tests.abuse.bounds.messages import MESSAGES_BOUNDS
from tests.abuse.bounds.resuming import RESUMING_BOUNDS
from tests.abuse.bounds.router import ROUTER_BOUNDS
from tests.abuse.bounds.workers import PROCESS_BOUNDS, WORKER_BOUNDS

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
HEAD = """# Reference

Written by `make docs` out of the code; edit the code.

## Settings

A setting is a flag (`--page-size`), a variable (`SEGUE_PAGE_SIZE`) and a key of the YAML file given with `--config`
(`pageSize`); the first that names it wins, in this order. An unknown flag or key is an error, an unknown variable a
warning. Seconds, bytes and tokens are in the name. `--help` has the same groups; what is rarely turned is *advanced*.
"""
BOUNDS_HEAD = """What somebody can take at most. The worst case is at the default. Strangers have no key; peers are
routers and workers of the same deployment, perhaps in other hands. Tests of `tests/abuse` go there against a router
with an address space of 1 GiB (`RLIMIT_AS`), those of `test_link_bounds.py` against a worker's links with as much. Most
other rows name a unit test, which goes to the bound in the test's own process: it shows what happens beyond the bound,
without a limit on memory, and the worst case is computed.
"""
BOUNDS: Mapping[str, tuple[Bound, ...]] = {
    "What clients take from a router": (*ROUTER_BOUNDS, *ANSWER_BOUNDS, *RESUMING_BOUNDS, *MESSAGES_BOUNDS),
    "What those take from a router who watch it": LIVE_BOUNDS,
    "What strangers and peers take from a link": LINK_BOUNDS,
    "What strangers and workers take from a worker that offers KV pages": KV_BOUNDS,
    "What routers take from a worker": WORKER_BOUNDS,
    "What anybody takes from any process": PROCESS_BOUNDS,
}
MODELS: tuple[tuple[str, type[Settings], type[Settings] | None], ...] = (
    ("`segue up`", LocalConfig, None),
    ("Every process", ProcessConfig, None),
    ("Every worker, prefill and decode", WorkerConfig, ProcessConfig),
    ("`python -m prefill`", PrefillConfig, WorkerConfig),
    ("`python -m decode`", DecodeConfig, WorkerConfig),
    ("`python -m router`", RouterConfig, ProcessConfig),
)

COUNTERS = (
    RouterCounters, ClientCounters, CertificateCounters, KeyCounters, ResumingCounters, PromptCounters, HttpCounters,
    LoopCounters, PrefillCounters,
    DecodeCounters, StepCounters, LinkCounters, LogCounters, KvCounters, DeviceCounters,
)  # fmt: skip
KINDS = {CounterMetric: "counter", GaugeMetric: "gauge", HistogramMetric: "histogram"}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, model, parent in MODELS:
        parts += [f"### {title}\n", *_settings(model, parent)]
    parts += [
        "## Metrics\n",
        "Every metric also has the label `role`. No label comes from a client.\n",
        *_metrics(),
        "",
    ]
    parts += ["## Messages\n", *_messages(), ""]
    parts += ["## Bounds\n", BOUNDS_HEAD, *_bounds()]
    return "\n".join(parts).rstrip() + "\n"


def _settings(model: type[Settings], parent: type[Settings] | None) -> Iterator[str]:
    schemas = dict(zip(model.model_fields, schema_of(model)["properties"].values(), strict=True))
    for title, names in groups_of(model).items():
        own = [name for name in names if parent is None or name not in parent.model_fields]
        if own:
            yield f"**{title}**\n"
            yield "| flag | variable | type | default | what it is, and why |"
            yield "|---|---|---|---|---|"
            for name in own:
                schema = schemas[name]
                yield (
                    f"| `{flag_of(name)}` | `{variable_of(name)}` | {_type(schema)} | {_default(schema['default'])} "
                    f"| {_cell(schema['description'])} |"
                )
            yield ""


def _type(schema: Mapping[str, Any]) -> str:
    """The choices, or the type and its bounds."""
    if "enum" in schema:
        return _cell(" | ".join(schema["enum"]))
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {schema[key]:.15g}" for key, sign in signs.items() if key in schema]
    kind = "list of strings" if schema["type"] == "array" else schema["type"]
    return " ".join([kind, ", ".join(bounds)]).rstrip()


def _default(value: object) -> str:
    """As one would write it in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value in ("", []) else str(value)


def _metrics() -> Iterator[str]:
    yield "| metric | kind | labels | what it is |"
    yield "|---|---|---|---|"
    for metric in declared_metrics():
        labels = ", ".join(metric.labels) or "none"
        yield f"| `{metric.name}` | {KINDS[type(metric)]} | {labels} | {_cell(metric.text)} |"


def _messages() -> Iterator[str]:
    yield "| message | direction | fields | what it says |"
    yield "|---|---|---|---|"
    for direction, union in (
        ("to workers", messages.RouterToWorker),
        ("to routers", messages.WorkerToRouter),
    ):
        for message in get_args(union):
            fields = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(message)) or "none"
            yield f"| `{message.__name__}` | {direction} | {fields} | {_cell(inspect.getdoc(message) or '')} |"


def _bounds() -> Iterator[str]:
    for title, bounds in BOUNDS.items():
        yield f"### {title}\n"
        yield "| bound | default | beyond it | worst case | test |"
        yield "|---|---|---|---|---|"
        for bound in bounds:
            yield f"| `{bound.title}` | {bound.default} | {bound.beyond} | {_cell(bound.worst)} | `{bound.test}` |"
        yield ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def declared_metrics() -> list[DeclaredMetric]:
    """Every metric of every process: counters, then gauges, then histograms."""
    shown = (field.metric for counters in COUNTERS for field in shown_fields(counters))
    declared = dict.fromkeys((*shown, *declared_gauges()))
    return [metric for kind in KINDS for metric in declared if type(metric) is kind]


def declared_gauges() -> dict[GaugeMetric, str]:
    """Every gauge, and the name of its constant."""
    return {value: name for name, value in vars(gauges).items() if isinstance(value, GaugeMetric)}


def names() -> Iterable[str]:
    """Every name that the page must hold."""
    for _, model, _ in MODELS:
        yield from map(flag_of, model.model_fields)
    yield from (metric.name for metric in declared_metrics())
    for union in (messages.RouterToWorker, messages.WorkerToRouter):
        yield from (message.__name__ for message in get_args(union))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
