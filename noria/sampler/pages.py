"""KV pages: who holds which page of the pool, which ids each cached page stands for, and what waits in host memory.

A page is 16 positions of K and V of every layer; here it is only a number. Page 0 is the trash page, written by padding and never read.
Cached pages form a trie per namespace: a node is one page, its children continue it. A namespace is (run, version) for pages whose whole ancestry
was computed under that version, (run, episode id) for the pages of one episode, which may be of several versions, or (run, a request's own object)
for what only that request may find. So no page is ever found by another run, by another version, or by another episode that did not start alike.

    held by requests   a page in some request's table: stays
    cached only        found again by ids; given up in least-recently-used order when a page is needed ─▶ awaited ones go to the host, others away
    stored             in host memory; found again by ids, and then loaded; dropped in the order of storing when a place is needed
    free               none of these

Pages are given up here, and moved by the next dispatch: first its stores, so that a page may have another owner in the same plan, then its loads.
A dispatch makes so many moves at most, so that it holds up nobody for long: `make_room` stores no more in one plan, and loads wait for their turn.
This module deliberately knows no arrays, no time and no requests.
"""

import heapq
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple, TypeAlias, final

from noria.types import Ids

PAGE = 16
"""Positions of a page. A power of two that wastes little at the end of short completions and keeps tables short."""

Namespace: TypeAlias = tuple[str, Hashable]
"""(run id, version), (run id, episode id), or (run id, what stands for one request)."""


class PageMove(NamedTuple):
    """A page of the device and a place in host memory: one is copied to the other before the dispatch."""

    page: int
    place: int


@dataclass(eq=False, slots=True)
class Content:
    """The K/V of up to PAGE positions, wherever they lie; several namespaces may know them.

    page: on the device, 0 for nowhere. place: in host memory, None for nowhere. depth: pages before it, of any sequence it is part of.
    is_awaited: of an episode that may come back for it. last_used: tick of the last request that let go of it.
    """

    page: int
    place: int | None = None
    nodes: dict["Node", None] = field(default_factory=dict)  # in the order in which they came to know it
    num_holders: int = 0
    depth: int = 0
    is_awaited: bool = False
    last_used: int = 0

    @property
    def is_idle(self) -> bool:
        """On the device, known to the cache, and held by no request."""
        return self.page > 0 and bool(self.nodes) and not self.num_holders


@dataclass(eq=False, slots=True)
class Node:
    """One cached page. ids: what it holds, at most PAGE, fewer only in a leaf. is_filled: its K/V have been dispatched.

    num_users: requests that keep the node. A request keeps a whole chain, so a node without users has no descendant with users.
    """

    content: Content
    ids: Ids
    parent: "Node | None"
    is_filled: bool
    children: dict[Ids, "Node"] = field(default_factory=dict)
    num_users: int = 0

    @property
    def page(self) -> int:
        """Its page on the device, 0 if it is stored: never of a node that a request keeps."""
        return self.content.page


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


NOTHING = Match((), None, 0)


@dataclass(slots=True)
class PageCounts:
    """What has moved since the start, in pages. num_evicted: given up for others, and not stored. num_dropped: stored, and dropped for others."""

    num_stored: int = 0
    num_loaded: int = 0
    num_evicted: int = 0
    num_dropped: int = 0


