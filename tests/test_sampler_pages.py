"""The page pool: no page is lost, none has two writers, and a cached page is found only by its own ids in its own namespace."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from noria.sampler.pages import PAGE, PagePool

NAMESPACE = ("run", 0)


def ids(*parts: tuple[int, int]) -> tuple[int, ...]:
    """(length, value) stretches."""
    return tuple(value for length, value in parts for _ in range(length))


def fill(pool: PagePool, namespace, prompt):
    """Prefill a prompt at once and let go of it."""
    nodes = pool.extend(namespace, None, prompt)
    for node in nodes:
        node.is_filled = True
    pool.release(nodes)
    return nodes


def test_a_filled_prompt_is_found_again_whole_and_in_part():
    pool = PagePool(32)
    prompt = tuple(range(40))
    nodes = fill(pool, NAMESPACE, prompt)
    assert pool.match(NAMESPACE, prompt).chain == nodes
    assert pool.match(NAMESPACE, (*prompt, 99)).num_positions == 40
    part = pool.match(NAMESPACE, (*prompt[:20], 99, 98))
    assert (part.chain, part.source, part.num_shared) == (nodes[:1], nodes[1], 4)
    assert pool.match(NAMESPACE, (7, *prompt)).num_positions == 0


def test_another_version_or_run_or_episode_finds_nothing():
    pool = PagePool(32)
    fill(pool, ("run", 0), tuple(range(40)))
    for namespace in (("run", 1), ("other", 0), ("run", "0"), ("run", "episode")):
        assert pool.match(namespace, tuple(range(40))).num_positions == 0


def test_an_unfilled_page_is_shared_by_equal_prompts_but_never_copied_from():
    pool = PagePool(32)
    nodes = pool.extend(NAMESPACE, None, tuple(range(20)))
    assert pool.match(NAMESPACE, tuple(range(20))).chain == nodes
    assert pool.match(NAMESPACE, (*range(18), 99)).source is None


def test_the_least_recently_used_page_goes_first():
    pool = PagePool(4)
    fill(pool, NAMESPACE, ids((PAGE, 1)))
    fill(pool, NAMESPACE, ids((PAGE, 2)))
    fill(pool, NAMESPACE, ids((PAGE, 3)))
    first = pool.match(NAMESPACE, ids((PAGE, 1))).chain
    pool.keep(first)
    pool.release(first)
    pool.take(1)
    assert [pool.match(NAMESPACE, ids((PAGE, value))).num_positions for value in (1, 2, 3)] == [PAGE, 0, PAGE]


def test_a_page_in_use_is_never_given_up():
    pool = PagePool(4)
    nodes = fill(pool, NAMESPACE, ids((PAGE, 1), (PAGE, 2)))
    pool.keep(nodes)
    assert pool.num_available == 1
    taken = pool.take(1)
    assert taken[0] not in {node.page for node in nodes}
    assert pool.match(NAMESPACE, ids((PAGE, 1), (PAGE, 2))).chain == nodes


def test_adopted_pages_stay_cached_in_several_namespaces_after_their_writer_left():
    pool = PagePool(8)
    pages = pool.take(2)
    for namespace in (NAMESPACE, ("run", "episode")):
        pool.adopt(namespace, tuple(range(20)), pages)
    pool.give_back(pages)
    assert pool.num_held == 0
    assert [node.page for node in pool.match(("run", "episode"), tuple(range(20))).chain] == pages
    everything = pool.take(7)
    assert sorted(everything) == list(range(1, 8))
    assert pool.match(NAMESPACE, tuple(range(20))).num_positions == 0


def test_a_prefix_in_use_is_not_remembered_for_every_episode_that_ever_began_with_it():
    pool, prompt = PagePool(64, num_host_places=8), tuple(range(20 * PAGE))
    prefix = fill(pool, NAMESPACE, prompt)
    chain = [node.page for node in prefix]
    pool.keep(prefix)
    for number in range(500):
        pages = pool.take(1)
        for namespace in (NAMESPACE, ("run", f"e{number}")):
            pool.adopt(namespace, (*prompt, number), [*chain, *pages], is_awaited=True)
        pool.give_back(pages)
        pool.take_moves()
    assert max(len(node.content.nodes) for node in prefix) < 64
    assert sum(pool.knows(("run", f"e{number}")) for number in range(500)) < 64
    assert pool.match(("run", "e499"), (*prompt, 499)).num_positions == len(prompt) + 1
    assert pool.match(NAMESPACE, prompt).chain == prefix
    pool.release(prefix)
    assert len(pool.take(63)) == 63


def test_a_purged_run_leaves_no_page_and_other_runs_keep_theirs():
    pool = PagePool(32)
    for namespace in (("run", 0), ("run", 1), ("run", "episode"), ("other", 0)):
        fill(pool, namespace, tuple(range(40)))
        fill(pool, namespace, (99, *range(40)))
    pool.purge("run")
    assert pool.num_available == 31
    assert [pool.match((name, 0), tuple(range(40))).num_positions for name in ("run", "other")] == [0, 40]
    pool.purge("other")
    pool.purge("nobody")
    assert sorted(pool.take(31)) == list(range(1, 32))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(6, 30))
def test_no_page_is_lost_and_none_has_two_writers(seed, num_pages):
    rng = random.Random(seed)
    pool = PagePool(num_pages)
    live: list[tuple[tuple, list[int], tuple, tuple[int, ...]]] = []
    for _ in range(80):
        if rng.random() < 0.05:
            gone = rng.choice(("run", "other"))
            for nodes, own, _, _ in [entry for entry in live if entry[2][0] == gone]:
                pool.release(nodes)
                pool.give_back(own)
            live = [entry for entry in live if entry[2][0] != gone]
            pool.purge(gone)
            assert not any(pool.match((gone, version), (bit,) * PAGE).num_positions for version in (0, 1) for bit in (0, 1))
        elif live and rng.random() < 0.45:
            nodes, own, namespace, prompt = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.6:
                for node in nodes:
                    node.is_filled = True
                whole = (*prompt, *(rng.randrange(3) for _ in range(len(own) * PAGE - 3)))
                full = [node.page for node in nodes[: len(prompt) // PAGE]]
                pool.adopt(namespace, whole[: (len(full) + len(own)) * PAGE], full + own)
            pool.release(nodes)
            pool.give_back(own)
            _forget_unfilled(pool, nodes)
        else:
            namespace = (rng.choice(("run", "other")), rng.randrange(2))
            prompt = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 50)))
            match = pool.match(namespace, prompt)
            found = tuple(i for node in match.chain for i in node.ids) + (match.source.ids[: match.num_shared] if match.source else ())
            assert found == prompt[: match.num_positions]
            pool.keep(match.chain)
            rest = prompt[PAGE * len(match.chain) :] if match.num_positions < len(prompt) and match.source is None else ()
            needed = -(-len(rest) // PAGE) + rng.randrange(1, 4)
            if needed > pool.num_available:
                pool.release(match.chain)
                continue
            new = pool.extend(namespace, match.chain[-1] if match.chain else None, rest) if rest else ()
            own = pool.take(needed - len(new))
            live.append((match.chain + new, own, namespace, prompt))
        _check(pool, live)
    for nodes, own, _, _ in live:
        pool.release(nodes)
        pool.give_back(own)
        _forget_unfilled(pool, nodes)
    assert pool.num_held == 0
    assert sorted(pool.take(num_pages - 1)) == list(range(1, num_pages))


def _forget_unfilled(pool, nodes):
    for node in reversed(nodes):
        if not node.num_users and not node.is_filled and node in node.content.nodes and not node.children:
            pool.forget(node)


def _check(pool, live):
    own = [page for _, pages, _, _ in live for page in pages]
    shared = {node.page for nodes, _, _, _ in live for node in nodes}
    assert len(own) == len(set(own))
    assert not shared & set(own)
    assert 0 not in shared | set(own)
    assert pool.num_held == len(shared | set(own))


def test_a_prefix_that_is_about_to_be_kept_stays_where_it_was_found():
    """Room is made for a request between finding a prefix and keeping it: by giving up the very page that the same namespace knows below it."""
    pool, prompt = PagePool(16), tuple(range(4 * PAGE))
    fill(pool, NAMESPACE, prompt)
    chain = [node.page for node in pool.match(NAMESPACE, prompt).chain]
    for number in range(4):
        pages = pool.take(1)
        pool.adopt(("run", f"e{number}"), (*prompt, number), [*chain, *pages])
        pool.give_back(pages)
    found = pool.match(("run", "e3"), (*prompt, 99)).chain
    rest = pool.num_available - len(found)
    assert pool.make_room(rest, found)
    pool.keep(found)
    held = pool.take(rest)
    assert pool.match(("run", "e3"), prompt).chain == found
    pool.release(found)
    pool.give_back(held)
    assert len(pool.take(15)) == 15
