"""What the endpoints of the API share: the parts of the router, and the answers being written."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import structlog

from router.access.byte_budget import ByteBudget
from router.config import RouterConfig
from router.core.effects import RequestFailed
from router.core.fleet.workers import Backend
from router.openai.answers.answer_bytes import ANSWER_SHARE
from router.openai.answers.json_parts import PartsWriter
from router.openai.answers.logprob_objects import TokenBytes
from router.openai.answers.response_stream import ResponseStream
from router.openai.answers.resumable_streams import Resuming
from router.openai.fields.request_body import BodyReader
from router.openai.prompts.prompts import Prompts
from router.openai.request_log import HttpCounters
from router.shell import RouterShell
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError

TOO_MANY_ANSWERS = "the answers that are under way hold too much memory: try again later, or stream"

log = structlog.get_logger(__name__)


class OpenAIServing:
    """What the endpoints share: the parts of the router, and the answers being written."""

    def __init__(
        self,
        shell: RouterShell,
        tokenizer: Tokenizer,
        prompts: Prompts,
        settings: RouterConfig,
        sampling_defaults: Mapping[str, float],
        resuming: Resuming,
    ):
        """`sampling_defaults`: the fields of `SamplingParams` that a request may leave out."""
        self.resuming = resuming
        self.sampling_defaults = sampling_defaults
        self.settings = settings
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.bodies = BodyReader(settings)
        self.token_bytes = TokenBytes(tokenizer.as_json)
        self.answers = ByteBudget(settings.answers_bytes_max, TOO_MANY_ANSWERS, "answer_bytes")
        self.answer_bytes_max = settings.answers_bytes_max // ANSWER_SHARE
        self.writing = PartsWriter()
        self.http_counters = HttpCounters()
        self.shell = shell
        self._answers: set[ResponseStream] = set()

    def context_len(self) -> int:
        """Tokens that prompt and output may have together; raises `RequestError` (503) while unknown."""
        served = self.shell.context_len(self.settings.model_name)
        known = [length for length in (self.tokenizer.context_len, served) if length]
        if not known:
            raise RequestError("no worker has named the model's context length yet", status=503)
        return min(known)

    def system_fingerprint(self) -> str | None:
        """Equal as long as the same seed gives the same output here; None while no worker serves the model."""
        return _fingerprint(self.shell.backends(), self.settings.model_name)

    def check_model(self, name: str | None) -> None:
        """Raise `RequestError` (404) for a model that is not served here. There is one: it may be left out."""
        if name and name not in self.settings.model_names:
            raise RequestError(
                f"the model does not exist; this server has {self.settings.model_name}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def fail_all(self, failure: RequestFailed) -> None:
        """End every answer that is being written, because the router ends."""
        for answer in list(self._answers):
            answer.fail(failure, ordered=True)

    @contextlib.contextmanager
    def answer_of(self, rids: Sequence[str], rid: str) -> Iterator[ResponseStream]:
        """The answer to these requests to the core, all of one HTTP request; at its end they are cancelled."""

        def cancel() -> None:
            for one in rids:
                self.shell.cancel(one)

        answer = ResponseStream(len(rids), self.settings.stream_backlog_bytes, cancel)
        self._answers.add(answer)
        try:
            yield answer
        finally:
            self._answers.discard(answer)
            answer.close()
            cancel()
            if answer.cut:
                log.warning("stream.cut", rid=rid)


@lru_cache(maxsize=8)
def _fingerprint(backends: frozenset[Backend], model_name: str) -> str | None:
    mine = sorted(backend for backend in backends if backend[0] == model_name)
    return f"fp_{hashlib.sha256(repr(mine).encode()).hexdigest()[:12]}" if mine else None
