"""What a TLS holder refuses to give, and bytes that are not those that were sealed."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from shared.links.keys import key_file, new_identity, parse_keys
from shared.transfer.grants import Grants, Verdict
from shared.transfer.reader import SPANS_MAX
from shared.transfer.tls.channel import PORTION_BYTES, TAG_BYTES, FrameKind, TlsChannel
from shared.transfer.tls.keys import (
    HANDSHAKE_BYTES_MAX,
    Handshake,
    TlsContexts,
    TlsError,
    Version,
    make_contexts,
)
from shared.transfer.tls.offered_memory import OfferedMemory
from shared.transfer.tls.protocol import (
    CheckLease,
    GetPages,
    GetWord,
    cut_portions,
    decode_request,
    encode_request,
)
from tests.fetcher_contract import PAGE_BYTES, PageBuffer
from tests.fuzzing import fuzzed
from tests.link_keys import new_keys
from tests.unit.transfer.tls_holder_here import CONTEXTS as NEWER_CONTEXTS
from tests.unit.transfer.tls_holder_here import OLDER_CONTEXTS

PAGES = 4
KNOWN = PAGES * PAGE_BYTES  # where the known page begins
ALL = KNOWN + PAGE_BYTES
KEYS = new_keys()["worker"]
CONTEXTS = make_contexts(KEYS)


class Offered:
    """Four pages and a known one, eight lease words."""

    def __init__(self) -> None:
        self.buffer = PageBuffer(PAGES)
        self.words = Grants(8)
        self.memory = OfferedMemory(self.buffer.memory, self.words)


@pytest.fixture
def offered() -> Offered:
    return Offered()


# ---- what may be read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "span",
    [
        (-1, 8),
        (-PAGE_BYTES, PAGE_BYTES),
        (0, 0),
        (0, -8),
        (0, ALL + 1),
        (ALL, 1),
        (ALL - 8, 16),
        (2**62, 2**62),
    ],
)
def test_a_span_outside_the_pages_is_refused(offered: Offered, span: tuple[int, int]) -> None:
    assert "not within" in offered.memory.refusal(GetPages(3, 77, (span,)))
    assert "not within" in offered.memory.refusal(GetPages(3, 77, ((0, 8), span)))


def test_the_pages_may_be_read_to_their_last_byte(offered: Offered) -> None:
    assert offered.memory.refusal(GetPages(3, 77, ((0, ALL),))) == ""
    assert offered.memory.refusal(GetPages(3, 77, ((ALL - 1, 1),))) == ""
    last = offered.memory.page_bytes_at(ALL - 1, 1)
    assert last is not None
    assert last.readonly


def test_more_than_all_pages_and_nothing_at_all_are_refused(offered: Offered) -> None:
    assert "more bytes" in offered.memory.refusal(GetPages(3, 77, ((0, ALL), (0, 1))))
    assert "no span" in offered.memory.refusal(GetPages(3, 77, ()))


@pytest.mark.parametrize("lease", [-1, 8, 2**60])
def test_a_lease_that_is_none_is_refused(offered: Offered, lease: int) -> None:
    assert "is not one of 8" in offered.memory.refusal(GetWord(lease))
    assert "is not one of 8" in offered.memory.refusal(CheckLease(lease, 77))
    assert "is not one of 8" in offered.memory.refusal(GetPages(lease, 77, ((0, 8),)))


def test_pages_open_under_their_lease_alone(offered: Offered) -> None:
    page = GetPages(3, 77, ((0, PAGE_BYTES),))
    assert offered.memory.verdict({}, page) is Verdict.GONE
    offered.words.write(3, 77, (0, 1))
    assert offered.memory.verdict({}, page) is Verdict.GIVEN
    assert offered.memory.is_open({}, page)
    for other in (GetPages(3, 78, page.spans), GetPages(2, 77, page.spans)):
        assert offered.memory.verdict({}, other) is Verdict.GONE
        assert not offered.memory.is_open({}, other)
    offered.words.clear(3)
    assert not offered.memory.is_open({}, page)
    assert not offered.memory.is_open({}, GetPages(3, 0, page.spans)), "0 is the word of no lease"
    assert offered.memory.verdict({}, GetPages(3, 0, page.spans)) is Verdict.GONE


@pytest.mark.parametrize(
    ("spans", "verdict"),
    [
        (((0, 2 * PAGE_BYTES),), Verdict.GIVEN),
        (((3 * PAGE_BYTES, PAGE_BYTES), (PAGE_BYTES, 1)), Verdict.GIVEN),
        (((0, 2 * PAGE_BYTES + 1),), Verdict.BEYOND),
        (((2 * PAGE_BYTES, 1),), Verdict.BEYOND),
        (((3 * PAGE_BYTES - 1, 2),), Verdict.BEYOND),
        (((0, 8), (3 * PAGE_BYTES - 8, 8)), Verdict.BEYOND),
        (((3 * PAGE_BYTES, PAGE_BYTES + 1),), Verdict.BEYOND),
    ],
)
def test_a_lease_opens_its_own_pages_to_their_last_byte_and_no_other(
    offered: Offered, spans: tuple[tuple[int, int], ...], verdict: Verdict
) -> None:
    offered.words.write(3, 77, (1, 3, 0))
    assert offered.memory.verdict({}, GetPages(3, 77, spans)) is verdict


def test_the_known_page_is_open_to_every_worker(offered: Offered) -> None:
    assert offered.memory.verdict({}, GetPages(3, 77, ((KNOWN, PAGE_BYTES),))) is Verdict.GIVEN
    assert offered.memory.is_open({}, GetPages(3, 77, ((KNOWN, PAGE_BYTES),)))
    for spans in (((KNOWN - 1, PAGE_BYTES),), ((KNOWN, 8), (0, 8))):
        assert offered.memory.verdict({}, GetPages(3, 77, spans)) is Verdict.GONE
        assert not offered.memory.is_open({}, GetPages(3, 77, spans))


def test_without_a_known_page_nothing_is_open_to_every_worker() -> None:
    buffer = PageBuffer(PAGES)
    pages = replace(buffer.memory, known_pages=0)
    memory = OfferedMemory(pages, Grants(8))
    assert pages.known_page < 0
    assert memory.verdict({}, GetPages(3, 77, ((0, PAGE_BYTES),))) is Verdict.GONE
    assert not memory.is_open({}, GetPages(3, 77, ((0, PAGE_BYTES),)))


def test_a_request_of_more_spans_than_a_holder_answers_is_none() -> None:
    spans = ((0, 1),) * SPANS_MAX
    assert decode_request(encode_request(GetPages(3, 77, spans)), Version.BOUND) == GetPages(3, 77, spans)
    with pytest.raises(TlsError, match="no request"):
        decode_request(encode_request(GetPages(3, 77, (*spans, (0, 1)))), Version.BOUND)


@fuzzed
@given(st.binary(max_size=200), st.sampled_from(Version))
def test_bytes_that_are_no_request_are_an_error_and_nothing_else(payload: bytes, version: Version) -> None:
    try:
        request = decode_request(payload, version)
    except TlsError:
        return
    Offered().memory.refusal(request)


@fuzzed
@given(st.lists(st.tuples(st.integers(), st.integers()), max_size=5), st.integers(), st.integers())
def test_what_is_not_refused_lies_within_the_pages(
    spans: list[tuple[int, int]], lease: int, nonce: int
) -> None:
    try:
        request = decode_request(encode_request(GetPages(lease, nonce, tuple(spans))), Version.BOUND)
    except (TlsError, OverflowError):
        return
    if not Offered().memory.refusal(request):
        assert all(0 <= offset < offset + size <= ALL for offset, size in spans)
        assert 0 <= lease < 8


@given(st.lists(st.integers(1, 3 * PORTION_BYTES), max_size=12))
def test_portions_cover_every_byte_once_and_in_order(sizes: list[int]) -> None:
    portions = list(cut_portions(sizes))
    rows = [
        (piece.span, begin)
        for portion in portions
        for piece in portion
        for begin in (piece.begin, piece.begin + piece.size_bytes)
    ]
    assert rows == sorted(rows)
    taken = [0] * len(sizes)
    for portion in portions:
        assert 0 < sum(piece.size_bytes for piece in portion) <= PORTION_BYTES
        for piece in portion:
            assert piece.begin == taken[piece.span]
            taken[piece.span] += piece.size_bytes
    assert taken == sizes


# ---- frames ----------------------------------------------------------------------------------------------------


class ChannelPair:
    """Two ends, and the bytes between them."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        one, other = os.urandom(32), os.urandom(32)
        self.sender = TlsChannel(self.near, sends_with=one, receives_with=other)
        self.receiver = TlsChannel(self.far, sends_with=other, receives_with=one)

    def take(self) -> bytearray:
        """The frame that is under way, out of the wire."""
        return bytearray(self.far.recv(PORTION_BYTES))

    def receive(self, frame: bytes | bytearray) -> bytes:
        self.near.sendall(frame)
        size, _ = self.receiver.receive_header()
        into = memoryview(bytearray(size))
        self.receiver.receive_payload(into)
        return bytes(into)


