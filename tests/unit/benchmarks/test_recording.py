"""What the client makes of the bytes that servers send, however they are cut into pieces."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.client.errors import BenchError
from tests.benchmarks.client.recording import Recording, understand


def event(text: str = "", reason: str | None = None) -> bytes:
    body = {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": None}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(prompt: int, output: int, cached: int | None = None) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": {**counts, **details}}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def recording(*pieces: bytes, tokens: int = 3, cut: bool = False) -> Recording:
    """Pieces that came at 1, 2, 3, … seconds."""
    return Recording(tokens, 0.5, [(float(k + 1), piece) for k, piece in enumerate(pieces)], cut)


def test_each_event_has_its_time_and_the_counts_are_the_servers() -> None:
    pieces = event("a"), event(" b"), event("", "length"), usage(7, 3, cached=4) + DONE
    stream = understand(recording(*pieces))
    assert stream.times == (1.0, 2.0, 3.0)
    assert (stream.prompt_tokens, stream.cached_tokens, stream.output_tokens) == (7, 4, 3)
    assert (stream.first, stream.last) == (1.0, 3.0)


def test_an_event_in_two_pieces_has_the_time_of_the_second() -> None:
    whole = event("a")
    stream = understand(recording(whole[:20], whole[20:], event("b", "length"), usage(1, 3) + DONE))
    assert stream.times == (2.0, 3.0)


def test_two_events_in_one_piece_have_the_same_time() -> None:
    stream = understand(recording(event("a") + event("b"), event("c", "length") + usage(1, 3), DONE))
    assert stream.times == (1.0, 1.0, 2.0)


def test_comments_carriage_returns_and_events_without_text_are_no_tokens() -> None:
    pieces = b": waiting\n\n", event(""), event("a").replace(b"\n", b"\r\n"), event("b", "length")
    assert understand(recording(*pieces, usage(1, 3) + DONE)).times == (3.0, 4.0)


def test_usage_may_come_with_the_last_choice() -> None:
    last = json.loads(event("c", "length")[6:])
    last["usage"] = {"prompt_tokens": 5, "completion_tokens": 3}
    stream = understand(recording(event("a"), b"data: " + json.dumps(last).encode() + b"\n\n", DONE))
    assert (stream.prompt_tokens, stream.cached_tokens) == (5, 0)


def test_a_stream_that_the_client_left_needs_no_end() -> None:
    stream = understand(recording(event("a"), event("b"), event("c")[:9], cut=True))
    assert stream.cut
    assert stream.times == (1.0, 2.0)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ((event("a"), event("b")), "broke off after 2 events"),
        ((DONE,), "broke off after 0 events"),
        ((event("a", "length"), DONE), "no usage"),
        ((event("a", "stop"), usage(5, 2), DONE), "after 2 of 3 tokens"),
        ((event("a"), b'data: {"error": {"message": "worker lost"}}\n\n'), "worker lost"),
        ((b"data: <html>\n\n",), "no chunk"),
    ],
)
def test_what_is_not_a_whole_stream_is_refused(pieces: tuple[bytes, ...], said: str) -> None:
    with pytest.raises(BenchError, match=said):
        understand(recording(*pieces))