@final
class PagePool:
    """Owner of the page numbers 1 .. num_pages - 1, of the places in host memory and of the prefix cache. Touched by the device thread only."""

    def __init__(self, num_pages: int, num_host_places: int = 0, *, max_moves: int = 64) -> None:
        """max_moves: most pages that one dispatch stores, and most that it loads."""
        self.num_pages = num_pages
        self.max_moves = max_moves
        self.counts = PageCounts()
        self._free = list(range(num_pages - 1, 0, -1))
        self._content = [Content(0) for _ in range(num_pages)]
        self._num_idle = 0
        self._roots: dict[Namespace, Node] = {}
        self._namespace_of: dict[Node, Namespace] = {}
        self._idle: list[tuple[int, int, int, Content]] = []
        self._tick = count(1)
        self._places = _Places(num_host_places)

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out: free ones, and cached ones that no request holds."""
        return len(self._free) + self._num_idle

    @property
    def num_held(self) -> int:
        """Pages in the table of at least one request."""
        return self.num_pages - 1 - self.num_available

    def num_missing(self, num_pages: int, beside: Iterable[Node] = ()) -> int:
        """How many pages too few are available for `take` once a request keeps the nodes `beside`, all of different pages; none if not positive."""
        contents = [node.content for node in beside]
        return num_pages + sum(not content.page or content.is_idle for content in contents) - self.num_available

    def knows(self, namespace: Namespace) -> bool:
        """Anything is cached or stored in that namespace."""
        return namespace in self._roots

    def match(self, namespace: Namespace, ids: Ids) -> Match:
        """The longest cached beginning of `ids`. Full pages, and a last part equal to the rest, may still be waiting to be filled, or be stored."""
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

    def make_room(self, num_pages: int, beside: Iterable[Node] = ()) -> bool:
        """Give up least recently used cached pages until `take` finds so many, and `keep` of the nodes `beside` those that it needs. The caller has
        checked `num_missing`.

        False: it would take more stores than a dispatch makes; to be asked for again in the next plan.
        """
        nodes = tuple(beside)
        num_pages += sum(not node.page for node in nodes)
        if len(self._free) < num_pages:
            self._use(nodes)
            while len(self._free) < num_pages and self._places.num_stores < self.max_moves:
                self._evict_one()
            self.release(nodes)
        return len(self._free) >= num_pages

    def keep(self, nodes: tuple[Node, ...]) -> int:
        """A request starts to use these nodes and, through them, their pages; stored ones are loaded. The caller has checked `num_missing`.

        Returns the number of the last load, planned now or before, that it must wait for (`loads_through`); 0 for none.
        """
        self._use(nodes)
        for node in nodes:
            if not node.content.page:
                self._place_on_device(node.content)
                self._places.plan_load(node.content)
                self.counts.num_loaded += 1
        return self._places.last_load(node.content for node in nodes)

    def release(self, nodes: tuple[Node, ...]) -> None:
        """The request no longer uses these nodes; they stay cached until their pages are needed."""
        now = next(self._tick)
        for node in nodes:
            node.num_users -= 1
            self._unhold(node.content, now)

    def take(self, num_pages: int) -> list[int]:
        """Hold that many pages for one request's own writing. Gives up least recently used cached pages where it must.

        The caller has checked `num_missing`.
        """
        assert num_pages <= self.num_available
        contents = [Content(0, num_holders=1) for _ in range(num_pages)]
        for content in contents:
            self._place_on_device(content)
        return [content.page for content in contents]

    def give_back(self, pages: list[int]) -> None:
        """A request's own pages are no longer held; those adopted by the cache stay cached. Before `release` of the nodes that they continue."""
        now = next(self._tick)
        for page in pages:
            self._unhold(self._content[page], now)

    def extend(self, namespace: Namespace, parent: Node | None, ids: Ids) -> tuple[Node, ...]:
        """New nodes for `ids` below `parent` (None: the root), still to be filled, kept for one request. The caller has checked `num_missing`."""
        pages = self.take(-(-len(ids) // PAGE))
        node = parent or self._root(namespace)  # after `take`, which drops roots that it empties
        nodes: list[Node] = []
        for page, start in zip(pages, range(0, len(ids), PAGE), strict=True):
            node = self._add(node, ids[start : start + PAGE], self._content[page], is_filled=False)
            node.num_users = 1
            nodes.append(node)
        return tuple(nodes)

    def adopt(self, namespace: Namespace, ids: Ids, pages: list[int], *, is_awaited: bool = False) -> None:
        """Cache what a request has filled: `ids`, whose K/V lie in `pages` in order. The request still holds the pages.

        is_awaited: an episode, or the request itself, may come back for them.
        """
        node = self._root(namespace)
        for page, start in zip(pages, range(0, len(ids), PAGE), strict=False):
            part, content = ids[start : start + PAGE], self._content[page]
            child = node.children.get(part)
            if child is None:
                child = self._add(node, part, content, is_filled=True)
            elif not child.is_filled:
                break  # being prefilled for another, and given up with it: nothing may lie below
            elif not child.content.page:
                self._repoint(child, content)
            child.content.is_awaited |= is_awaited
            node = child
        self._drop_root_if_empty(namespace)

    def forget(self, node: Node) -> None:
        """Drop a leaf that nobody uses."""
        assert not node.num_users
        assert not node.children
        self._remove(node)

    def drop(self, namespace: Namespace) -> None:
        """Forget whatever that namespace knows. No request uses any of it."""
        root = self._roots.get(namespace)
        for node in list(root.children.values()) if root is not None else ():
            self._remove(node)

    def purge(self, run_id: str) -> None:
        """Forget every cached page of a run, of all its versions and episodes. No request uses any of them."""
        for namespace in [namespace for namespace in self._roots if namespace[0] == run_id]:
            self.drop(namespace)

    @property
    def has_moves(self) -> bool:
        """The next dispatch has pages to move."""
        return self._places.has_moves

    @property
    def loads_through(self) -> int:
        """Loads are made in the order of their numbers: that of the last that the next dispatch makes, unless there are more by then."""
        return self._places.loads_through(self.max_moves)

    def take_moves(self) -> tuple[list[PageMove], list[PageMove]]:
        """Stores and loads for the plan's dispatch: stores first, then loads, then everything that writes to pages. Ends the plan."""
        return self._places.take_moves(self.max_moves)

    # The trie

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(Content(0, depth=-1), (), None, is_filled=True)
            self._namespace_of[root] = namespace
        return root

    def _add(self, parent: Node, ids: Ids, content: Content, *, is_filled: bool) -> Node:
        assert ids not in parent.children
        node = parent.children[ids] = Node(content, ids, parent, is_filled)
        content.nodes[node] = None
        content.depth = parent.content.depth + 1
        return node

    def _repoint(self, node: Node, content: Content) -> None:
        """A stored node whose K/V a request has on the device again, by its own work."""
        stored, node.content = node.content, content
        content.nodes[node] = None
        del stored.nodes[node]
        self._discard_if_unknown(stored)

    def _remove(self, top: Node) -> None:
        """Forget a node and all below it. Nobody uses any of them; what other namespaces or requests have of their contents stays."""
        assert top.parent is not None
        del top.parent.children[top.ids]
        for node in _subtree(top):
            assert not node.num_users
            content = node.content
            if content.is_idle and len(content.nodes) == 1:
                self._num_idle -= 1
            del content.nodes[node]
            self._discard_if_unknown(content)
        namespace = self._namespace_of.get(top.parent)
        if namespace is not None:
            self._drop_root_if_empty(namespace)

    def _discard_if_unknown(self, content: Content) -> None:
        if not content.nodes:
            self._places.leave(content)
            if not content.num_holders:
                self._leave_device(content)

    def _drop_root_if_empty(self, namespace: Namespace) -> None:
        root = self._roots[namespace]
        if not root.children:
            del self._namespace_of[root], self._roots[namespace]

    # Pages of the device

    def _use(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            node.num_users += 1
            self._hold(node.content)

    def _hold(self, content: Content) -> None:
        self._num_idle -= content.is_idle
        content.num_holders += 1

    def _unhold(self, content: Content, now: int) -> None:
        content.num_holders -= 1
        assert content.num_holders >= 0
        content.last_used = now
        if content.is_idle:
            self._num_idle += 1
            self._offer(content)
        else:
            self._discard_if_unknown(content)

    def _offer(self, content: Content) -> None:
        """Make a candidate for eviction: of equals the deepest first. Entries that have gone stale are skipped later, and swept when they pile up."""
        heapq.heappush(self._idle, _entry(content))
        if len(self._idle) > 4 * self.num_pages:
            self._idle = [_entry(content) for content in self._content if content.is_idle]
            heapq.heapify(self._idle)

    def _place_on_device(self, content: Content) -> None:
        if not self._free:
            self._evict_one()
        content.page = self._free.pop()
        self._content[content.page] = content

    def _leave_device(self, content: Content) -> None:
        if content.page:
            self._free.append(content.page)
            content.page = 0

    def _evict_one(self) -> None:
        """Free a page: the least recently used one. An episode's goes to the host, where its node still finds it; another's node goes too."""
        while True:
            last_used, _, page, content = heapq.heappop(self._idle)
            if content.is_idle and (content.last_used, content.page) == (last_used, page):
                break
        if content.is_awaited and self._has_place_for(content):
            self.counts.num_stored += self._places.plan_store(content)
            self._num_idle -= 1
            self._leave_device(content)
            return
        self.counts.num_evicted += 1
        self._lose(content)

    def _has_place_for(self, content: Content) -> bool:
        """In host memory; the K/V that were stored first make room."""
        if content.place is None and not self._places.make_room():
            oldest = self._places.oldest()
            if oldest is None:
                return False
            self.counts.num_dropped += 1
            self._lose(oldest)
        return bool(content.nodes)

    def _lose(self, content: Content) -> None:
        """Forget it wherever it is known, and there also what led to nothing else and two others knew before: else a prefix that stays in use would
        be remembered for every episode that ever began with it."""
        for node in list(content.nodes):
            above = node.parent
            self._remove(node)
            while above and above.parent and not above.children and not above.num_users and above not in islice(above.content.nodes, 2):
                node, above = above, above.parent
                self._remove(node)


@final
class _Places:
    """Places in host memory, and the moves that the next dispatch is to make. Owned by the pool.

    A content that was loaded keeps its place, so that giving up its page again moves nothing, until somebody else needs the place.
    """

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places - 1, -1, -1))
        self._stored: dict[Content, None] = {}  # in host memory only, first stored first
        self._copied: dict[Content, None] = {}  # there and on the device
        self._stores: dict[Content, PageMove] = {}
        self._loads: dict[Content, int] = {}  # and their numbers, ascending
        self._num_loads = 0

    @property
    def num_stores(self) -> int:
        return len(self._stores)

    @property
    def has_moves(self) -> bool:
        return bool(self._stores or self._loads)

    def loads_through(self, most: int) -> int:
        """The number of the last of that many loads to come."""
        return next(islice(self._loads.values(), most - 1, None), self._num_loads)

    def last_load(self, contents: Iterable[Content]) -> int:
        """The largest number of their loads to come, 0 for none."""
        return max((self._loads.get(content, 0) for content in contents), default=0)

    def make_room(self) -> bool:
        """A place is free, if need be that of a content that is on the device as well."""
        if not self._free and (content := next(iter(self._copied), None)) is not None:
            self.leave(content)
        return bool(self._free)

    def oldest(self) -> Content | None:
        """What was stored first of all that is in host memory only and that nobody is about to load."""
        return next((content for content in self._stored if not content.num_holders), None)

    def plan_store(self, content: Content) -> int:
        """Have it in host memory only; how many pages that moves. Its page is still its own."""
        num_moves = 0
        if content.place is None:
            content.place = self._free.pop()
            self._stores[content] = PageMove(content.page, content.place)
            num_moves = 1
        self._loads.pop(content, None)
        self._copied.pop(content, None)
        self._stored[content] = None
        return num_moves

    def plan_load(self, content: Content) -> None:
        del self._stored[content]
        self._num_loads += 1
        self._loads[content] = self._num_loads

    def leave(self, content: Content) -> None:
        """It needs its place no more, and no move that was planned for it."""
        if content.place is not None:
            self._free.append(content.place)
            content.place = None
            for kept in (self._stored, self._copied, self._stores, self._loads):
                kept.pop(content, None)

    def take_moves(self, most_loads: int) -> tuple[list[PageMove], list[PageMove]]:
        stores, loads = list(self._stores.values()), []
        self._stores.clear()
        for content in list(islice(self._loads, most_loads)):
            assert content.place is not None
            loads.append(PageMove(content.page, content.place))
            del self._loads[content]
            self._copied[content] = None
        return stores, loads


def _entry(content: Content) -> tuple[int, int, int, Content]:
    return content.last_used, -content.depth, content.page, content


def _subtree(top: Node) -> Iterator[Node]:
    """A node and all below it."""
    nodes = [top]
    for node in nodes:  # grows while it is read
        nodes.extend(node.children.values())
    return iter(nodes)


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
    return next((index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