@pytest.fixture
def wire() -> Iterator[ChannelPair]:
    wire = ChannelPair()
    yield wire
    wire.near.close()
    wire.far.close()


@pytest.mark.parametrize("place", [4, 5, 12, -1])
def test_a_changed_byte_does_not_open(wire: ChannelPair, place: int) -> None:
    """Of the kind, of the payload, of the tag."""
    wire.sender.send(FrameKind.DATA, b"KV pages")
    frame = wire.take()
    frame[place] ^= 1
    with pytest.raises(TlsError, match="does not open"):
        wire.receive(frame)


def test_a_frame_that_comes_twice_does_not_open(wire: ChannelPair) -> None:
    wire.sender.send(FrameKind.DATA, b"KV pages")
    frame = wire.take()
    assert wire.receive(frame) == b"KV pages"
    with pytest.raises(TlsError, match="does not open"):
        wire.receive(frame)


def test_a_frame_that_is_left_out_is_noticed(wire: ChannelPair) -> None:
    wire.sender.send(FrameKind.DATA, b"first")
    wire.take()
    wire.sender.send(FrameKind.DATA, b"second")
    with pytest.raises(TlsError, match="does not open"):
        wire.receive(wire.take())


def test_equal_payloads_look_different_on_the_wire(wire: ChannelPair) -> None:
    frames = []
    for _ in range(2):
        wire.sender.send(FrameKind.DATA, b"KV pages" * 4)
        frames.append(wire.take()[5:])
    assert frames[0] != frames[1]
    assert b"KV pages" not in frames[0] + frames[1]


