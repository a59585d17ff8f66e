"""Links between the router and its workers over ZMQ: workers listen, routers dial, CURVE always.

`WorkerLinks` and `RouterLinks` look alike to their owner: `receive` gives `LinkEvent`s, `send` takes a message for a
peer, neither ever blocks on the network (both are in `thread`). What a session is, and when it ends, is decided in
`session`, `listening` and `dialing`; which connections are admitted, in `authenticator`. Here are the sockets only.

A send that ZMQ cannot take at once (high-water mark, unknown connection) ends the session: nothing is dropped
silently and nothing waits.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.links.authenticator import Authenticator
from shared.links.counters import LinkCounters
from shared.links.dialing import Dial, HangUp, RouterEnd, SendFrames
from shared.links.events import LinkEvent
from shared.links.keys import LinkKeys
from shared.links.listening import WorkerEnd
from shared.links.names import Names
from shared.links.poller import READ_BATCH, SocketPoller
from shared.links.session import FRAME_BYTES_MAX, LinkSettings
from shared.links.thread import ThreadedLinks, WriteNote
from shared.primitives.errors import StartError
from shared.wire.messages import Hello

Socket = zmq.Socket[bytes]

EVERYWHERE = "*"  # as a host: all addresses of both IP families
SOCKETS_MAX = (
    65_536  # of a router: a link takes three, and ZMQ's own bound of 1,023 is reached by 341 workers
)
LINGER_SECONDS = 0.1  # enough for a last `Closed`


def _limit(socket: Socket, settings: LinkSettings) -> None:
    socket.sndhwm = socket.rcvhwm = settings.unsent_messages_max
    socket.maxmsgsize = FRAME_BYTES_MAX  # of strangers too: see `session`
    socket.handshake_ivl = int(settings.silence_seconds * 1000)
    socket.linger = int(LINGER_SECONDS * 1000)


class _WorkerWire:
    """One ROUTER socket behind its authenticator."""

    def __init__(
        self,
        end: WorkerEnd,
        host: str,
        port: int,
        keys: LinkKeys,
        settings: LinkSettings,
        write_note: WriteNote,
    ):
        self._end = end
        self._context = zmq.Context()
        self._router_socket = self._context.socket(zmq.ROUTER)
        _limit(self._router_socket, settings)
        self._router_socket.router_mandatory = True
        self._authenticator = Authenticator(
            self._context, self._router_socket, keys, end.counters, write_note
        )
        self._router_socket.ipv6 = host == EVERYWHERE or ":" in host  # with *, IPv4 as well
        try:
            self._router_socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._close_sockets()
            raise StartError(f"cannot listen for routers on {host}:{port}: {error.strerror}") from None
        self._poller: SocketPoller  # since `register`
        self.address = self._router_socket.get_string(zmq.LAST_ENDPOINT)

    def register(self, poller: SocketPoller) -> None:
        self._poller = poller
        for socket in (self._router_socket, self._authenticator.zap_socket, self._authenticator.monitor):
            poller.register(socket)

    def read(self, ready: Collection[object], now: float, unread_full: bool) -> None:
        self._authenticator.answer()
        self._authenticator.observe()
        self._poller.used(self._authenticator.zap_socket)  # both were read, ready or not
        self._poller.used(self._authenticator.monitor)
        if self._router_socket not in ready:
            return
        for connection, *frames in self._poller.read(self._router_socket):
            if unread_full:
                self._end.end(connection, "unread_messages_max or unread_bytes_max reached")
            else:
                self._end.receive(connection, frames, now)

    def flush(self, now: float) -> None:
        del now
        for connection, frames in self._end.outgoing:  # grows by the Closed of sessions that end here
            try:
                self._router_socket.send_multipart([connection, *frames], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._end.end(connection, f"cannot send: {error.strerror}")
            except Exception as error:  # whatever one link meets, the others live
                self._end.fail(connection, error)
        if self._end.outgoing:
            self._poller.used(self._router_socket)
        self._end.outgoing.clear()

    def close(self, now: float) -> None:
        self._end.close()
        self.flush(now)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._router_socket.disable_monitor()
        self._router_socket.close()  # before who decides on its connections
        self._authenticator.close()
        self._context.term()


class WorkerLinks(ThreadedLinks):
    """The links of one worker process: routers dial `address`. Raises StartError when the port is taken.

    `write_note` is called on the link thread.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: LinkKeys,
        hello: Hello,
        settings: LinkSettings,
        *,
        write_note: WriteNote,
    ):
        self.counters = LinkCounters()
        self.loop_watch = (end := WorkerEnd(hello, settings, self.counters)).loop_watch
        wire = _WorkerWire(end, host, port, keys, settings, write_note)
        self.address = wire.address  # tcp://host:port, with the port that was free if `port` is 0
        super().__init__(end, wire, settings, write_note=write_note)

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        """See `ThreadedLinks`; the worker's loop calls it in every turn, by which the links see that it turns."""
        events = super().receive(timeout_seconds)
        self.loop_watch.turned(time.monotonic())
        return events


