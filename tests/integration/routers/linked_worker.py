"""A worker process's links in a thread of the test: real sockets and keys, one scripted token to every prompt.

That token is the whole answer; or, of a worker that `hands_over`, the first one of a stream that no decode worker
written here continues.
"""

from __future__ import annotations

import threading
from pathlib import Path

from shared.kv.page_pool import pages_for_tokens
from shared.links.events import PeerUp, Received
from shared.links.keys import read_keys
from shared.links.sockets import WorkerLinks
from shared.wire.baton import Baton, Holder, agent_name
from shared.wire.messages import Hello, Limits, Load, Prefill, Prefilled, Role
from tests.link_settings import link_settings, write_note

LIMITS = Limits(context_len=1024, page_size=16, pages=1000, slots=100, vocab_size=400)


class LinkedWorker:
    """Listens on 127.0.0.1 from construction to `close`."""

    def __init__(
        self,
        role: Role,
        uid: str,
        keys_file: Path,
        model_name: str = "tiny",
        *,
        hands_over: bool = False,
        port: int = 0,
    ):
        hello = Hello(
            session=0,
            role=role,
            uid=uid,
            epoch=1,
            model_name=model_name,
            model="w",
            kv_format="kv",
            limits=LIMITS,
        )
        self._uid = uid
        self.routers = 0  # sessions that ever began
        self.prefills: list[Prefill] = []
        self._links = WorkerLinks(
            "127.0.0.1",
            port,
            read_keys(str(keys_file), "worker"),
            hello,
            link_settings(),
            write_note=write_note,
        )
        self.port = int(self._links.address.rpartition(":")[2])
        self._closing = False
        self._hands_over = hands_over
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        """Close the links."""
        self._closing = True
        self._links.wake()
        self._thread.join()

    def _serve(self) -> None:
        while not self._closing:
            for event in self._links.receive(10.0):
                if isinstance(event, PeerUp):
                    self.routers += 1
                    self._links.send(event.peer, Load(free_pages=LIMITS.pages, slots_free=LIMITS.slots))
                elif isinstance(event, Received) and isinstance(event.message, Prefill):
                    self._answer(event.peer, event.message)
        self._links.close()

    def _answer(self, peer: str, prefill: Prefill) -> None:
        self.prefills.append(prefill)
        token = prefill.token_ids[-1]
        rid, attempt, kv_len = prefill.rid, prefill.attempt, len(prefill.token_ids)
        if self._hands_over:
            holder = Holder(self._uid, 1, agent_name(self._uid, 1), b"", 0, 64, 0)
            pages = tuple(range(pages_for_tokens(kv_len, LIMITS.page_size)))
            baton = Baton(rid, attempt, holder, "kv", 0, 1, kv_len, prefill.prompt_len, pages)
            self._links.send(peer, Prefilled(rid, attempt, 0, (token,), baton))
        else:
            self._links.send(peer, Prefilled(rid, attempt, 0, (token,), None, "length"))
