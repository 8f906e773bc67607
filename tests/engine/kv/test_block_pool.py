"""Pages are free exactly when no table holds them, and are found by their tokens until others need them."""

import random

from parallm.engine.kv.block_pool import FIRST_PAGES, SCRATCH, BlockPool, BlockTable
from parallm.engine.kv.prefix_cache import Owner

BASE, MINE = Owner("", 0, ""), Owner("", 0, "mine")
PAGE = 4


def make(num_pages: int = 9) -> BlockPool:
    return BlockPool(num_pages, PAGE, page_bytes=100)


def table(pool: BlockPool, count: int) -> BlockTable:
    pages = pool.allocate(count)
    assert pages is not None
    return BlockTable(pool, pages)


def test_pages_are_freed_with_their_table() -> None:
    pool = make()
    one = table(pool, 5)
    assert (pool.num_free, pool.num_used, SCRATCH in one.pages) == (3, 5, False)
    assert pool.allocate(4) is None
    del one
    assert pool.num_free == 8


def test_a_shared_page_is_freed_by_the_last_of_its_tables() -> None:
    pool = make()
    one = table(pool, 2)
    pool.share(one.pages)
    other = BlockTable(pool, list(one.pages))
    del one
    assert pool.num_free == 6
    del other
    assert pool.num_free == 8


def test_full_pages_are_found_by_all_tokens_up_to_their_end() -> None:
    pool, tokens = make(), [*range(10)]
    pages = table(pool, 3)
    pool.cache(BASE, tokens, pages.pages)
    assert pool.match(BASE, tokens, 10) == pages.pages[:2]
    assert pool.match(BASE, tokens, 7) == pages.pages[:1]
    assert pool.match(BASE, [9, *tokens[1:]], 10) == []
    assert pool.match(BASE, [*tokens[:4], 9, *tokens[5:]], 10) == pages.pages[:1]
    assert pool.match(MINE, tokens, 10) == []


def test_free_pages_keep_what_they_hold_until_others_need_them_and_ends_go_first() -> None:
    pool, tokens = make(5), [*range(12)]
    pages = table(pool, 3)
    own = list(pages.pages)
    pool.cache(BASE, tokens, own)
    assert pool.nbytes == 0
    del pages
    assert (pool.num_free, pool.nbytes) == (4, 300)
    empty = table(pool, 1)
    assert empty.pages[0] not in own, "a page that holds nothing goes first"
    more = table(pool, 1)
    assert more.pages == own[2:]
    assert pool.match(BASE, tokens, 12) == own[:2]
    pool.share(own[:2])
    again = BlockTable(pool, own[:2])
    assert (pool.nbytes, pool.num_free) == (0, 0)
    del again
    assert (pool.num_free, pool.nbytes) == (2, 200)
    pool.clear()
    assert (pool.nbytes, pool.match(BASE, tokens, 12), pool.num_free) == (0, [], 2)


def test_a_pool_grows_before_what_it_caches_goes_up_to_half_of_what_it_may_have() -> None:
    pool, size = make(4 * FIRST_PAGES + 40), FIRST_PAGES - 1
    pages = table(pool, size)
    pool.cache(BASE, [*range(size * PAGE)], pages.pages)
    del pages
    assert (pool.num_pages, pool.num_free) == (FIRST_PAGES, 4 * FIRST_PAGES + 39)
    more = table(pool, 3)
    assert (pool.num_pages, pool.nbytes) == (2 * FIRST_PAGES, 100 * size)
    assert min(more.pages) == FIRST_PAGES
    others = table(pool, FIRST_PAGES - 3)
    assert (pool.num_pages, pool.nbytes) == (2 * FIRST_PAGES, 100 * size)
    all_others = table(pool, pool.num_free)
    assert (pool.num_pages, pool.nbytes, pool.num_free) == (pool.max_pages, 0, 0)
    assert sorted(more.pages + others.pages + all_others.pages) == [*range(1, pool.max_pages)]


def test_a_pool_grows_at_once_for_all_that_waits() -> None:
    pool = BlockPool(100 * FIRST_PAGES, PAGE, page_bytes=100, num_awaited=lambda: 5 * FIRST_PAGES)
    first = table(pool, FIRST_PAGES - 1)
    assert pool.num_pages == FIRST_PAGES, "nothing has to grow yet"
    more = table(pool, 1)
    assert pool.num_pages == 8 * FIRST_PAGES
    assert not set(first.pages) & set(more.pages)


def test_a_pool_that_grows_for_what_waits_ends_at_its_limit_and_lets_cached_pages_go_there() -> None:
    pool, size = BlockPool(5 * FIRST_PAGES, PAGE, 100, num_awaited=lambda: 4 * FIRST_PAGES - 1), FIRST_PAGES - 1
    pages = table(pool, size)
    pool.cache(BASE, [*range(size * PAGE)], pages.pages)
    del pages
    few = table(pool, 1)
    assert (pool.num_pages, pool.nbytes) == (4 * FIRST_PAGES, 100 * size), "cached pages count as free there"
    rest = table(pool, pool.num_free)
    assert pool.num_pages == 5 * FIRST_PAGES
    assert sorted(few.pages + rest.pages) == [*range(1, pool.max_pages)]


def test_versions_that_are_gone_are_forgotten() -> None:
    pool, tokens = make(), [*range(4)]
    owners = [Owner("policy", 1, ""), Owner("policy", 2, ""), BASE]
    for owner in owners:
        pool.cache(owner, tokens, table(pool, 1).pages)
    pool.forget(lambda name, version: version == 2)
    assert [len(pool.match(owner, tokens, 4)) for owner in owners] == [0, 1, 1]
    assert pool.num_free == 8
    assert pool.nbytes == 200


def test_counts_hold_over_random_lives() -> None:
    rng, pool = random.Random(0), make(40)
    tables: list[BlockTable] = []
    for turn in range(3000):
        choice = rng.random()
        tokens = [rng.randrange(3) for _ in range(12)]
        if choice < 0.5:
            found = pool.match(BASE, tokens, 12)
            pool.share(found)
            pages = pool.allocate(3 - len(found))
            table_pages = [*found, *(pages or [])]
            tables.append(BlockTable(pool, table_pages))
            if pages is not None:
                pool.cache(BASE, tokens, table_pages)
        elif tables:
            tables.pop(rng.randrange(len(tables)))
        if turn % 500 == 499:
            pool.clear()
        held = {page for one in tables for page in one.pages}
        assert pool.num_used == len(held)
        assert pool.num_free == 39 - len(held)
        assert pool.nbytes == 100 * len([page for page in pool._keys if page not in held])
    tables.clear()
    assert pool.num_free == 39
