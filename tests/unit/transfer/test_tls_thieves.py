"""Workers of ours that want KV which is not theirs: they have a worker's key, and the sockets are real ones.

A thief has no baton, or one of another request. Whatever it asks, and whichever release it says it is of, it gets no
page but those of its own lease.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
from msgspec.structs import replace

from shared.transfer.counters import OTHER_PEERS, PEERS_COUNTED_MAX, KvCounters
from shared.transfer.fetches import FetchLimits
from shared.transfer.grants import Grants, Verdict
from shared.transfer.protocol import FetchEvent, FetchFailed, FetchLanded
from shared.transfer.tls.channel import FrameKind
from shared.transfer.tls.keys import TlsContexts
from shared.transfer.tls.protocol import (
    ENDED,
    HOLDS,
    CheckLease,
    GetPages,
    GetWord,
    Request,
    encode_request,
)
from shared.transfer.tls.transport import TlsAddress, TlsOffer
from shared.transfer.transfer import Transfer
from shared.wire.baton import Baton, Holder
from tests.fetcher_contract import KV_FORMAT, PAGE_BYTES, PATIENCE_SECONDS, PageBuffer, byte_of
from tests.link_keys import new_keys
from tests.unit.transfer.tls_holder_here import (
    CONTEXTS,
    LEASE,
    NONCE,
    OLDER_CONTEXTS,
    OTHER_NONCE,
    HolderHere,
    dial,
    is_served,
    receive,
    shake_on,
)
from tests.waiting import until

HONEST, FORGED = 83, 70  # bytes of pages
OTHER_LEASE = LEASE + 1  # opens page 1 alone
PAGE = ((0, PAGE_BYTES),)
BOTH = pytest.mark.parametrize("contexts", [CONTEXTS, OLDER_CONTEXTS], ids=["this release", "the one before"])


@pytest.fixture
def holder() -> Iterator[HolderHere]:
    here = HolderHere()
    yield here
    here.tls.close()


class Knocker:
    """A connection with a worker's key."""

    def __init__(self, holder: HolderHere, contexts: TlsContexts = CONTEXTS):
        self.connection, self.channel = dial(holder, contexts)

    def __enter__(self) -> Knocker:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def ask(self, request: Request) -> tuple[FrameKind, bytes]:
        self.channel.send(FrameKind.REQUEST, encode_request(request))
        return receive(self.channel)

    def word(self, lease: int) -> int:
        kind, word = self.ask(GetWord(lease))
        assert kind is FrameKind.DATA
        return int.from_bytes(word, "little")

    def kind(self, request: Request) -> FrameKind:
        return self.ask(request)[0]


def refused(holder: HolderHere) -> int:
    return holder.counters.reads_refused["127.0.0.1"]


# ---- without a lease -------------------------------------------------------------------------------------------


def test_a_worker_of_this_release_is_told_no_word(holder: HolderHere) -> None:
    with Knocker(holder) as thief:
        thief.channel.send(FrameKind.REQUEST, encode_request(GetWord(LEASE)))
        assert thief.connection.recv(1) == b"", "it is no request here"
    assert holder.counters.refused_request == 1


def test_whether_a_lease_holds_is_answered_to_its_nonce_alone(holder: HolderHere) -> None:
    with Knocker(holder) as worker:
        assert worker.ask(CheckLease(LEASE, NONCE)) == (FrameKind.DATA, HOLDS)
        for wrong in (
            CheckLease(LEASE, NONCE + 1),
            CheckLease(LEASE, 0),
            CheckLease(0, 0),
            CheckLease(0, NONCE),
        ):
            assert worker.ask(wrong) == (FrameKind.DATA, ENDED)
    assert refused(holder) == 4


@BOTH
def test_a_guessed_nonce_opens_nothing_and_is_counted(holder: HolderHere, contexts: TlsContexts) -> None:
    with Knocker(holder, contexts) as thief:
        guesses = (0, NONCE - 1, NONCE + 1, OTHER_NONCE, 2**64 - 1, -NONCE)
        assert [thief.kind(GetPages(LEASE, guess, PAGE)) for guess in guesses] == [FrameKind.GONE] * 6
    assert refused(holder) == 6


@BOTH
def test_a_word_that_was_told_opens_no_page(holder: HolderHere, contexts: TlsContexts) -> None:
    """The way of the release before gives words to whoever asks."""
    with Knocker(holder, OLDER_CONTEXTS) as thief, Knocker(holder, contexts) as again:
        assert thief.word(LEASE) == NONCE
        assert holder.counters.words_told == 1
        assert thief.kind(GetPages(LEASE, NONCE, PAGE)) is FrameKind.GONE
        assert again.kind(GetPages(LEASE, NONCE, PAGE)) is FrameKind.GONE
        assert thief.word(0) == 0, "no lease lives there"


