"""The prefix cache: a radix tree from token ids to the KV pages that hold them.

The tree is page-aligned: an edge is a run of whole pages, children differ in their first page of tokens, and a
partial match splits the edge at a page boundary. Pages in the tree are read-only and shared; the tree owns them
(`PageState.TREE`) until it evicts them. It knows nothing of requests: a user of a node locks it, which locks the path
to the root, and names at unlock the launched step that may still touch the pages.

    match_prefix ─► lock ─► compute ─► insert ─► lock the new node, unlock the old one ─► … ─► unlock

A match or an insertion is a promise only until the next `evict`: lock its node before anything else evicts.
Locks count on the whole path, so a node is never locked less than its children, every unlocked node has only
unlocked descendants, and all unlocked pages can be evicted, leaves first.

After SGLang's RadixCache (Zheng et al., 2024, arXiv:2312.07104).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shared.kv.page_pool import PagePool, PageState
from shared.primitives.errors import InvariantError

_ChildKey = tuple[str, tuple[int, ...]]  # extra_key, the first page's tokens


@dataclass(slots=True, eq=False)
class Node:
    """One edge of the tree and what hangs below it. `token_ids` are whole pages, pages[i] holds the i-th."""

    extra_key: str
    token_ids: tuple[int, ...]
    pages: list[int]
    parent: Node | None
    created: int  # ticks: the cache's own count of matches and insertions
    last_access: int
    hit_count: int = 0
    priority: int = 0
    last_step: int = 0  # the last launched step that may touch the pages
    lock_count: int = 0
    attached: bool = True  # False once evicted
    children: dict[_ChildKey, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: `node` is the deepest node, the path to it holds exactly `pages`."""

    node: Node
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Inserted:
    """`node` covers all whole pages given; the tree took over `adopted`, the others stay their owner's."""

    node: Node
    adopted: list[int]


SLRU_PROTECTED_HITS = 2  # SGLang's bound: hit this often, a node is evicted only after all that were not

EvictionPolicy = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]  # what the setting may say
EVICTION_POLICIES: dict[EvictionPolicy, Callable[[Node], tuple[int, ...]]] = {  # least is evicted first
    "lru": lambda node: (node.last_access,),
    "lfu": lambda node: (node.hit_count, node.last_access),
    "fifo": lambda node: (node.created,),
    "mru": lambda node: (-node.last_access,),
    "filo": lambda node: (-node.created,),
    "priority": lambda node: (node.priority, node.last_access),
    "slru": lambda node: (int(node.hit_count >= SLRU_PROTECTED_HITS), node.last_access),
}