def test_a_frame_larger_than_a_portion_is_refused_before_it_is_read(wire: ChannelPair) -> None:
    with pytest.raises(TlsError, match="expected at most"):
        wire.receive((PORTION_BYTES + 1).to_bytes(4, "little") + b"\x02" + bytes(TAG_BYTES))


# ---- handshakes ------------------------------------------------------------------------------------------------


def shake(holder: TlsContexts, reader: TlsContexts) -> tuple[Handshake, Handshake]:
    """Both ends, until neither has anything to say."""
    one, other = Handshake(holder.holder, holder=True), Handshake(reader.reader, holder=False)
    said = other.advance()
    while said:
        answer = one.advance(said)
        said = other.advance(answer) if answer else b""
    return one, other


def test_both_ends_have_the_same_keys_and_other_ones_each_time() -> None:
    holder, reader = shake(CONTEXTS, CONTEXTS)
    assert holder.keys is not None
    assert holder.keys == reader.keys
    assert holder.keys.requests != holder.keys.answers
    assert shake(CONTEXTS, CONTEXTS)[0].keys != holder.keys


@pytest.mark.parametrize("older", ["neither", "holder", "reader", "both"])
def test_both_ends_come_to_the_version_that_both_speak(older: str) -> None:
    ends = shake(
        OLDER_CONTEXTS if older in ("holder", "both") else NEWER_CONTEXTS,
        OLDER_CONTEXTS if older in ("reader", "both") else NEWER_CONTEXTS,
    )
    expected = Version.BOUND if older == "neither" else Version.OLDER
    assert [end.keys.version for end in ends if end.keys] == [expected] * 2


