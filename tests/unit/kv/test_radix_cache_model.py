"""The radix cache and the page pool against a dictionary that does the same, naively, on random histories.

The model knows no tree: it maps every cached prefix, page by page, to its page, and says which state each page of
the pool is in. Only *which* unlocked pages an eviction picks is taken from the cache, and checked to be legal.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.kv.page_pool import PagePool, PageState
from shared.kv.radix_cache import EVICTION_POLICIES, EvictionPolicy, Node, RadixCache

PAGE = 2  # tokens
PAGES = 12

Prefix = tuple[str, tuple[int, ...]]  # extra_key, whole pages of tokens

token_lists = st.lists(st.integers(0, 1), max_size=9)
extra_keys = st.sampled_from(["", "tenant"])


@dataclass
class Entry:
    """One cached page: the last block of a prefix."""

    page: int
    last_step: int = 0


def _prefixes(tokens: list[int], extra_key: str) -> list[Prefix]:
    return [(extra_key, tuple(tokens[:end])) for end in range(PAGE, len(tokens) + 1, PAGE)]


class CacheAgainstModel(RuleBasedStateMachine):
    """Every rule changes both; every invariant compares them."""

    @initialize(policy=st.sampled_from(sorted(EVICTION_POLICIES)))
    def start(self, policy: EvictionPolicy) -> None:
        self.pool = PagePool(PAGES)
        self.cache = RadixCache(self.pool, PAGE, policy)
        self.entries: dict[Prefix, Entry] = {}
        self.owned: list[int] = []
        self.retiring: dict[int, int] = {}  # page: its step
        self.locks: list[tuple[Node, list[Prefix]]] = []
        self.launched = 0
        self.completed = 0

    # ---- what the model says ----

    def _matched(self, tokens: list[int], extra_key: str) -> list[Prefix]:
        matched = []
        for prefix in _prefixes(tokens, extra_key):
            if prefix not in self.entries:
                break
            matched.append(prefix)
        return matched

    def _locked(self) -> set[Prefix]:
        return {prefix for _, prefixes in self.locks for prefix in prefixes}

    def _retire(self, page: int, after_step: int) -> None:
        if after_step > self.completed:
            self.retiring[page] = after_step

    # ---- rules ----

    @rule(tokens=token_lists, extra_key=extra_keys)
    def match(self, tokens: list[int], extra_key: str) -> None:
        expected = [self.entries[prefix].page for prefix in self._matched(tokens, extra_key)]
        assert self.cache.probe(tokens, extra_key)[1] == len(expected) * PAGE
        unlocked = [prefix for prefix in self._matched(tokens, extra_key) if prefix not in self._locked()]
        assert self.cache.probe_pages(tokens, extra_key) == (len(expected), len(unlocked))
        assert self.cache.match_prefix(tokens, extra_key).pages == expected

    @rule(tokens=token_lists, extra_key=extra_keys)
    def match_and_lock(self, tokens: list[int], extra_key: str) -> None:
        node = self.cache.match_prefix(tokens, extra_key).node
        self.cache.lock(node)
        self.locks.append((node, self._matched(tokens, extra_key)))

    @rule(tokens=token_lists, extra_key=extra_keys, reuse=st.booleans(), priority=st.integers(0, 2))
    def insert(self, tokens: list[int], extra_key: str, reuse: bool, priority: int) -> None:
        """As a request that found its prefix cached does (`reuse`), or one that was computed beside it."""
        prefixes = _prefixes(tokens, extra_key)
        matched = self._matched(tokens, extra_key) if reuse else []
        if self.pool.free < len(prefixes) - len(matched):
            return
        own = self.pool.allocate(len(prefixes) - len(matched), PageState.OWNED)
        pages = [self.entries[prefix].page for prefix in matched] + own
        inserted = self.cache.insert(tokens, pages, extra_key, priority)
        adopted = []
        for prefix, page in zip(prefixes, pages, strict=True):
            if prefix not in self.entries:
                self.entries[prefix] = Entry(page)
                adopted.append(page)
        assert inserted.adopted == adopted
        self.owned += [page for page in own if page not in adopted]

    @precondition(lambda self: self.locks)
    @rule(data=st.data(), in_flight=st.booleans())
    def unlock(self, data: st.DataObject, in_flight: bool) -> None:
        node, prefixes = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        last_step = self.launched if in_flight else 0
        self.cache.unlock(node, last_step)
        for prefix in prefixes:
            self.entries[prefix].last_step = max(self.entries[prefix].last_step, last_step)

    @rule(count=st.integers(0, PAGES))
    def evict(self, count: int) -> None:
        locked = self._locked()
        unlocked = len(self.entries) - len(locked)
        assert self.cache.evict(count) == min(count, unlocked)
        gone = [prefix for prefix in self.entries if not self._is_cached(prefix)]
        assert len(gone) == min(count, unlocked)
        assert not locked.intersection(gone)
        for prefix in gone:
            entry = self.entries.pop(prefix)
            self._retire(entry.page, entry.last_step)

    @precondition(lambda self: self.owned)
    @rule(in_flight=st.booleans())
    def request_ends(self, in_flight: bool) -> None:
        step = self.launched if in_flight else 0
        self.pool.retire(self.owned, PageState.OWNED, step)
        for page in self.owned:
            self._retire(page, step)
        self.owned = []

    @rule()
    def launch(self) -> None:
        self.launched += 1

    @precondition(lambda self: self.completed < self.launched)
    @rule()
    def complete(self) -> None:
        self.completed += 1
        self.pool.reclaim(self.completed)
        self.retiring = {page: step for page, step in self.retiring.items() if step > self.completed}

    def _is_cached(self, prefix: Prefix) -> bool:
        extra_key, tokens = prefix
        return self.cache.probe(tokens, extra_key)[1] == len(tokens)

    # ---- what must hold after each ----

    @invariant()
    def every_page_is_where_the_model_says(self) -> None:
        expected = dict.fromkeys(range(PAGES), PageState.FREE)
        expected |= {entry.page: PageState.TREE for entry in self.entries.values()}
        expected |= dict.fromkeys(self.owned, PageState.OWNED)
        expected |= dict.fromkeys(self.retiring, PageState.RETIRING)
        assert {page: self.pool.state(page) for page in range(PAGES)} == expected

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check()
        self.cache.check()
        assert self.cache.evictable == len(self.entries) - len(self._locked())
        assert self.cache.locks == len(self.locks)


CacheAgainstModel.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


TestTheCacheDoesWhatADictionaryDoes = CacheAgainstModel.TestCase
