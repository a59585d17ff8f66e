"""What the endpoints of the API share: the parts of the router, and the answers being written."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import lru_cache

import structlog

from router.access.byte_budget import ByteBudget
from router.config import RouterConfig
from router.core.effects import ClientRequest, RequestFailed
from router.core.fleet.workers import Backend
from router.openai.answers.answer_bytes import ANSWER_SHARE
from router.openai.answers.json_parts import PartsWriter
from router.openai.answers.logprob_objects import TokenBytes
from router.openai.answers.prompt_echo import EchoChoice, PromptEcho
from router.openai.answers.response_stream import Choice, ResponseStream
from router.openai.answers.resumable_streams import Resuming
from router.openai.fields.request_body import BodyReader
from router.openai.prompts.prompts import Prompts
from router.openai.tools.answer_reading import TextOptions
from router.shell import RouterShell
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings
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
        self.answers = ByteBudget(settings.answers_bytes_max, TOO_MANY_ANSWERS)
        self.answer_bytes_max = settings.answers_bytes_max // ANSWER_SHARE
        self.writing = PartsWriter()
        self._shell = shell
        self._answers: set[ResponseStream] = set()

    def context_len(self) -> int:
        """Tokens that prompt and output may have together; raises `RequestError` (503) while unknown."""
        served = self._shell.context_len(self.settings.model_name)
        known = [length for length in (self.tokenizer.context_len, served) if length]
        if not known:
            raise RequestError("no worker has named the model's context length yet", status=503)
        return min(known)

    def system_fingerprint(self) -> str | None:
        """Equal as long as the same seed gives the same output here; None while no worker serves the model."""
        return _fingerprint(self._shell.backends(), self.settings.model_name)

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
        """End every answer that is being written."""
        for answer in list(self._answers):
            answer.fail(failure)

    @contextlib.asynccontextmanager
    async def submitted(
        self,
        rid: str,
        requests: list[ClientRequest],
        options: TextOptions,
        echoes: Sequence[PromptEcho] = (),
        *,
        stream: bool,
    ) -> AsyncIterator[ResponseStream]:
        """Hand `requests` to the core for one answer; those still running at the end are cancelled.

        `echoes`: the prompt of each, if the answer repeats or scores them.
        """
        rids = [request.rid for request in requests]

        def cancel() -> None:
            for one in rids:
                self._shell.cancel(one)

        answer = ResponseStream(len(requests), self.settings.stream_backlog_bytes, cancel)
        self._answers.add(answer)
        try:
            for index, request in enumerate(requests):
                if not answer.complete:
                    prompt = echoes[index] if echoes else None
                    choice = self._choice(index, request, answer, options, len(prompt.text) if prompt else 0)
                    sink = EchoChoice(index, answer, prompt, choice, streamed=stream) if prompt else choice
                    self._shell.submit(request, sink)
            yield answer
        finally:
            self._answers.discard(answer)
            answer.close()
            cancel()
            if answer.cut:
                log.warning("stream.cut", rid=rid)

    def _choice(
        self,
        index: int,
        request: ClientRequest,
        answer: ResponseStream,
        options: TextOptions,
        begins_at: int,
    ) -> Choice:
        tokenizer, ends = self.tokenizer, request.params.stop_token_ids
        skip = tokenizer.special_token_ids if options.skip_special_tokens else frozenset()
        reading = options.reading
        if reading is not None:
            skip -= tokenizer.marks(reading.reader.format.special_tokens)
        skip = skip - set(ends) if options.include_stop else skip | set(ends)
        decoder = tokenizer if skip >= tokenizer.special_token_ids else tokenizer.spelling_specials
        detokenizer = Detokenizer(decoder, skip, request.token_ids if options.continues_prompt else ())
        return Choice(
            index,
            answer,
            detokenizer,
            StopStrings(options.stops, include=options.include_stop),
            lambda: self._shell.stop(request.rid),
            stop_token_ids=ends,
            with_token_ids=options.token_ids,
            parser=reading.parser(tokenizer, request.token_ids) if reading else None,
            shows_thoughts=reading is None or reading.shows_thoughts,
            begins_at=begins_at,
        )


@lru_cache(maxsize=8)
def _fingerprint(backends: frozenset[Backend], model_name: str) -> str | None:
    mine = sorted(backend for backend in backends if backend[0] == model_name)
    return f"fp_{hashlib.sha256(repr(mine).encode()).hexdigest()[:12]}" if mine else None
