"""A prefill and a decode worker without a model, over real links: they tell as much of each token as was asked for.

    python -m tests.abuse.talkative_workers KEYS_FILE CONTEXT_LEN

Prints the setting that names both, then serves until its standard input ends. What it costs to compute an answer is
left out, so that a router meets answers as fast as it can take them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import cache

from shared.kv.page_pool import pages_for_tokens
from shared.links.events import PeerUp, Received
from shared.links.keys import read_keys
from shared.links.sockets import WorkerLinks
from shared.wire.baton import Baton, Holder, agent_name
from shared.wire.messages import (
    SCORES_MAX,
    Cancel,
    Decode,
    Finished,
    Generated,
    Hello,
    Limits,
    Load,
    Prefill,
    Prefilled,
    Role,
    Row,
    Scored,
)
from shared.wire.sampled import Logprobs, TokenLogprobs
from tests.link_settings import link_settings, write_note

ROUTER_SECONDS = 10.0  # between two looks at whether to end
STEP_SECONDS = 0.02  # of a step of decode
TOKENS_A_ROW = 8  # of which nothing is told; else 1
PAGE_SIZE = 16
TEXT_ID = 40  # of the first token of an answer
FEATURES = ("logprobs", "prompt_logprobs", "grammar", "allowed_token_ids", "bad_words")


@cache
def logprobs_of(token_id: int, top: int) -> TokenLogprobs:
    """What is told of a token: figures with as many digits as a device's."""
    likeliest = tuple(((token_id + at) % 300 + 10, -(token_id + at) / 7) for at in range(top))
    return TokenLogprobs(-token_id / 7, 3, likeliest)


def told(token_ids: Sequence[int], top: int) -> Logprobs:
    """Of each token; nothing if `top` is below 0."""
    return tuple(logprobs_of(token_id, top) for token_id in token_ids) if top >= 0 else ()


class TalkativeWorker:
    """One worker; `serve` returns after `end`."""

    def __init__(self, role: Role, keys_file: str, context_len: int):
        limits = Limits(
            context_len=context_len, page_size=PAGE_SIZE, pages=1 << 20, slots=512, vocab_size=400
        )
        hello = Hello(
            session=0, role=role, uid=role, epoch=1, model_name="tiny", model="w", kv_format="kv",
            limits=limits, features=FEATURES,
        )  # fmt: skip
        self._links = WorkerLinks(
            "127.0.0.1", 0, read_keys(keys_file, "worker"), hello, link_settings(), write_note=write_note
        )
        self.setting = f"{role}={self._links.address.removeprefix('tcp://')}"
        self._ended = threading.Event()
        self._running: dict[str, tuple[str, Decode, int]] = {}  # by rid: the router, and tokens so far

    def end(self) -> None:
        """Let `serve` return."""
        self._ended.set()
        self._links.wake()

    def serve(self) -> None:
        """Answer routers."""
        while not self._ended.is_set():
            for event in self._links.receive(STEP_SECONDS if self._running else ROUTER_SECONDS):
                match event:
                    case PeerUp():
                        self._links.send(event.peer, Load(free_pages=1 << 20, slots_free=512))
                    case Received(message=Prefill() as prefill):
                        self._prefill(event.peer, prefill)
                    case Received(message=Decode() as decode):
                        self._running[decode.rid] = (
                            event.peer,
                            decode,
                            len(decode.token_ids) - decode.prompt_len,
                        )
                    case Received(message=Cancel() as cancel):
                        self._running.pop(cancel.rid, None)
            self._step()
        self._links.close()

    def _prefill(self, peer: str, prefill: Prefill) -> None:
        rid, attempt, kv_len = prefill.rid, prefill.attempt, len(prefill.token_ids)
        if prefill.params.prompt_logprobs >= 0:
            for begin in range(max(1, prefill.scored_len), prefill.prompt_len, SCORES_MAX):
                part = prefill.token_ids[begin : min(begin + SCORES_MAX, prefill.prompt_len)]
                self._links.send(
                    peer, Scored(rid, attempt, begin, told(part, prefill.params.prompt_logprobs))
                )
        logprobs = told((TEXT_ID,), prefill.params.logprobs)
        if prefill.params.max_new_tokens == 1:
            self._links.send(peer, Prefilled(rid, attempt, 0, (TEXT_ID,), None, "length", logprobs=logprobs))
            return
        pages = tuple(range(pages_for_tokens(kv_len, PAGE_SIZE)))
        holder = Holder("prefill", 1, agent_name("prefill", 1), b"", 0, 64, 0)
        baton = Baton(rid, attempt, holder, "kv", 0, 1, kv_len, prefill.prompt_len, pages)
        self._links.send(peer, Prefilled(rid, attempt, 0, (TEXT_ID,), baton, logprobs=logprobs))

    def _step(self) -> None:
        """Some tokens of every request, and the end of those that have all."""
        rows: dict[str, list[Row]] = {}
        for rid, (peer, decode, done) in list(self._running.items()):
            most = decode.params.max_new_tokens
            step = TOKENS_A_ROW if decode.params.logprobs < 0 else 1
            token_ids = tuple(TEXT_ID + at % 50 for at in range(done, min(done + step, most)))
            logprobs = told(token_ids, decode.params.logprobs)
            rows.setdefault(peer, []).append(Row(rid, decode.attempt, done, token_ids, logprobs))
            self._running[rid] = peer, decode, done + len(token_ids)
        for peer, of_peer in rows.items():
            self._links.send(peer, Generated(tuple(of_peer)))
        for rid, (peer, decode, done) in list(self._running.items()):
            if done == decode.params.max_new_tokens:
                self._links.send(peer, Finished(rid, decode.attempt, done, "length"))
                del self._running[rid]


def main(keys_file: str, context_len: str) -> None:
    roles: tuple[Role, ...] = ("prefill", "decode")
    workers = [TalkativeWorker(role, keys_file, int(context_len)) for role in roles]
    threads = [threading.Thread(target=worker.serve) for worker in workers]
    for thread in threads:
        thread.start()
    sys.stdout.write(",".join(worker.setting for worker in workers) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for worker in workers:
        worker.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
