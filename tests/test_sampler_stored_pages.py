"""Pages that wait in host memory: what moves, when, and what is found again."""

from noria.sampler.pages import PAGE, PagePool

PURE, EPISODE = ("run", 0), ("run", "episode")


def ids(number, first=0):
    return tuple(range(first, first + number))


def played(pool, number=2 * PAGE, first=0, namespaces=(PURE, EPISODE)):
    """An episode's turn that has ended: its pages are cached, and awaited."""
    pages = pool.take(-(-number // PAGE))
    for namespace in namespaces:
        pool.adopt(namespace, ids(number, first), pages, is_awaited=True)
    pool.give_back(pages)
    return pages


def pushed_out(pool):
    """Somebody takes every page there is, and gives it back."""
    pool.give_back(pool.take(pool.num_available))


def kept(pool, number=2 * PAGE, first=0, namespace=EPISODE):
    match = pool.match(namespace, ids(number, first))
    pool.keep(match.chain)
    return match.chain


def test_an_awaited_page_goes_to_the_host_and_comes_back_with_its_ids():
    pool = PagePool(5, 4)
    pages = played(pool)
    pushed_out(pool)
    stores, loads = pool.take_moves()
    assert ({page for page, _ in stores}, loads) == (set(pages), [])
    assert pool.num_missing(2, pool.match(EPISODE, ids(2 * PAGE)).chain) == 0
    assert pool.num_missing(3, pool.match(EPISODE, ids(2 * PAGE)).chain) == 1
    chain = kept(pool)
    back_stores, back = pool.take_moves()
    assert back_stores == []
    assert {(page, place) for page, place in back} == {(node.page, dict(stores)[page]) for node, page in zip(chain, pages, strict=True)}
    assert (pool.counts.num_stored, pool.counts.num_loaded, pool.num_held) == (2, 2, 2)


def test_all_namespaces_share_one_page_and_one_place():
    pool = PagePool(5, 4)
    played(pool)
    pushed_out(pool)
    assert len(pool.take_moves()[0]) == 2
    assert [node.page for node in kept(pool)] == [node.page for node in kept(pool, namespace=PURE)]
    assert len(pool.take_moves()[1]) == 2


def test_others_pages_are_given_up_without_a_move_and_so_is_an_awaited_one_without_host_memory():
    pool, small = PagePool(5, 4), PagePool(5, 0)
    pages = pool.take(2)
    pool.adopt(PURE, ids(2 * PAGE), pages)
    pool.give_back(pages)
    played(small)
    for one in (pool, small):
        pushed_out(one)
        assert one.take_moves() == ([], [])
        assert one.match(PURE, ids(2 * PAGE)).num_positions == 0


def test_a_page_that_came_back_keeps_its_place_so_that_giving_it_up_again_moves_nothing():
    pool = PagePool(5, 2)
    played(pool)
    pushed_out(pool)
    pool.release(kept(pool))
    pool.take_moves()
    pushed_out(pool)
    assert pool.take_moves() == ([], [])
    kept(pool)
    assert len(pool.take_moves()[1]) == 2


def test_a_place_of_a_page_that_is_back_goes_to_whoever_needs_it():
    pool = PagePool(6, 2)
    played(pool)
    pushed_out(pool)
    chain = kept(pool)
    pool.take_moves()
    played(pool, first=500)
    pool.take(3)
    assert len(pool.take_moves()[0]) == 2
    assert (pool.counts.num_dropped, pool.match(EPISODE, ids(2 * PAGE)).chain) == (0, chain)
    assert pool.match(EPISODE, ids(2 * PAGE, 500)).num_positions == 2 * PAGE


def test_stored_and_wanted_again_in_one_plan():
    pool = PagePool(5, 4)
    played(pool)
    pushed_out(pool)
    chain = kept(pool)
    stores, loads = pool.take_moves()
    assert {place for _, place in stores} == {place for _, place in loads}
    assert {page for page, _ in loads} == {node.page for node in chain}


def test_wanted_and_given_up_again_in_one_plan_is_no_load():
    pool = PagePool(5, 4)
    played(pool)
    pushed_out(pool)
    pool.take_moves()
    pool.release(kept(pool))
    pool.take(4)
    assert pool.take_moves() == ([], [])
    assert pool.match(EPISODE, ids(2 * PAGE)).num_positions == 2 * PAGE


def test_a_place_that_is_being_loaded_is_not_given_away():
    pool = PagePool(6, 2)
    played(pool)
    pushed_out(pool)
    pool.take_moves()
    kept(pool)
    played(pool, first=500)
    pool.take(3)
    stores, loads = pool.take_moves()
    assert (stores, len(loads)) == ([], 2)
    assert pool.match(EPISODE, ids(2 * PAGE, 500)).num_positions == 0


def test_what_was_stored_first_makes_room_and_its_store_is_never_made():
    pool = PagePool(7, 2)
    for first in (0, 500, 900):
        played(pool, first=first)
    pushed_out(pool)
    stores, _ = pool.take_moves()
    assert len(stores) == len({place for _, place in stores}) == 2
    assert [pool.match(EPISODE, ids(2 * PAGE, first)).num_positions for first in (0, 500, 900)] == [0, 0, 2 * PAGE]


def test_a_stored_page_that_was_computed_again_needs_its_place_no_more():
    pool = PagePool(5, 4)
    played(pool)
    pushed_out(pool)
    pages = played(pool)
    pool.take_moves()
    assert [node.page for node in kept(pool)] == pages
    assert pool.take_moves() == ([], [])


def test_a_purged_run_leaves_no_page_and_no_place():
    pool = PagePool(5, 2)
    played(pool)
    pushed_out(pool)
    pool.purge("run")
    assert pool.take_moves() == ([], [])
    played(pool, first=500, namespaces=(("other", "e"),))
    pushed_out(pool)
    assert (len(pool.take_moves()[0]), pool.counts.num_dropped) == (2, 0)


def test_a_request_for_more_than_can_ever_come_back_says_how_many_pages_are_missing():
    pool = PagePool(5, 8)
    played(pool)
    pushed_out(pool)
    taken = pool.take(3)
    assert pool.num_missing(0, pool.match(EPISODE, ids(2 * PAGE)).chain) == 1
    pool.give_back(taken)
    assert pool.num_missing(0, pool.match(EPISODE, ids(2 * PAGE)).chain) == -2


def test_a_plan_stores_no_more_than_a_dispatch_moves_and_the_next_one_goes_on():
    pool = PagePool(9, 16, max_moves=2)
    for first in (0, 500, 900, 1300):
        played(pool, first=first)
    wanted = pool.match(EPISODE, ids(2 * PAGE)).chain
    for is_enough in (False, False, True):
        assert pool.make_room(6, wanted) is is_enough
        assert len(pool.take_moves()[0]) == 2
    assert (pool.num_available, pool.num_missing(6, wanted)) == (8, 0)
    assert pool.match(EPISODE, ids(2 * PAGE)).chain == wanted, "what room is made beside stays"
    assert all(node.page for node in wanted)
    pool.keep(wanted)
    pool.take(6)
    assert pool.take_moves() == ([], [])


def test_loads_are_made_in_order_so_many_in_each_dispatch():
    pool = PagePool(13, 12, max_moves=4)
    for first in (0, 500, 900):
        played(pool, first=first)
    while not pool.make_room(12):
        pool.take_moves()
    pool.take_moves()
    waits = [pool.keep(pool.match(EPISODE, ids(2 * PAGE, first)).chain) for first in (900, 0, 500, 900)]
    assert waits == [2, 4, 6, 2], "a page that is about to be loaded is loaded once"
    assert pool.loads_through == 4
    assert [len(pool.take_moves()[1]) for _ in range(3)] == [4, 2, 0]
    assert not pool.has_moves
    assert pool.keep(pool.match(EPISODE, ids(2 * PAGE)).chain) == 0