class _RouterWire:
    """One DEALER socket for each session."""

    def __init__(self, end: RouterEnd, keys: LinkKeys, settings: LinkSettings):
        self._end = end
        self._settings = settings
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._keys = keys
        self._names = Names()
        self._sockets: dict[str, tuple[Socket, Socket]] = {}  # address: dealer and its monitor
        self._dealers: dict[object, str] = {}  # addresses
        self._monitors: dict[object, str] = {}
        self._poller: SocketPoller  # since `register`

    def register(self, poller: SocketPoller) -> None:
        self._poller = poller

    def read(self, ready: Collection[object], now: float, unread_full: bool) -> None:
        for source in ready:
            address = self._dealers.get(source) or self._monitors.get(source)
            if address is None:
                continue  # what wakes the thread
            dealer, monitor = self._sockets[address]
            try:
                if source is dealer:
                    for frames in self._poller.read(dealer):
                        if unread_full:
                            self._end.end(address, "unread_messages_max or unread_bytes_max reached", now)
                        else:
                            self._end.receive(address, frames, now)
                elif dealer not in ready and _has_ended(monitor):  # what it sent last is read first
                    self._end.end(address, "disconnected", now)
            except Exception as error:  # whatever one link meets, the others live
                self._end.fail(address, error, now)

    def flush(self, now: float) -> None:
        for step in self._end.outgoing:  # grows by the Closed and HangUp of sessions that end here
            try:
                self._carry_out(step, now)
            except Exception as error:  # as above
                self._end.fail(step.address, error, now)
        self._end.outgoing.clear()

    def close(self, now: float) -> None:
        self._end.close(now)
        self.flush(now)
        self._context.term()

    def _carry_out(self, step: Dial | SendFrames | HangUp, now: float) -> None:
        if isinstance(step, Dial):
            self._dial(step, now)
        elif isinstance(step, SendFrames):
            self._send(step, now)
        else:
            self._hang_up(step.address)

    def _dial(self, dial: Dial, now: float) -> None:
        """Whatever is used up (sockets, descriptors), only this session ends; the end dials again later."""
        try:
            target = self._names.resolve(dial.address)
        except OSError as error:
            self._end.end(dial.address, str(error), now)
            return
        if target is None:
            self._end.put_off(dial.address, now)
            return
        try:
            worker_key = self._keys.peers[dial.ungreeted % len(self._keys.peers)]
            self._sockets[dial.address] = dealer, monitor = self._open(worker_key, target)
            self._dealers[dealer], self._monitors[monitor] = dial.address, dial.address
            self._poller.register(dealer)
            self._poller.register(monitor)
            dealer.connect(target)
        except zmq.ZMQError as error:
            self._end.end(dial.address, f"cannot dial: {error.strerror}", now)

    def _open(self, worker_key: bytes, address: str) -> tuple[Socket, Socket]:
        """A dealer and its monitor; raises ZMQError, and keeps neither, when there is no socket for one of them."""
        dealer = self._context.socket(zmq.DEALER)
        try:
            _limit(dealer, self._settings)
            dealer.ipv6 = "[" in address
            dealer.reconnect_ivl = -1  # a session is one connection; the end decides when to dial again
            dealer.curve_secretkey = self._keys.own.secret
            dealer.curve_publickey = self._keys.own.public
            dealer.curve_serverkey = worker_key
            return dealer, dealer.get_monitor_socket()
        except zmq.ZMQError:
            dealer.close(linger=0)
            raise

    def _send(self, step: SendFrames, now: float) -> None:
        try:
            if step.address in self._sockets:
                dealer, _ = self._sockets[step.address]
                dealer.send_multipart(step.frames, zmq.NOBLOCK)
                self._poller.used(dealer)
        except zmq.ZMQError as error:
            self._end.end(step.address, f"cannot send: {error.strerror}", now)

    def _hang_up(self, address: str) -> None:
        if address not in self._sockets:
            return
        dealer, monitor = self._sockets.pop(address)
        self._poller.unregister(dealer)
        self._poller.unregister(monitor)
        del self._dealers[dealer], self._monitors[monitor]
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close()


def _has_ended(monitor: Socket) -> bool:
    ended = False
    for _ in range(READ_BATCH):
        if not monitor.poll(0):
            break
        event = parse_monitor_message(monitor.recv_multipart())
        ended |= event["event"] in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED)
    return ended


class RouterLinks(ThreadedLinks):
    """The links of one router process: one dialed worker an address.

    `on_ready` and `write_note` are called on the link thread. `on_ready` is called whenever `receive(0)` has something
    after it had nothing; an asyncio process passes a function that calls `loop.call_soon_threadsafe`.
    """

    def __init__(
        self,
        keys: LinkKeys,
        hello: Hello,
        settings: LinkSettings,
        on_ready: Callable[[], None] | None = None,
        *,
        write_note: WriteNote,
    ):
        self.counters = LinkCounters()
        self._sessions = RouterEnd(hello, settings, self.counters, draw_session=lambda: secrets.randbits(64))
        wire = _RouterWire(self._sessions, keys, settings)
        super().__init__(self._sessions, wire, settings, on_ready=on_ready, write_note=write_note)

    def connect(self, address: str) -> None:
        """Dial `tcp://host:port` from now on, again and again; a no-op for an address already dialed."""
        self.command(partial(self._sessions.connect, address))

    def end_session(self, peer: str, reason: str) -> None:
        """End the session of a worker whose PeerUp `receive` returned, because of what it said; see `RouterEnd`."""
        session = self.session_of(peer)
        self.command(partial(self._sessions.end_faulty, peer, session, reason))

    def redial(self, address: str) -> None:
        """If the link to this worker rests between two dials, dial at once."""
        self.command(partial(self._sessions.redial, address))

    def disconnect(self, address: str) -> None:
        """End the session with this worker and stop dialing it."""
        self.command(partial(self._sessions.disconnect, address))
