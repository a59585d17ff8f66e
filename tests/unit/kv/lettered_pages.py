"""Prefixes and requests spelled in letters, one letter a page of tokens, for tests of cache and policies."""

from __future__ import annotations

from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PagePool, PageState
from shared.kv.radix_cache import EvictionPolicy, RadixCache
from shared.wire.sampling_params import SamplingParams

PAGE = 4  # tokens


def new_cache(pages: int = 64, policy: EvictionPolicy = "lru") -> RadixCache:
    return RadixCache(PagePool(pages), PAGE, policy)


def new_memory(pages: int = 64) -> KvMemory:
    return KvMemory(pages, PAGE)


def block(name: str) -> list[int]:
    """One page of tokens, named by a letter."""
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


def request(
    prompt: str | list[int],
    sequence: int = 0,
    *,
    rid: str = "",
    max_new_tokens: int = 1,
    priority: int = 0,
    extra_key: str = "",
) -> Req:
    """A waiting request; `prompt` in letters or tokens."""
    token_ids = tokens(prompt) if isinstance(prompt, str) else list(prompt)
    return Req(
        rid=rid or f"r{sequence}",
        attempt=1,
        router="router",
        sequence=sequence,
        token_ids=token_ids,
        prompt_len=len(token_ids),
        params=SamplingParams(max_new_tokens=max_new_tokens, seed=0),
        priority=priority,
        extra_key=extra_key,
    )