def test_pages_that_were_not_given_are_never_followed_by_a_lease_that_holds(holder: HolderHere) -> None:
    """The reader would take what it has for the pages."""
    with ExitStack() as stack:
        thief, older = (stack.enter_context(Knocker(holder, OLDER_CONTEXTS)) for _ in range(2))
        newer = stack.enter_context(Knocker(holder))
        assert thief.word(LEASE) == NONCE
        assert older.kind(GetPages(LEASE, NONCE, PAGE)) is FrameKind.GONE
        assert newer.kind(GetPages(LEASE, NONCE, PAGE)) is FrameKind.GONE
        assert older.word(LEASE) == 0
        assert newer.ask(CheckLease(LEASE, NONCE)) == (FrameKind.DATA, ENDED)
        assert thief.word(LEASE) == 0


# ---- with a lease ----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "spans",
    [
        ((0, PAGE_BYTES),),
        ((2 * PAGE_BYTES, 8),),
        ((PAGE_BYTES, PAGE_BYTES + 1),),
        ((PAGE_BYTES - 1, PAGE_BYTES),),
        ((PAGE_BYTES, 8), (5 * PAGE_BYTES, 8)),
    ],
    ids=["another page", "the next one", "a byte behind", "a byte before", "beside its own"],
)
def test_one_lease_opens_no_page_of_another(
    holder: HolderHere, contexts: TlsContexts, spans: tuple[tuple[int, int], ...]
) -> None:
    with Knocker(holder, contexts) as worker:
        own = GetPages(OTHER_LEASE, OTHER_NONCE, ((PAGE_BYTES, PAGE_BYTES),))
        assert worker.ask(own) == (FrameKind.DATA, bytes([byte_of(1)]) * PAGE_BYTES)
        kind, sentence = worker.ask(GetPages(OTHER_LEASE, OTHER_NONCE, spans))
        assert (kind, sentence) == (FrameKind.REFUSED, b"pages that are not those of lease 4")
        assert worker.kind(own) is FrameKind.DATA, "the connection lives"
    assert (holder.counters.reads["127.0.0.1"], refused(holder)) == (2, 1)


@BOTH
def test_a_lease_that_has_ended_opens_nothing_to_its_nonce_under_another_one(
    holder: HolderHere, contexts: TlsContexts
) -> None:
    read = GetPages(LEASE, NONCE, PAGE)
    with Knocker(holder, contexts) as worker:
        assert worker.kind(read) is FrameKind.DATA
        holder.words.clear(LEASE)
        assert worker.kind(read) is FrameKind.GONE
        holder.words.write(LEASE, NONCE + 1, (7,))
        assert worker.kind(read) is FrameKind.GONE
        assert worker.kind(GetPages(LEASE, NONCE + 1, PAGE)) is FrameKind.REFUSED


def test_nonces_do_not_follow_from_each_other() -> None:
    grants = Grants(1)
    nonces = []
    for _ in range(200):
        nonces.append(grants.open(0, ()))
        grants.clear(0)
    assert len(set(nonces)) == 200
    steps = {(second - first) % 2**64 for first, second in itertools.pairwise(nonces)}
    assert len(steps) == 199
    for bit in range(64):
        assert 40 < sum(nonce >> bit & 1 for nonce in nonces) < 160, f"bit {bit} tells something"


# ---- workers of the release before that are honest ---------------------------------------------------------------


def test_an_older_worker_that_has_read_the_pages_is_told_the_word_and_closes_nothing(
    holder: HolderHere,
) -> None:
    with Knocker(holder, OLDER_CONTEXTS) as older, Knocker(holder) as newer:
        assert older.kind(GetPages(LEASE, NONCE, PAGE)) is FrameKind.DATA
        assert older.word(LEASE) == NONCE
        assert newer.kind(GetPages(LEASE, NONCE, PAGE)) is FrameKind.DATA
    assert holder.counters.words_told == 0


@BOTH
def test_a_thief_stops_no_read_that_has_begun(holder: HolderHere, contexts: TlsContexts) -> None:
    with Knocker(holder, contexts) as reader, Knocker(holder, OLDER_CONTEXTS) as thief:
        assert reader.kind(GetPages(LEASE, NONCE, PAGE)) is FrameKind.DATA
        assert thief.word(LEASE) == NONCE
        assert thief.kind(GetPages(LEASE, NONCE, PAGE)) is FrameKind.GONE
        assert reader.kind(GetPages(LEASE, NONCE, PAGE)) is FrameKind.DATA


def test_the_next_lease_of_a_told_word_opens_its_pages(holder: HolderHere) -> None:
    with Knocker(holder, OLDER_CONTEXTS) as older:
        assert older.word(LEASE) == NONCE
        holder.words.clear(LEASE)
        holder.words.write(LEASE, 99, (0,))
        assert older.kind(GetPages(LEASE, 99, PAGE)) is FrameKind.DATA


# ---- counting --------------------------------------------------------------------------------------------------


def test_reads_are_counted_by_the_address_that_they_come_from(holder: HolderHere) -> None:
    with socket.socket() as connection:
        connection.bind(("127.0.0.9", 0))
        connection.connect(holder.address)
        assert is_served(shake_on(connection, CONTEXTS))
    assert holder.counters.reads == {"127.0.0.9": 1}


