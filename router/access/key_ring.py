"""The API keys that are valid now: a mounted file, read again every second.

A changed file counts as a whole. One that is wrong, or cannot be read, changes nothing: the keys of before stay, the
log says why, and `segue_api_keys_unread_total` counts. So a slip of the pen locks nobody out, and a revocation counts
only once the file is right. A Secret's file is a link that Kubernetes turns to a new folder, so none is half written.

Keys are looked up by the hash of what was presented. Nothing of a wrong key is kept.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import structlog

from shared.primitives.errors import ConfigError
from shared.primitives.metric_fields import CounterMetric, all_declared, counted_by, counted_by_labels, total
from shared.process.api_keys import KEYS_FILE_BYTES_MAX, ApiKey, digest_of, parse_keys

READ_SECONDS = 1.0  # between two looks at the file

log = structlog.get_logger(__name__)


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
            "Tokens by the name of the API key, counted while they flow: prompts with the first token, completions "
            "with each, the cached ones of prompts at the end. In the end these are the sums of what answers say in "
            "usage; of a request that did not end well, what came of it.",
            ("key", "kind"),
        )
    )
    targets: Counter[tuple[str, ...]] = counted_by_labels(
        CounterMetric(
            "segue_key_targets_total",
            "First tokens to keys that have a ttft_target, by the key's name and whether they came within it: met, "
            "missed. What was refused or dropped has no first token.",
            ("key", "outcome"),
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


class KeyRing:
    """The keys of one file. Raises ConfigError where the file cannot be used at the start."""

    def __init__(self, path: str):
        self.counters = KeyCounters()
        self._path = Path(path)
        self._trouble = ""
        try:
            self._content = self._read()
            self._keys = parse_keys(self._content)
        except ValueError as error:
            raise ConfigError(f"api_keys_file {path} {error}") from None
        self.names = {key.name for key in self._keys.values()}

    def find(self, presented: bytes) -> ApiKey | None:
        """Whose key this is; None: nobody's."""
        digest = digest_of(presented)
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    async def read_for_ever(self) -> None:
        """Follow the file."""
        while True:
            await asyncio.sleep(READ_SECONDS)
            try:
                content = await asyncio.to_thread(self._read)
                if content == self._content and not self._trouble:
                    continue
                keys = await asyncio.to_thread(parse_keys, content)
            except ValueError as error:
                self._keep_former(str(error))
            except Exception as error:
                # whatever it is, the next look may go well, and a revocation must count
                self._keep_former(f"gave {type(error).__name__}")
            else:
                self._content, self._keys, self._trouble = content, keys, ""
                self.names = {key.name for key in keys.values()}
                log.info("api_keys.read", lines=len(keys), clients=len(self.names))

    def _keep_former(self, reason: str) -> None:
        self.counters.unread += 1
        if reason != self._trouble:
            self._trouble = reason
            log.error("api_keys.unread", reason=f"the file {reason}; the keys of before stay valid")

    def _read(self) -> bytes:
        """Raises ValueError where it cannot be read."""
        try:
            with self._path.open("rb") as file:
                return file.read(KEYS_FILE_BYTES_MAX + 1)
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror}") from None