def test_workers_of_two_deployments_do_not_come_to_keys() -> None:
    with pytest.raises(TlsError, match="TLS"):
        shake(CONTEXTS, make_contexts(new_keys()["worker"]))


def trusting_all() -> TlsContexts:
    """Of a foreigner who asks nobody for a certificate."""
    contexts = make_contexts(new_keys()["worker"])
    contexts.holder.verify_mode = contexts.reader.verify_mode = ssl.CERT_NONE
    return contexts


def test_each_end_asks_for_a_listed_certificate_whatever_the_other_does() -> None:
    assert shake(trusting_all(), trusting_all())[0].keys is not None
    with pytest.raises(TlsError, match="TLS"):
        shake(CONTEXTS, trusting_all())
    with pytest.raises(TlsError, match="TLS"):
        shake(trusting_all(), CONTEXTS)


def test_no_handshake_can_be_resumed() -> None:
    _, reader = shake(CONTEXTS, CONTEXTS)
    assert reader._tls.session is not None
    assert not reader._tls.session.has_ticket


def test_an_older_tls_is_not_spoken() -> None:
    old = make_contexts(KEYS)
    old.reader.minimum_version = old.reader.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(TlsError, match="TLS"):
        shake(CONTEXTS, old)


def test_bytes_right_behind_a_handshake_end_it() -> None:
    """A reader asks when it has its keys, and those come after its last word."""
    holder, reader = Handshake(CONTEXTS.holder, holder=True), Handshake(CONTEXTS.reader, holder=False)
    last_word = reader.advance(holder.advance(reader.advance()))
    with pytest.raises(TlsError, match="before their time"):
        holder.advance(last_word + b"a request")
    assert holder.keys is None


def test_a_listed_certificate_is_trusted_after_its_last_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is listed is trusted; dates mean nothing, so no deployment stops at one."""
    monkeypatch.setattr("shared.links.keys.VALID_DAYS", -0.5)
    worker, router = new_identity("worker"), new_identity("router")
    certificate = x509.load_pem_x509_certificate(worker.certificate)
    assert certificate.not_valid_after_utc < datetime.now(UTC)
    contexts = make_contexts(parse_keys(key_file(worker, worker, router), "worker"))
    holder, reader = shake(contexts, contexts)
    assert holder.keys is not None
    assert holder.keys == reader.keys


def test_a_handshake_is_bounded_in_bytes() -> None:
    handshake = Handshake(CONTEXTS.holder, holder=True)
    with pytest.raises(TlsError, match="longer than"):
        handshake.advance(bytes(HANDSHAKE_BYTES_MAX + 1))


@fuzzed
@given(st.binary(min_size=1, max_size=600), st.booleans())
def test_any_bytes_end_a_handshake_or_leave_it_waiting(received: bytes, hello: bool) -> None:
    handshake = Handshake(CONTEXTS.holder, holder=True)
    prefix = b"\x16\x03\x01\x02\x00\x01" if hello else b""
    with contextlib.suppress(TlsError):
        handshake.advance(prefix + received)
    assert handshake.keys is None
