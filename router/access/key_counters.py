"""What clients with API keys did, by the names in the file of keys."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shared.primitives.metric_fields import CounterMetric, all_declared, counted_by, counted_by_labels, total


@all_declared
@dataclass(slots=True)
class KeyCounters:
    """Totals since the start. Names come from the file of keys, never from a client."""

    requests: Counter[tuple[str, ...]] = counted_by_labels(
        CounterMetric(
            "segue_key_requests_total",
            "Requests with a valid API key, by its name and what met them: served, or the reason of the refusal "
            "(model, rpm, tpm, concurrent).",
            ("key", "outcome"),
        )
    )
    tokens: Counter[tuple[str, ...]] = counted_by_labels(
        CounterMetric(
            "segue_usage_tokens_total",
            "Tokens by the name of the API key: of prompts, of those the cached ones, and of completions. The sums of "
            "what answers say in usage; of a request that did not end well, what came of it.",
            ("key", "kind"),
        )
    )
    refusals: Counter[str] = counted_by(
        CounterMetric(
            "segue_key_refusals_total",
            "Requests answered with 401, by cause: no API key, or one that is in no line of the file.",
            ("cause",),
        ),
        "missing",
        "unknown",
    )
    unread: int = total(
        "segue_api_keys_unread_total",
        "Looks at the file of API keys, one a second, at which it was wrong or could not be read: the keys of before "
        "stay.",
    )
