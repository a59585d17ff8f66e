"""The KV pages of one worker: what requests, the radix cache and the device's steps do to them, in one place.

It wraps the page pool and the radix cache, and adds what neither knows: the number of the last launched step. That
step may still touch the pages that a request gives up, so they are *retired*, not freed. It knows nothing of slots,
routers or why a request comes or goes.

    match, allocate ──► req.pages, req.owned ──► commit (whole settled pages go to the tree) ──► release
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.batch.req import Req
from shared.kv.page_pool import PagePool, PageState, pages_for_tokens
from shared.kv.radix_cache import EvictionPolicy, Node, RadixCache, ancestry


class KvMemory:
    """Page pool, radix cache and step numbers of one worker."""

    def __init__(self, pages: int, page_size: int, eviction_policy: EvictionPolicy = "lru"):
        self.page_size = page_size
        self.pool = PagePool(pages)
        self.cache = RadixCache(self.pool, page_size, eviction_policy)
        self.launched_step = 0

    @property
    def available_pages(self) -> int:
        """Pages that can be allocated: free ones, and those that only the radix cache holds."""
        return self.pool.free + self.cache.evictable

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return pages_for_tokens(tokens, self.page_size)

    def pages_missing(self, req: Req, tokens: int) -> int:
        """Pages that the request lacks to hold the KV of `tokens` tokens."""
        return max(0, pages_for_tokens(tokens, self.page_size) - len(req.pages))

    def allocate(self, req: Req, count: int, state: PageState = PageState.OWNED) -> list[int] | None:
        """Append `count` pages to the request's table; None, and nothing changed, if they are not free now."""
        if not self.cache.make_room(count):
            return None
        pages = self.pool.allocate(count, state)
        req.pages.extend(pages)
        req.owned.extend(pages)
        return pages

    def look_up(self, req: Req, tokens: int) -> None:
        """Set `cached_len` to how many of the request's first `tokens` tokens are cached; nothing is locked."""
        _, req.cached_len = self.cache.probe(req.token_ids[:tokens], req.extra_key)

    def pages_lacking(self, req: Req, tokens: int) -> int:
        """Pages that are not there for a request without pages to hold `tokens` tokens; below 0: so many are left.

        It only looks: `match` would make the request's cached pages those that were used last.
        """
        cached, evictable = self.cache.probe_pages(req.token_ids[:tokens], req.extra_key)
        return self.pages_for(tokens) - cached - (self.available_pages - evictable)

    def allocate_one_each(self, reqs: Sequence[Req]) -> int:
        """Append a page to the table of each, as far as there are any; returns how many have one.

        What lacks is evicted. Pages that retire are not counted, as `allocate` counts them for each request that it
        serves: one of them would be promised to all the rows of a step.
        """
        while len(reqs) > self.pool.free and self.cache.evict(len(reqs) - self.pool.free):
            pass  # what a launched step may still touch is not free yet, so more is evicted
        pages = self.pool.allocate(min(len(reqs), self.pool.free), PageState.OWNED)
        for req, page in zip(reqs, pages, strict=False):
            req.pages.append(page)
            req.owned.append(page)
        return len(pages)

    def match(self, req: Req, tokens: int) -> None:
        """Start the request's table with the longest cached prefix of its first `tokens` tokens, locked."""
        found = self.cache.match_prefix(req.token_ids[:tokens], req.extra_key)
        self.cache.lock(found.node)
        req.node = found.node
        req.pages = list(found.pages)
        req.owned = []
        req.cached_len = len(found.pages) * self.page_size

    def rematch(self, req: Req, tokens: int) -> int:
        """Take what has come into the cache since `match`, in place of own pages; returns how many tokens that is.

        Call it only for a request of which no step has computed anything.
        """
        found = self.cache.match_prefix(req.token_ids[:tokens], req.extra_key)
        kept = len(req.pages) - len(req.owned)
        gained = len(found.pages) - kept
        if gained <= 0:
            return 0
        self.cache.lock(found.node)
        self._unlock(req)
        self.pool.retire(req.owned[:gained], PageState.OWNED, after_step=0)
        req.node = found.node
        req.pages[: len(found.pages)] = found.pages
        del req.owned[:gained]
        req.cached_len = len(found.pages) * self.page_size
        return gained * self.page_size

    def unmatch(self, req: Req) -> None:
        """Undo `match` of a request that no step has seen; `cached_len` stays, as an estimate."""
        assert isinstance(req.node, Node)
        assert not req.owned
        self.cache.unlock(req.node, last_step=0)
        req.pages, req.node = [], None

    def commit(self, req: Req) -> None:
        """Put the request's whole pages below `kv_len` into the tree, and keep them locked for it.

        Where the tree holds a block already under another page, the request keeps its own page until its release,
        because the device's page table names that one.
        """
        whole = req.kv_len // self.page_size * self.page_size
        tokens = tuple(req.token_ids[:whole])
        inserted = self.cache.insert(tokens, req.pages, req.extra_key, req.priority)
        self.cache.lock(inserted.node)
        self._unlock(req)
        req.node = inserted.node
        adopted = set(inserted.adopted)
        req.owned = [page for page in req.owned if page not in adopted]

    def commit_and_dedupe(self, req: Req) -> None:
        """Commit, and replace the request's own page by the tree's for every block that the tree held already.

        Call it only while no slot names the request's pages. Without it such a block would be held twice, by the
        tree and by the request, and a request that fits the pool alone could lack pages to finish.
        """
        self.commit(req)
        assert isinstance(req.node, Node)
        tree = [page for node in reversed([*ancestry(req.node)]) for page in node.pages]
        replaced = {page for page, kept in zip(req.pages, tree, strict=False) if page != kept}
        self.pool.retire(
            [page for page in req.owned if page in replaced], PageState.OWNED, self.launched_step
        )
        req.owned = [page for page in req.owned if page not in replaced]
        req.pages[: len(tree)] = tree

    def releasable_pages(self, req: Req) -> int:
        """Pages that become available if this request gives up all that it holds."""
        if req.node is None:
            return len(req.owned)
        assert isinstance(req.node, Node)
        return len(req.owned) + sum(len(node.pages) for node in ancestry(req.node) if node.lock_count == 1)

    def release(self, req: Req, state: PageState = PageState.OWNED) -> None:
        """Give up all the request's pages; its own ones are in `state`."""
        self.pool.retire(req.owned, state, self.launched_step)
        self._unlock(req)
        req.pages, req.owned, req.node = [], [], None

    def check(self) -> None:
        """Prove that every page is accounted for; raises `InvariantError`."""
        self.pool.check()
        self.cache.check()

    def _unlock(self, req: Req) -> None:
        if req.node is not None:
            assert isinstance(req.node, Node)
            self.cache.unlock(req.node, self.launched_step)
