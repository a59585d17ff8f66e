"""The way of tokens out, from the core to the bytes of an answer: composed in `write_answer`, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import structlog
from starlette.types import Receive, Scope, Send

from router.core.effects import ClientRequest
from router.openai.answers.answer_bytes import AskedAnswer, HeldBytes
from router.openai.answers.answer_writer import AnswerWriter
from router.openai.answers.kept_answer import KeptAnswer
from router.openai.answers.logprob_objects import LogprobObjects
from router.openai.answers.openai_objects import AnswerObjects
from router.openai.answers.prompt_echo import EchoChoice, PromptEcho
from router.openai.answers.response_stream import Choice, ResponseStream
from router.openai.answers.resumable_streams import StreamMarks
from router.openai.fields.ignored import Ignored
from router.openai.generation_request import AnswerOptions
from router.openai.serving import OpenAIServing
from router.openai.tools.answer_reading import TextOptions
from router.request_context import RequestContext
from router.shell import TokenSink
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings
from router.text.thought_tokens import ThoughtTokens
from router.text.tokenizer import Tokenizer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WantedAnswer:
    """What a body asks for, and the requests to the core that it takes.

    Lives as long as the answer, so it holds no view of the body, of which one keeps all.
    """

    options: AnswerOptions
    max_tokens: int  # that /v1/messages was asked for
    asked: AskedAnswer  # what decides how much the answer will hold
    logprobs: LogprobObjects | None
    requests: list[ClientRequest]  # a choice each
    echoes: list[PromptEcho]  # their prompts, if the answer repeats or scores them
    ignored: Ignored  # what of the body is passed over


async def write_answer(
    serving: OpenAIServing,
    context: RequestContext,
    scope: Scope,
    receive: Receive,
    send: Send,
    wanted: WantedAnswer,
    objects: AnswerObjects,
    marks: StreamMarks | None,
    *,
    usage_chunk: bool,
) -> None:
    """Hand the requests of one answer to the core, and write what comes; those still running at the end are cancelled.

    Tokens pass in this order. What stands to the left is there for every answer, the rest if the request asks for it.

        WorkerReplies, RequestTable     a worker's message becomes `NewTokens`, an effect
        EffectPass, RouterShell         find the sink of the request:
            MeteredSink                     counts and pays, for the holder of an API key
            EchoChoice                      puts the prompt before the output
        Choice                          makes text of the output of one prompt, with
            Detokenizer                     tokens to text
            ThoughtTokens, AnswerParser     text to thoughts, calls and content
            StopStrings                     content up to the first of them
        ResponseStream                  keeps pieces of all choices until they are taken
        AnswerWriter                    takes them, whole or streamed, with
            KeptAnswer                      keeps them until the answer is complete, if it is not streamed
            StreamMarks                     leaves out what a resumed stream's client has, and gives ids
            AnswerObjects                   pieces to the JSON of one API, which the writer puts into events
        send                            of `KeyGuard` and `RequestIdMiddleware`, which add headers
        Exchange                        HTTP's framing
        ClientConnection, ClientOutput  to the socket
    """
    options, text, headers = wanted.options, wanted.options.text, wanted.ignored.headers
    with serving.answers.hold(wanted.requests[0].tenant) as holding:
        held = HeldBytes(holding, wanted.asked, serving.answer_bytes_max)
        wanted.ignored.log(context.rid)
        writer = AnswerWriter(
            serving.settings, context, objects, held, usage_chunk=usage_chunk, marks=marks, headers=headers
        )
        rids = [request.rid for request in wanted.requests]
        with serving.answer_of(rids, context.rid) as answer:
            for index, request in enumerate(wanted.requests):
                if answer.complete:
                    break
                echo = wanted.echoes[index] if wanted.echoes else None
                choice = _choice(index, request, answer, text, serving, echo)
                sink: TokenSink = choice
                if echo:
                    sink = EchoChoice(index, answer, echo, choice, streamed=options.stream)
                if context.account is not None:
                    request, sink = context.account.metered(request, sink)
                serving.shell.submit(request, sink)
            if options.stream:
                await writer.stream(scope, receive, send, answer)
            else:
                kept = KeptAnswer(wanted.echoes, options.likeliest, held)
                await writer.whole(scope, receive, send, answer, kept, serving.writing)


def _choice(
    index: int,
    request: ClientRequest,
    answer: ResponseStream,
    text: TextOptions,
    serving: OpenAIServing,
    echo: PromptEcho | None,
) -> Choice:
    parser = text.reading.parser(serving.tokenizer, request.token_ids) if text.reading else None
    return Choice(
        index,
        answer,
        _detokenizer(serving.tokenizer, request, text),
        StopStrings(text.stops, include=text.include_stop),
        partial(serving.shell.stop, request.rid),
        stop_token_ids=request.params.stop_token_ids,
        with_token_ids=text.token_ids,
        parser=parser,
        thoughts=ThoughtTokens(parser) if parser and parser.reads_thoughts else None,
        shows_thoughts=text.reading is None or text.reading.shows_thoughts,
        begins_at=len(echo.text) if echo else 0,
    )


def _detokenizer(tokenizer: Tokenizer, request: ClientRequest, options: TextOptions) -> Detokenizer:
    ends = request.params.stop_token_ids
    skip = tokenizer.special_token_ids if options.skip_special_tokens else frozenset()
    if options.reading is not None:
        skip -= tokenizer.marks(options.reading.reader.format.special_tokens)
    skip = skip - set(ends) if options.include_stop else skip | set(ends)
    decoder = tokenizer if skip >= tokenizer.special_token_ids else tokenizer.spelling_specials
    return Detokenizer(decoder, skip, request.token_ids if options.continues_prompt else ())
