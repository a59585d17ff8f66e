"""Prefixes spelled in letters, one letter a page of tokens, for tests of the radix cache."""

from __future__ import annotations

from shared.page_pool import PagePool, PageState
from shared.radix_cache import RadixCache

PAGE = 4  # tokens


def new_cache(pages: int = 64, policy: str = "lru") -> RadixCache:
    return RadixCache(PagePool(pages), PAGE, policy)


def block(name: str) -> list[int]:
    """One page of tokens, told by a letter."""
    return [ord(name)] * PAGE


def tokens(names: str) -> list[int]:
    return [token for name in names for token in block(name)]


def insert(cache: RadixCache, names: str, extra_key: str = "", priority: int = 0) -> list[int]:
    """Cache the prefix `names` on new pages as a request does that then ends; returns the page table it had."""
    found = cache.match_prefix(tokens(names), extra_key)
    pages = found.pages + cache.pool.allocate(len(names) - len(found.pages), PageState.OWNED)
    cache.insert(tokens(names), pages, extra_key, priority)
    return pages


def cached(cache: RadixCache, names: str, extra_key: str = "") -> int:
    """Pages of `names` that are cached; leaves no trace."""
    return cache.probe(tokens(names), extra_key)[1] // PAGE


def check(cache: RadixCache) -> None:
    cache.check()
    cache.pool.check()