def test_addresses_beyond_the_bound_are_counted_together() -> None:
    counters = KvCounters()
    for number in range(PEERS_COUNTED_MAX + 10):
        for answered in (True, False):
            counters.count_read(f"10.0.{number // 256}.{number % 256}", answered=answered)
    assert len(counters.reads) == len(counters.reads_refused) == PEERS_COUNTED_MAX + 1
    assert counters.reads[OTHER_PEERS] == counters.reads_refused[OTHER_PEERS] == 10
    counters.count_read("10.0.0.0", answered=True)
    assert counters.reads["10.0.0.0"] == 2


# ---- in the name of another worker -----------------------------------------------------------------------------


class Impostor:
    """A worker that gives any bytes as pages, says that all leases hold, and notes what it is asked for."""

    def __init__(self, offer: TlsOffer, monkeypatch: pytest.MonkeyPatch):
        self.asked: list[GetPages] = []
        memory = offer._server._memory
        monkeypatch.setattr(memory, "refusal", self._note)
        monkeypatch.setattr(memory, "verdict", lambda *_: Verdict.GIVEN)
        monkeypatch.setattr(memory, "is_open", lambda *_: True)
        monkeypatch.setattr(memory.grants, "holds", lambda *_: True)

    def _note(self, request: GetPages) -> str:
        self.asked.append(request)
        return ""


class Workers:
    """An honest worker, an impostor, and one that reads from both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: ExitStack):
        keys = new_keys()["worker"]
        self.buffers = {uid: PageBuffer(4) for uid in ("honest", "impostor", "reader")}
        self.offers = {
            uid: TlsOffer(uid, 1, buffer.memory, 8, address="127.0.0.1", ports=range(1), keys=keys)
            for uid, buffer in self.buffers.items()
        }
        for uid, buffer in self.buffers.items():
            buffer.memory.write_known_bytes(buffer.memory.known_page)
            for page in (0, 1) if uid != "reader" else ():
                buffer.fill(page, HONEST if uid == "honest" else FORGED)
        reader = self.offers["reader"]
        limits = FetchLimits(4, PATIENCE_SECONDS, PATIENCE_SECONDS)
        self.transfer = Transfer(
            reader, self.buffers["reader"].memory, KV_FORMAT, limits=limits, clock=time.monotonic
        )
        stack.callback(self.transfer.close)
        for uid in ("honest", "impostor"):
            stack.callback(self.offers[uid].close)
        self.impostor = Impostor(self.offers["impostor"], monkeypatch)

    def fetch(self, baton: Baton, into: tuple[int, ...]) -> FetchEvent:
        events: list[FetchEvent] = []

        def has_ended() -> bool:
            events.extend(self.transfer.poll())
            return bool(events)

        self.transfer.start(1, baton, 0, into)
        until(has_ended, PATIENCE_SECONDS, "the end of a fetch")
        return events[0]

    def honest_baton(self) -> Baton:
        return _baton(self.offers["honest"].holder, self.offers["honest"].words.open(3, (0, 1)))

    def lying_baton(self, **lie: object) -> Baton:
        """The impostor's own, but for what it lies about."""
        return _baton(replace(self.offers["impostor"].holder, **lie), NONCE)

    def assert_honest_pages_come(self) -> None:
        """They come from their holder, and the impostor has heard nothing of their lease."""
        honest, into = self.honest_baton(), (2, 3)
        assert isinstance(self.fetch(honest, into), FetchLanded)
        assert all(self.buffers["reader"].holds(page, HONEST) for page in into)
        assert honest.nonce not in {asked.nonce for asked in self.impostor.asked}
        assert self.offers["honest"].counters.reads["127.0.0.1"]


def _baton(holder: Holder, nonce: int) -> Baton:
    return Baton("r", 1, holder, KV_FORMAT, 3, nonce, 32, 30, (0, 1))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(monkeypatch, stack)


def test_a_worker_that_names_the_agent_of_another_is_not_read_in_its_place(workers: Workers) -> None:
    """Whatever let the baton pass: the reader itself keeps the two apart."""
    lying = workers.lying_baton(agent=workers.offers["honest"].holder.agent)
    assert isinstance(workers.fetch(lying, (0, 1)), FetchLanded), "it is read at its own address"
    assert workers.impostor.asked
    workers.assert_honest_pages_come()


def test_a_worker_that_takes_name_and_agent_of_another_is_not_read_in_its_place(workers: Workers) -> None:
    there = workers.offers["honest"].holder
    lying = workers.lying_baton(uid=there.uid, epoch=there.epoch, agent=there.agent)
    assert isinstance(workers.fetch(lying, (0, 1)), FetchLanded)
    workers.assert_honest_pages_come()


def test_a_worker_that_cannot_be_read_under_the_agent_of_another_stops_no_read_of_it(
    workers: Workers,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = msgspec.msgpack.encode(TlsAddress(*listener.getsockname()))
    lying = workers.lying_baton(agent=workers.offers["honest"].holder.agent, metadata=nowhere)
    assert isinstance(workers.fetch(lying, (0, 1)), FetchFailed)
    workers.assert_honest_pages_come()
