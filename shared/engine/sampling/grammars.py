"""Compiled grammars: prepared on a thread of their own, kept while they are used, and copied for each request.

    prepare(grammar) ─► a thread compiles ─► ready(grammar) ─► matcher(grammar)

A matcher is a function of the grammar and the tokens it has taken, so the same request gets an equal one on any
worker, at any time. `matcher` compiles by itself what has been forgotten since. The thread is nicer than those that
compute steps. What is kept is bounded in entries and in bytes; the library tells no sizes, so they are estimated.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import structlog
from llguidance import LLMatcher, LLTokenizer

from shared.limits.grammars import compiled, error_of
from shared.primitives.errors import ModelError
from shared.wire.grammar import Grammar

log = structlog.get_logger(__name__)

CACHED_GRAMMARS_MAX = 256
CACHED_GRAMMARS_BYTES_MAX = 48 << 20
GRAMMAR_BYTES = 128 << 10  # of a compiled one at least; measured 120 KiB
BYTES_PER_CHARACTER = 4  # of its text, on top; measured 1 to 2
COMPILE_STACK_BYTES = 64 << 20  # address space: the library follows chains of rules by recursion
NICER = 10  # the compiling thread's niceness above the process's


class Grammars:
    """The compiled grammars of a process. All methods may be called from any thread."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Iterable[int]):
        """Raises `ModelError` for a tokenizer that llguidance cannot read."""
        self.eos_token_ids = frozenset(eos_token_ids)
        try:
            self._tokenizer = LLTokenizer(
                str(tokenizer_json), n_vocab=vocab_size, eos_token=sorted(self.eos_token_ids)
            )
        except Exception as error:
            raise ModelError(f"llguidance cannot read {tokenizer_json}: {error}") from None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()  # by digest, with bytes
        self._bytes = 0
        self._underway: set[str] = set()
        self._queue: SimpleQueue[Grammar] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """What the compiled grammars that are kept may take, estimated."""
        return self._bytes

    def prepare(self, grammar: Grammar) -> None:
        """Have it compiled, unless it is or will be; returns at once."""
        with self._lock:
            if grammar.digest in self._compiled or grammar.digest in self._underway:
                return
            self._underway.add(grammar.digest)
            if self._thread is None:
                self._thread = _start(self._compile_all)
        self._queue.put(grammar)

    def ready(self, grammar: Grammar) -> bool:
        """Whether it was compiled, or need not be waited for."""
        with self._lock:
            if grammar.digest in self._compiled:
                self._compiled.move_to_end(grammar.digest)
            return grammar.digest not in self._underway

    def error(self, grammar: Grammar) -> str:
        """Why it cannot be compiled; empty if it can."""
        return error_of(self._prototype(grammar))

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the start of the grammar; one in error if that is at fault."""
        return self._prototype(grammar).deep_copy()

    def _prototype(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            if known := self._compiled.get(grammar.digest):
                self._compiled.move_to_end(grammar.digest)
                return known[0]
        return self._keep(grammar, compiled(grammar, self._tokenizer))

    def _keep(self, grammar: Grammar, matcher: LLMatcher) -> LLMatcher:
        size = GRAMMAR_BYTES + BYTES_PER_CHARACTER * len(grammar.text)
        with self._lock:
            if grammar.digest not in self._compiled:
                self._compiled[grammar.digest] = matcher, size
                self._bytes += size
            while len(self._compiled) > CACHED_GRAMMARS_MAX or self._bytes > CACHED_GRAMMARS_BYTES_MAX:
                _, (_, gone) = self._compiled.popitem(last=False)
                self._bytes -= gone
        return matcher

    def _compile_all(self) -> None:
        _be_nicer()
        while True:
            grammar = self._queue.get()
            self._prototype(grammar)
            with self._lock:
                self._underway.discard(grammar.digest)


def read_grammars(folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> Grammars | None:
    """The grammars of a model folder; None where they cannot be served: no tokenizer for it, or no end."""
    tokenizer_json, ends = folder / "tokenizer.json", frozenset(eos_token_ids)
    if not ends or not tokenizer_json.is_file():
        return None
    try:
        return Grammars(tokenizer_json, vocab_size, ends)
    except ModelError as error:  # the model itself can be served
        log.warning("engine.grammars_missing", reason=str(error))
        return None


def _start(work: object) -> threading.Thread:
    before = threading.stack_size(COMPILE_STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="grammars", daemon=True)  # type: ignore[arg-type]
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _be_nicer() -> None:
    """Yield to the threads that compute steps. On Linux, niceness is a thread's own."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICER))


# ---- a matcher works in portions, and ends its request once it has cost too much -------------------------------------
# The library's limits bound each call, to some 50 ms. But what an ambiguous grammar (`s: s s | "a"`) costs grows with
# the answer, and other requests wait for it on the same thread. So tokens are taken late, when the next mask is asked
# for, and one call at a time: between two calls a step may say that its time is over. The next step then goes on there.


FREE_SECONDS = 0.004  # of each call; a schema of 500 optional properties takes half of it a token
SLOW_SECONDS_MAX = 0.5  # beyond that, of all calls for new tokens together
TOO_SLOW = "the grammar became too slow to follow: it is ambiguous, or allows too much at once"

Clock = Callable[[], float]  # seconds


class Matcher(Protocol):
    """A grammar on its way, as llguidance's `LLMatcher` is."""

    def consume_token(self, sampled_token: int) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


class TimedMatcher:
    """Asks another matcher, and is in error when that has taken too much of its thread's time."""

    def __init__(self, matcher: Matcher, output: Iterable[int] = (), clock: Clock = time.thread_time):
        """`matcher` is at the start of its grammar, and `output` the request's own so far."""
        self._matcher = matcher
        self._clock = clock
        self._slow_seconds = 0.0
        self._behind = deque(output)  # tokens that the matcher has yet to take
        self._replayed = len(self._behind)  # of these: another matcher took them before, and was charged

    def take(self, token_id: int) -> None:
        """The next token is known. Costs nothing before the next mask is asked for."""
        self._behind.append(token_id)

    def mask(self, seconds: float = math.inf) -> bytes | None:
        """A bit for each token that may come next; None if `seconds` are over before it is known.

        At least one call is made. In error, the bits mean nothing.
        """
        began_at = self._clock()
        while self._behind and not self.is_error():
            called_at = self._clock()
            self._matcher.consume_token(self._behind.popleft())
            if self._replayed:
                self._replayed -= 1
            else:
                self._charge(called_at)
            if self._clock() - began_at >= seconds:
                return None
        if self.is_error():
            return b""
        called_at = self._clock()
        bits = self._matcher.compute_bitmask()
        self._charge(called_at)
        return bits

    def is_error(self) -> bool:
        """Whether nothing may follow any more."""
        return self._slow_seconds > SLOW_SECONDS_MAX or self._matcher.is_error()

    def get_error(self) -> str:
        """Why; empty if it is sound."""
        return TOO_SLOW if self._slow_seconds > SLOW_SECONDS_MAX else self._matcher.get_error()

    def _charge(self, called_at: float) -> None:
        self._slow_seconds += max(0.0, self._clock() - called_at - FREE_SECONDS)