class RadixCache:
    """Cached prefixes over the pages of `pool`, `page_size` tokens each."""

    def __init__(self, pool: PagePool, page_size: int, policy: EvictionPolicy = "lru"):
        if policy not in EVICTION_POLICIES:
            raise ValueError(f"eviction policy must be one of {sorted(EVICTION_POLICIES)}, got {policy!r}")
        self.pool = pool
        self.page_size = page_size
        self.policy = policy
        self.evictable = 0  # pages of unlocked nodes
        self._rank = EVICTION_POLICIES[policy]
        self._tick = 0
        self._serial = 0
        self._nodes = 0
        self._root = Node("", (), [], None, created=0, last_access=0)
        self._victims: list[tuple[tuple[int, ...], int, Node]] = []  # heap; entries may be out of date

    @property
    def locks(self) -> int:
        """Locks held in all: every lock counts at the root."""
        return self._root.lock_count

    def probe(self, token_ids: Sequence[int], extra_key: str = "") -> tuple[Node, int]:
        """The deepest node that shares a page with the path of `token_ids`, and the tokens cached in all.

        Changes nothing, neither the tree nor what eviction goes by: for ordering and estimates.
        """
        node, depth, _ = self._descend(token_ids, extra_key)
        return node, depth

    def probe_pages(self, token_ids: Sequence[int], extra_key: str = "") -> tuple[int, int]:
        """Pages that `match_prefix` would find, and how many of them can be evicted; changes nothing."""
        node, depth, within = self._descend(token_ids, extra_key)
        pages = depth // self.page_size
        beyond = (len(node.token_ids) - within) // self.page_size  # of the last node
        unlocked = sum(len(each.pages) for each in ancestry(node) if not each.lock_count)
        return pages, unlocked - beyond if unlocked else 0

    def match_prefix(self, token_ids: Sequence[int], extra_key: str = "") -> Match:
        """The longest cached prefix of `token_ids`, in whole pages.

        To leave a token to compute, pass `token_ids[:-1]`.
        """
        node, _, within = self._descend(token_ids, extra_key)
        if within < len(node.token_ids):
            node = self._split(node, within)
        self._touch(node, hits=1)
        path = list(ancestry(node))
        return Match(node, [page for step in reversed(path) for page in step.pages])

    def insert(
        self,
        token_ids: Sequence[int],
        pages: Sequence[int],
        extra_key: str = "",
        priority: int = 0,
    ) -> Inserted:
        """Cache the whole pages of `token_ids`; pages[i] holds the i-th, more pages than that are ignored.

        Pages of blocks that are new move OWNED → TREE. A block that was cached already keeps its page; another page
        given for it stays its owner's.
        """
        count = len(token_ids) // self.page_size
        if len(pages) < count:
            raise InvariantError(f"{count} whole pages of tokens to cache, but only {len(pages)} pages given")
        tokens = tuple(token_ids[: count * self.page_size])
        node, depth, within = self._descend(tokens, extra_key)
        if within < len(node.token_ids):
            node = self._split(node, within)
        adopted = list(pages[depth // self.page_size : count])
        if adopted:
            self.pool.move(adopted, PageState.OWNED, PageState.TREE)
            node = self._attach(node, tokens[depth:], adopted, extra_key)
        for ancestor in ancestry(node):
            ancestor.priority = max(ancestor.priority, priority)
        self._touch(node, hits=0)
        return Inserted(node, adopted)

    def lock(self, node: Node) -> None:
        """Keep the pages from the root down to `node`, until the paired `unlock`."""
        if not node.attached:
            raise InvariantError("lock of a node that was evicted")
        for ancestor in ancestry(node):
            if ancestor.lock_count == 0:
                self.evictable -= len(ancestor.pages)
            ancestor.lock_count += 1

    def unlock(self, node: Node, last_step: int) -> None:
        """Undo one `lock`; the pages are not reused before the launched step `last_step` has completed."""
        for ancestor in ancestry(node):
            if ancestor.lock_count == 0:
                raise InvariantError(f"unlock of a node that is not locked, pages {ancestor.pages[:4]} …")
            ancestor.lock_count -= 1
            ancestor.last_step = max(ancestor.last_step, last_step)
            if ancestor.lock_count == 0:
                self.evictable += len(ancestor.pages)
        self._offer(node)

    def evict(self, count: int) -> int:
        """Give up `count` pages, or all that are unlocked if fewer; returns how many.

        They are FREE at once where no launched step may touch them, RETIRING before. The last leaf is
        shortened from its end rather than given up whole.
        """
        evicted = 0
        while evicted < count and self._victims:
            rank, _, node = heapq.heappop(self._victims)
            if not self._is_victim(node) or rank != self._rank(node):
                continue
            evicted += self._cut(node, min(len(node.pages), count - evicted))
        return evicted

    def make_room(self, count: int) -> bool:
        """Whether `count` pages are free now, after evicting what neither free nor retiring pages cover.

        Pages in RETIRING count as soon free; otherwise every retry before the step completes would evict again.
        """
        if self.pool.free < count:
            self.evict(count - self.pool.free - self.pool.count(PageState.RETIRING))
        return self.pool.free >= count

    def check(self) -> None:
        """Prove locks, pages and counts against a walk of the tree; raises `InvariantError`."""
        pages: list[int] = []
        evictable = nodes = 0
        pending = [self._root]
        while pending:
            node = pending.pop()
            if len(node.token_ids) != len(node.pages) * self.page_size:
                raise InvariantError(f"{len(node.token_ids)} tokens on pages {node.pages}")
            pages += node.pages
            if not node.lock_count:
                evictable += len(node.pages)
            if node.children:
                self._check_children(node)
                nodes += len(node.children)
                pending += node.children.values()
        for page in self.pool.not_in(PageState.TREE, pages)[:1]:
            raise InvariantError(f"page {page} is in the tree but {self.pool.state(page).name}")
        if len(pages) != self.pool.count(PageState.TREE):
            raise InvariantError(
                f"{len(pages)} pages in the tree, {self.pool.count(PageState.TREE)} in state TREE"
            )
        if (evictable, nodes) != (self.evictable, self._nodes):
            raise InvariantError(
                f"{evictable} pages unlocked in {nodes} nodes, counted {self.evictable} in {self._nodes}"
            )

    def _check_children(self, node: Node) -> None:
        locks, size = 0, self.page_size
        for key, child in node.children.items():
            own_key = child.extra_key, child.token_ids[:size]
            if child.parent is not node or key != own_key or not child.attached:
                raise InvariantError(f"node of pages {child.pages} does not hang where it says")
            locks += child.lock_count
        if node.lock_count < locks:
            raise InvariantError(f"node of pages {node.pages} is locked less than its children")

    def _descend(self, tokens: Sequence[int], extra_key: str) -> tuple[Node, int, int]:
        """Deepest node reached, tokens matched in all, and of these the tokens within that node.

        Only tokens that are looked at are copied: of a long prompt that is not cached, one page.
        """
        node, depth, within = self._root, 0, 0
        while within == len(node.token_ids):
            child = node.children.get((extra_key, tuple(tokens[depth : depth + self.page_size])))
            if child is None:
                break
            node, within = child, self._shared(child.token_ids, tokens, depth)
            depth += within
        return node, depth, within

    def _shared(self, edge: tuple[int, ...], tokens: Sequence[int], start: int) -> int:
        """Tokens, in whole pages, that `edge` shares with `tokens[start:]`."""
        beside = tuple(tokens[start : start + len(edge)])
        if beside == edge:
            return len(edge)
        size = self.page_size
        shared = 0
        while edge[shared : shared + size] == beside[shared : shared + size]:
            shared += size
        return shared

    def _split(self, node: Node, within: int) -> Node:
        """Put a node of the first `within` tokens above `node`, which keeps the rest; returns the new one.

        `node` stays the same object, so locks on it stay valid, and the new node inherits their count.
        """
        parent = node.parent
        assert parent is not None
        head_pages = within // self.page_size
        head = Node(
            extra_key=node.extra_key,
            token_ids=node.token_ids[:within],
            pages=node.pages[:head_pages],
            parent=parent,
            created=node.created,
            last_access=node.last_access,
            hit_count=node.hit_count,
            priority=node.priority,
            last_step=node.last_step,
            lock_count=node.lock_count,
        )
        parent.children[self._child_key(node)] = head
        node.token_ids = node.token_ids[within:]
        node.pages = node.pages[head_pages:]
        node.parent = head
        head.children[self._child_key(node)] = node
        self._nodes += 1
        return head

    def _attach(self, parent: Node, tokens: tuple[int, ...], pages: list[int], extra_key: str) -> Node:
        node = Node(extra_key, tokens, list(pages), parent, created=self._tick, last_access=self._tick)
        parent.children[self._child_key(node)] = node
        self._nodes += 1
        self.evictable += len(pages)
        return node

    def _cut(self, leaf: Node, count: int) -> int:
        """Give up the last `count` pages of an unlocked leaf, and the leaf itself if none are left."""
        assert leaf.parent is not None
        assert leaf.lock_count == 0
        kept = len(leaf.pages) - count
        self.pool.retire(leaf.pages[kept:], PageState.TREE, leaf.last_step)
        self.evictable -= count
        if kept:
            leaf.pages = leaf.pages[:kept]
            leaf.token_ids = leaf.token_ids[: kept * self.page_size]
            self._offer(leaf)
        else:
            del leaf.parent.children[self._child_key(leaf)]
            leaf.attached = False
            self._nodes -= 1
            self._offer(leaf.parent)
        return count

    def _child_key(self, node: Node) -> _ChildKey:
        return node.extra_key, node.token_ids[: self.page_size]

    def _touch(self, node: Node, hits: int) -> None:
        self._tick += 1
        for ancestor in ancestry(node):
            ancestor.last_access = self._tick
            ancestor.hit_count += hits
        self._offer(node)

    def _is_victim(self, node: Node) -> bool:
        return node.attached and node.parent is not None and not node.children and node.lock_count == 0

    def _offer(self, node: Node) -> None:
        """Enter `node` among the victims at its present rank; its earlier entries are skipped when met."""
        if not self._is_victim(node):
            return
        if len(self._victims) > 4 * self._nodes + 64:
            self._victims = [entry for entry in self._victims if self._is_current(entry)]
            heapq.heapify(self._victims)
        self._serial += 1
        heapq.heappush(self._victims, (self._rank(node), self._serial, node))

    def _is_current(self, entry: tuple[tuple[int, ...], int, Node]) -> bool:
        rank, _, node = entry
        return self._is_victim(node) and rank == self._rank(node)


def ancestry(node: Node) -> Iterator[Node]:
    """`node`, its parent, … and the root."""
    current: Node | None = node
    while current is not None:
        yield current
        current = current.parent
