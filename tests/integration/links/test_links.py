"""Links over real sockets: processes that are killed, frozen and restarted, and connections that are refused."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.links import sockets
from shared.links.dialing import SendFrames
from shared.links.events import PeerDown, Received
from shared.links.session import seal
from shared.links.sockets import RouterLinks, WorkerLinks
from shared.primitives.errors import StartError
from shared.wire.messages import Cancel, Migrate, Refused, encode
from tests.integration.links.watched_links import (
    KEY_FILES,
    KEYS,
    ROUTER,
    ROUTER_HELLO,
    WORKER,
    WORKER_HELLO,
    Watched,
    address_of,
    dial,
    listen,
    start_echo,
    stranger,
)
from tests.link_keys import new_keys
from tests.link_settings import link_settings, write_note

FOREIGN_KEYS = new_keys()


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """The keys of this module, as a process reads them."""
    path = tmp_path / "worker.pem"
    path.touch(0o600)
    path.write_bytes(KEY_FILES["worker"])
    return path


def test_messages_cross_in_order_and_without_loss(stack: ExitStack) -> None:
    worker = Watched(listen(stack))
    router = Watched(dial(stack, address_of(worker)))
    assert router.until_up().peer == WORKER
    assert worker.until_up().peer == ROUTER
    for number in range(3000):
        router.links.send(WORKER, Cancel(str(number), 0))
        worker.links.send(ROUTER, Refused(str(number), 0, "stale"))
    worker.until(lambda: len(worker.messages()) == 3000, "all commands")
    router.until(lambda: len(router.messages()) == 3000, "all answers")
    assert worker.messages() == [Cancel(str(number), 0) for number in range(3000)]
    assert router.messages() == [Refused(str(number), 0, "stale") for number in range(3000)]


def test_the_link_outlives_a_step_longer_than_the_silence_limit(stack: ExitStack) -> None:
    settings = link_settings(heartbeat_seconds=0.1, silence_seconds=2.0)
    worker = Watched(listen(stack, settings))
    router = Watched(dial(stack, address_of(worker), settings))
    worker.until_up()
    router.until_up()
    assert router.links.receive(3.0) == []  # and nothing reads from the worker's links meanwhile
    assert worker.links.receive(0.0) == []


def test_a_killed_worker_is_down_at_once_and_its_successor_is_another_peer(
    stack: ExitStack, keys_file: Path
) -> None:
    process, address = start_echo(stack, keys_file, epoch=1)
    router = Watched(dial(stack, address))
    assert router.until_up().peer == "echo/0000000000000001"
    process.kill()
    process.wait()
    killed_at = time.monotonic()
    assert router.until_down().peer == "echo/0000000000000001"
    assert time.monotonic() - killed_at < link_settings().silence_seconds - 1
    start_echo(stack, keys_file, epoch=2, port=address.rpartition(":")[2])
    assert router.until_up(2).peer == "echo/0000000000000002"


def test_a_frozen_worker_sends_nothing_more_in_the_session_that_ended_meanwhile(
    stack: ExitStack, keys_file: Path
) -> None:
    process, address = start_echo(stack, keys_file, epoch=1)
    router = Watched(dial(stack, address))
    peer = router.until_up().peer
    process.send_signal(signal.SIGSTOP)
    router.links.send(peer, Cancel("asked while frozen", 0))
    assert router.until_down().reason == "silence"
    process.send_signal(signal.SIGCONT)
    assert router.until_up(2).peer == peer
    router.links.send(peer, Cancel("asked afterwards", 0))
    router.until(lambda: router.messages(), "an answer")
    assert router.messages() == [Refused("asked afterwards", 0, "stale")]


def test_a_router_that_closes_sends_closed(stack: ExitStack) -> None:
    worker = Watched(listen(stack))
    router = dial(stack, address_of(worker))
    worker.until_up()
    router.close()
    assert worker.until_down().reason == "closed by the router: disconnected here"


def test_a_worker_that_is_disconnected_is_not_dialed_again(stack: ExitStack) -> None:
    settings = link_settings(redial_seconds=0.01)
    worker = Watched(listen(stack, settings))
    router = dial(stack, address_of(worker), settings)
    worker.until_up()
    router.disconnect(address_of(worker))
    worker.until_down()
    assert worker.links.receive(0.3) == []


def test_a_reader_that_never_reads_loses_its_session_and_the_sender_never_blocks(stack: ExitStack) -> None:
    worker = listen(stack, link_settings(unread_messages_max=100))
    router = Watched(dial(stack, worker.address))
    router.until_up()
    for number in range(20_000):
        router.links.send(WORKER, Cancel(str(number), 0))
    router.until_down()
    events = worker.receive(0.0)
    messages = [event.message for event in events if isinstance(event, Received)]
    numbers = [int(message.rid) for message in messages if isinstance(message, Cancel)]
    assert numbers == list(range(len(numbers)))
    assert len(events) < 1000


@pytest.mark.parametrize(
    ("own", "server", "counter"),
    [
        pytest.param(None, None, "refused_unencrypted", id="no key"),
        pytest.param(
            FOREIGN_KEYS["router"].own.secret,
            KEYS["worker"].own.public,
            "refused_foreign_key",
            id="a foreign key",
        ),
        pytest.param(
            FOREIGN_KEYS["router"].own.secret,
            FOREIGN_KEYS["worker"].own.public,
            "refused_foreign_key",
            id="another deployment",
        ),
        pytest.param(
            KEYS["worker"].own.secret, KEYS["worker"].own.public, "refused_wrong_role", id="a worker's key"
        ),
    ],
)
def test_connections_without_the_routers_key_are_refused_and_counted(
    stack: ExitStack, own: bytes | None, server: bytes | None, counter: str
) -> None:
    worker = Watched(listen(stack))
    stranger(stack, address_of(worker), own, server)
    counters = worker.links.counters
    # Both sides see at once that the mechanisms differ; if the stranger hangs up first, there was no handshake.
    also = "refused_no_handshake" if counter == "refused_unencrypted" else counter
    worker.until(lambda: getattr(counters, counter) + getattr(counters, also) > 0, counter)
    assert worker.seen == []


def test_plain_bytes_are_refused_and_counted_and_routers_still_get_in(stack: ExitStack) -> None:
    worker = Watched(listen(stack))
    host, port = address_of(worker).removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" * 10)
        worker.until(lambda: worker.links.counters.refused_no_handshake == 1, "the refusal")
    dial(stack, address_of(worker))
    worker.until_up()
    assert worker.links.counters.refused_no_handshake == 1


def test_the_routers_own_key_is_admitted_so_the_refusals_above_are_about_keys(stack: ExitStack) -> None:
    worker = Watched(listen(stack))
    stranger(stack, address_of(worker), KEYS["router"].own.secret, KEYS["worker"].own.public)
    assert worker.until_up().peer == "stranger/0000000000000001"


def test_malformed_bytes_of_an_admitted_peer_are_counted_and_end_no_other_session(stack: ExitStack) -> None:
    worker = Watched(listen(stack))
    router = Watched(dial(stack, address_of(worker)))
    router.until_up()
    dealer = stranger(stack, address_of(worker), KEYS["router"].own.secret, KEYS["worker"].own.public)
    worker.until_up(2)
    dealer.send_multipart([b"\xff" * 8, b"", b"rubbish", b"more"])
    assert worker.until_down().peer == "stranger/0000000000000001"
    assert worker.links.counters.malformed == 1
    router.links.send(WORKER, Cancel("a", 0))
    worker.until(lambda: worker.messages() == [Cancel("a", 0)], "the command of the other router")


def test_a_router_that_takes_a_prefill_worker_for_a_decode_worker_loses_its_session_alone(
    stack: ExitStack,
) -> None:
    worker = Watched(listen(stack))
    router = Watched(dial(stack, address_of(worker)))
    router.until_up()
    dealer = stranger(stack, address_of(worker), KEYS["router"].own.secret, KEYS["worker"].own.public)
    worker.until_up(2)
    dealer.send_multipart(seal(1, 1, encode(Migrate("a", 0))))
    down = worker.until_down()
    assert (down.peer, worker.links.counters.malformed) == ("stranger/0000000000000001", 1)
    router.links.send(WORKER, Cancel("a", 0))
    worker.until(lambda: worker.messages() == [Cancel("a", 0)], "the command of the other router")


def test_a_router_that_vanished_is_down_within_a_heartbeat(stack: ExitStack) -> None:
    worker = Watched(listen(stack))
    dealer = stranger(stack, address_of(worker), KEYS["router"].own.secret, KEYS["worker"].own.public)
    worker.until_up()
    dealer.close()
    assert worker.until_down().reason == "cannot send: Host unreachable"


def test_a_router_that_reads_too_slowly_loses_its_session_and_the_worker_never_blocks(
    stack: ExitStack,
) -> None:
    settings = link_settings(unsent_messages_max=10, unsent_bytes_max=1 << 30)  # the socket fills first
    worker = Watched(listen(stack, settings))
    stranger(stack, address_of(worker), KEYS["router"].own.secret, KEYS["worker"].own.public)
    peer = worker.until_up().peer
    for _ in range(2000):
        worker.links.send(peer, Refused("a", 0, "stale", detail="x" * 100_000))
    assert worker.until_down().reason == "cannot send: Resource temporarily unavailable"


def test_a_port_in_use_is_a_start_error(stack: ExitStack) -> None:
    port = int(listen(stack).address.rpartition(":")[2])
    with pytest.raises(StartError, match=f"cannot listen for routers on 127.0.0.1:{port}"):
        WorkerLinks("127.0.0.1", port, KEYS["worker"], WORKER_HELLO, link_settings(), write_note=write_note)


def test_an_address_without_a_worker_is_no_event_until_one_starts(stack: ExitStack, keys_file: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = str(reserved.getsockname()[1])
    router = Watched(dial(stack, f"tcp://127.0.0.1:{port}"))
    assert router.links.receive(0.3) == []
    start_echo(stack, keys_file, epoch=4, port=port)
    router.until_up()


def test_on_ready_is_called_once_for_each_batch_that_waits(stack: ExitStack) -> None:
    worker = Watched(listen(stack))
    calls: list[float] = []
    router = RouterLinks(
        KEYS["router"],
        ROUTER_HELLO,
        link_settings(),
        on_ready=lambda: calls.append(time.monotonic()),
        write_note=write_note,
    )
    stack.callback(router.close)
    router.connect(address_of(worker))
    worker.until_up()
    for number in range(100):
        worker.links.send(ROUTER, Refused(str(number), 0, "stale"))
    watched = Watched(router)
    watched.until(lambda: len(watched.messages()) == 100, "all answers")
    assert 1 <= len(calls) <= 101


def test_workers_that_cannot_be_dialed_when_sockets_are_used_up_cost_no_other_its_link(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "SOCKETS_MAX", 6)  # a link takes three
    worker = Watched(listen(stack))
    links = dial(stack, address_of(worker))
    router = Watched(links)
    router.until_up()
    with capture_logs() as lines:
        for number in range(5):
            links.connect(f"tcp://127.0.0.1:{number + 1}")
        router.until(lambda: any("cannot dial" in str(line) for line in lines), "a dial that failed")
    router.links.send(WORKER, Cancel("still here", 0))
    worker.until(lambda: bool(worker.messages()), "a message over the link that was there")
    assert router.of(PeerDown) == []


def test_with_no_descriptor_left_a_worker_that_died_costs_no_other_its_link_and_is_linked_afterwards(
    stack: ExitStack, keys_file: Path
) -> None:
    worker = Watched(listen(stack))
    process, address = start_echo(stack, keys_file, epoch=1)
    links = dial(stack, address_of(worker))
    links.connect(address)
    router = Watched(links)
    router.until_up(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    port = address.rpartition(":")[2]
    with ExitStack() as held:
        process.kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        hold_all_descriptors(held)
        router.until(lambda: links._sessions._links[address].ungreeted >= 2, "dials that fail")
        links.send(WORKER, Cancel("still here", 0))
        worker.until(worker.messages, "a message over the link that was there")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    start_echo(stack, keys_file, epoch=2, port=port)
    router.until_up(3)
    assert [down.peer for down in router.of(PeerDown)] == ["echo/0000000000000001"]


def hold_all_descriptors(held: ExitStack) -> None:
    """Open files until none can be opened."""
    with contextlib.suppress(OSError):
        while True:
            held.callback(os.close, os.open("/dev/null", os.O_RDONLY))


@pytest.mark.parametrize("direction", ["sending", "receiving"])
def test_whatever_goes_wrong_with_one_link_ends_it_alone_and_it_is_dialed_again(
    stack: ExitStack, keys_file: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    worker = Watched(listen(stack))
    _, address = start_echo(stack, keys_file, epoch=1)
    links = dial(stack, address_of(worker))
    links.connect(address)
    router = Watched(links)
    router.until_up(2)
    wire, end = links._wire, links._sessions
    assert isinstance(wire, sockets._RouterWire)
    send, receive = wire._send, end.receive

    def fail_to_send(step: SendFrames, now: float) -> None:
        if step.address != address:
            send(step, now)
            return
        monkeypatch.setattr(wire, "_send", send)
        raise KeyError("what nobody foresaw")

    def fail_to_receive(sender: str, frames: list[bytes], now: float) -> None:
        if sender != address:
            receive(sender, frames, now)
            return
        monkeypatch.setattr(end, "receive", receive)
        raise KeyError("what nobody foresaw")

    if direction == "sending":
        monkeypatch.setattr(wire, "_send", fail_to_send)
    else:
        monkeypatch.setattr(end, "receive", fail_to_receive)
    links.send("echo/0000000000000001", Cancel("lost", 0))
    assert "KeyError at test_links.py" in router.until_down().reason
    router.until_up(3)
    assert [event.peer for event in router.of(PeerDown)] == ["echo/0000000000000001"]
    links.send(WORKER, Cancel("a", 0))
    worker.until(worker.messages, "a command over the other link")
