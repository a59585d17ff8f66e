"""Takes connections out of a listener's queue, and hands them on with their first bytes. For one thread's event loop.

A connection costs nothing but a descriptor until its client has said something:

    accept ── bytes are there ──► taken on
       └───── silence ──► kept, at most SILENT_MAX ── bytes ──► taken on

While there is no room, nothing is accepted, and who speaks waits. One more than SILENT_MAX closes the oldest of the
address with most. So a client whose first bytes follow its connection within milliseconds, as those of probes do, is
taken on however many connect and stay silent: they would have to come at SILENT_MAX in these milliseconds. asyncio's
own server makes a task and a transport of each connection before anything is known of it.

An address may connect ACCEPTED_PER_SECOND_MAX times a second; what is beyond is closed unread, and so costs little. The
machine's own address is exempt: there probes and those who flood may have the same one.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import structlog

from shared.primitives.holders import Holders
from shared.primitives.tally import Tally

SILENT_MAX = 1024  # connections that are kept without a byte; at most an eighth of the process's descriptors
SILENT_SECONDS_MAX = 10.0
ACCEPTED_AT_ONCE = 64  # then the loop does what else there is
ACCEPTED_PER_SECOND_MAX = 1000  # of one address
SECOND = 1.0
OWN_ADDRESSES = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
FIRST_BYTES_MAX = 16 << 10
RETRY_SECONDS = 1.0  # until a connection is accepted again, where there were no descriptors
ROOM_SECONDS = 0.005  # until there is room again: what is being answered takes less than a millisecond each

log = structlog.get_logger(__name__)


class Accepting:
    """Accepts from `start` to `stop`. `take_on` is given each connection that speaks, its address and first bytes.

    `has_room` says whether one more may be taken on now.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        take_on: Callable[[socket.socket, str, bytes], None],
        has_room: Callable[[], bool],
    ):
        self._loop = loop
        self._listener = listener
        self._take_on = take_on
        self._has_room = has_room
        self._speaking: deque[tuple[socket.socket, str]] = deque()  # there was no room for them
        self._since: dict[socket.socket, tuple[float, str]] = {}  # those that are silent, oldest first
        self._silent: Holders[socket.socket] = Holders()
        self._accepted: Counter[str] = Counter()  # in this second, by address
        self._silent_max = min(SILENT_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._faults = Tally()
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept from now on."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        self._look()

    def stop(self) -> None:
        """Close the listener and what is silent."""
        self._loop.remove_reader(self._listener)
        if self._timer:
            self._timer.cancel()
        self._listener.close()
        for connection in list(self._since):
            self._forget(connection).close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._has_room():
                self._pause(ROOM_SECONDS)
                return
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if times := self._faults.add(str(error.strerror)):
                    log.warning("admin.exhausted", reason=error.strerror, times=times)
                self._pause(RETRY_SECONDS)
                return
            address = str(peer[0])
            self._accepted[address] += 1
            if self._accepted[address] > ACCEPTED_PER_SECOND_MAX and address not in OWN_ADDRESSES:
                connection.close()
                continue
            connection.setblocking(False)
            self._read(connection, address)

    def _read(self, connection: socket.socket, address: str) -> None:
        """Take a connection on that has said something; keep one that has not."""
        try:
            data = connection.recv(FIRST_BYTES_MAX)
        except BlockingIOError:
            self._keep(connection, address)
            return
        except OSError:
            data = b""
        if data:
            self._take_on(connection, address, data)
        else:
            connection.close()

    def _keep(self, connection: socket.socket, address: str) -> None:
        if len(self._silent) >= self._silent_max:
            oldest = self._silent.oldest_of_most()
            assert oldest is not None
            self._forget(oldest).close()
        self._since[connection] = (self._loop.time(), address)
        self._silent.add(address, connection)
        self._loop.add_reader(connection, partial(self._speaks, connection, address))

    def _speaks(self, connection: socket.socket, address: str) -> None:
        if connection not in self._since:  # it was closed in this turn
            return
        if self._has_room():
            self._read(self._forget(connection), address)
        else:
            self._loop.remove_reader(connection)
            self._speaking.append((connection, address))
            self._pause(ROOM_SECONDS)

    def _forget(self, connection: socket.socket) -> socket.socket:
        _, address = self._since.pop(connection)
        self._silent.discard(address, connection)
        self._loop.remove_reader(connection)
        return connection

    def _look(self) -> None:
        """Close what has been silent for too long, each second, and begin to count anew."""
        self._timer = self._loop.call_later(SECOND, self._look)
        self._accepted.clear()
        end = self._loop.time() - SILENT_SECONDS_MAX
        while self._since and (oldest := next(iter(self._since))) and self._since[oldest][0] <= end:
            self._forget(oldest).close()

    def _pause(self, seconds: float) -> None:
        """Accept nothing for a moment: the listener would be ready again at once."""
        self._loop.remove_reader(self._listener)
        if not self._paused:
            self._paused = True
            self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._paused = False
        while self._speaking and self._has_room():
            self._speaks(*self._speaking.popleft())
        if self._speaking:
            self._pause(ROOM_SECONDS)
        elif self._listener.fileno() >= 0:  # it was not closed meanwhile
            self._loop.add_reader(self._listener, self._accept)
