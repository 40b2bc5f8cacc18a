"""KV pages: who holds which page of the pool, and which ids each cached page stands for.

A page is 16 positions of K and V of every layer; here it is only a number. Page 0 is the trash page, written by padding and never read.
Cached pages form a trie per namespace: a node is one page, its children continue it. A namespace is (run, version) for pages whose whole ancestry
was computed under that version, or (run, episode id) for the pages of one episode, which may be of several versions. So no page is ever found by
another run, by another version, or by another episode that did not start alike.

    held by requests   a page in some request's table: stays
    cached only        found again by ids; given up in least-recently-used order when a page is needed
    free               neither

This module deliberately knows no arrays, no time and no requests.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeAlias, final

from noria.types import Ids

PAGE = 16
"""Positions of a page. A power of two that wastes little at the end of short completions and keeps tables short."""

Namespace: TypeAlias = tuple[str, int | str]
"""(run id, version) or (run id, episode id)."""


@dataclass(eq=False, slots=True)
class Node:
    """One cached page. ids: what it holds, at most PAGE, fewer only in a leaf. is_filled: its K/V have been dispatched.

    num_users: requests that keep the node. A request keeps a whole chain, so a node without users has no descendant with users.
    """

    page: int
    ids: Ids
    parent: "Node | None"
    is_filled: bool
    children: dict[Ids, "Node"] = field(default_factory=dict)
    num_users: int = 0
    last_used: int = 0
    is_cached: bool = True


class Match(NamedTuple):
    """The longest known beginning of some ids.

    chain: its nodes, oldest ancestor first. source: a node that agrees with num_shared more ids and then diverges or goes on: to be copied.
    num_positions: ids covered by chain and source together.
    """

    chain: tuple[Node, ...]
    source: Node | None
    num_shared: int

    @property
    def num_positions(self) -> int:
        return sum(len(node.ids) for node in self.chain) + self.num_shared


@final
class PagePool:
    """Owner of the page numbers 1 .. num_pages - 1 and of the prefix cache. Touched by the device thread only."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._num_holders = [0] * num_pages
        self._num_nodes = [0] * num_pages
        self._num_idle = 0
        self._roots: dict[Namespace, Node] = {}
        self._namespace_of: dict[Node, Namespace] = {}
        self._leaves: list[tuple[int, int, Node]] = []
        self._tick = count(1)

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out: free ones, and cached ones that no request holds."""
        return len(self._free) + self._num_idle

    @property
    def num_held(self) -> int:
        """Pages in the table of at least one request."""
        return self.num_pages - 1 - self.num_available

    def match(self, namespace: Namespace, ids: Ids) -> Match:
        """The longest cached beginning of `ids`. Full pages, and a last part equal to the rest, may still be waiting to be filled."""
        node = self._roots.get(namespace)
        chain: list[Node] = []
        start = 0
        while node is not None and start < len(ids):
            child = node.children.get(ids[start : start + PAGE])
            if child is None:
                return Match(tuple(chain), *_closest_child(node, ids[start : start + PAGE]))
            chain.append(child)
            start += len(child.ids)
            node = child
        return Match(tuple(chain), None, 0)

    def keep(self, nodes: tuple[Node, ...]) -> None:
        """A request starts to use these nodes and, through them, their pages."""
        for node in nodes:
            node.num_users += 1
            self._hold(node.page)

    def release(self, nodes: tuple[Node, ...]) -> None:
        """The request no longer uses these nodes; they stay cached until their pages are needed."""
        now = next(self._tick)
        for node in nodes:
            node.num_users -= 1
            node.last_used = now
            self._unhold(node.page)
            self._offer(node)

    def take(self, num_pages: int) -> list[int]:
        """Hold that many pages for one request's own writing. Gives up least recently used cached pages where it must.

        The caller has checked num_available.
        """
        assert num_pages <= self.num_available
        while len(self._free) < num_pages:
            self._evict_one()
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._hold(page)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """A request's own pages are no longer held; those adopted by the cache stay cached."""
        for page in pages:
            self._unhold(page)

    def extend(self, namespace: Namespace, parent: Node | None, ids: Ids) -> tuple[Node, ...]:
        """New nodes for `ids` below `parent` (None: the root), still to be filled, kept for one request. The caller has checked num_available."""
        pages = self.take(-(-len(ids) // PAGE))
        node = parent or self._root(namespace)  # after `take`, which drops roots that it empties
        nodes: list[Node] = []
        for page, start in zip(pages, range(0, len(ids), PAGE), strict=True):
            node = self._add(node, ids[start : start + PAGE], page, is_filled=False)
            node.num_users = 1
            nodes.append(node)
        return tuple(nodes)

    def adopt(self, namespace: Namespace, ids: Ids, pages: list[int]) -> None:
        """Cache what a request has filled: `ids`, whose K/V lie in `pages` in order. The request still holds the pages."""
        node = self._root(namespace)
        for page, start in zip(pages, range(0, len(ids), PAGE), strict=False):
            part = ids[start : start + PAGE]
            node = node.children.get(part) or self._add(node, part, page, is_filled=True)
        self._offer(node)

    def forget(self, node: Node) -> None:
        """Drop a leaf that nobody uses."""
        assert not node.num_users
        assert not node.children
        self._remove(node)

    def purge(self, run_id: str) -> None:
        """Forget every cached page of a run, of all its versions and episodes. No request uses any of them."""
        for root in [root for namespace, root in self._roots.items() if namespace[0] == run_id]:
            below = [root]
            for node in below:  # grows while it is read: parents before children
                below.extend(node.children.values())
            for node in reversed(below[1:]):
                self.forget(node)

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(0, (), None, is_filled=True)
            self._namespace_of[root] = namespace
        return root

    def _add(self, parent: Node, ids: Ids, page: int, *, is_filled: bool) -> Node:
        assert ids not in parent.children
        node = parent.children[ids] = Node(page, ids, parent, is_filled, last_used=next(self._tick))
        self._num_nodes[page] += 1
        return node

    def _hold(self, page: int) -> None:
        if not self._num_holders[page] and self._num_nodes[page]:
            self._num_idle -= 1
        self._num_holders[page] += 1

    def _unhold(self, page: int) -> None:
        self._num_holders[page] -= 1
        assert self._num_holders[page] >= 0
        if not self._num_holders[page]:
            if self._num_nodes[page]:
                self._num_idle += 1
            else:
                self._free.append(page)

    def _offer(self, node: Node) -> None:
        """Make a leaf without users a candidate for eviction. Entries that have gone stale are skipped later, and swept when they pile up."""
        if node.parent is None:
            self._drop_root_if_empty(node)
        elif _is_idle_leaf(node):
            heapq.heappush(self._leaves, (node.last_used, id(node), node))
            if len(self._leaves) > 4 * self.num_pages:
                self._leaves = list({id(n): (n.last_used, id(n), n) for _, _, n in self._leaves if _is_idle_leaf(n)}.values())
                heapq.heapify(self._leaves)

    def _evict_one(self) -> None:
        while True:
            last_used, _, node = heapq.heappop(self._leaves)
            if _is_idle_leaf(node) and node.last_used == last_used:
                return self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert node.is_cached
        del parent.children[node.ids]
        node.is_cached = False
        self._num_nodes[node.page] -= 1
        if not self._num_nodes[node.page] and not self._num_holders[node.page]:
            self._num_idle -= 1
            self._free.append(node.page)
        self._offer(parent)

    def _drop_root_if_empty(self, root: Node) -> None:
        if not root.children and root in self._namespace_of:
            del self._roots[self._namespace_of.pop(root)]


def _is_idle_leaf(node: Node) -> bool:
    return node.is_cached and not node.num_users and not node.children


def _closest_child(node: Node, ids: Ids) -> tuple[Node | None, int]:
    """The filled child that agrees with `ids` for longest, and for how long."""
    best, best_shared = None, 0
    for child in node.children.values():
        if child.is_filled and child.ids[:1] == ids[:1]:
            shared = _num_equal(child.ids, ids)
            if shared > best_shared:
                best, best_shared = child, shared
    return best, best_shared


def _num_equal(left: Ids, right: Ids) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
