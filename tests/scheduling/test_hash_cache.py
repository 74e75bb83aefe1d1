"""The table of hash chains on a pool of ten blocks of four tokens: exact blocks and order of eviction.

Sequences are written as strings, a letter a token; blocks are handed out from 1 upwards.
"""

from __future__ import annotations

import json

import pytest

from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.hash_cache import HashCache
from jpaged.scheduling.prefix_cache import InsertResult, PrefixMatch, Replacement


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def pool():
    return BlockPool(10)


@pytest.fixture
def cache(pool):
    made = HashCache(pool, 4)
    yield made
    made.check_invariants()


def match(cache: HashCache, text: str, limit: int | None = None, salt: str | None = None) -> PrefixMatch:
    return cache.match(ids(text), len(text) if limit is None else limit, salt)


def insert(cache: HashCache, text: str, cursor: int = 0, salt: str | None = None) -> list[int]:
    """Caches new blocks for all of `text` that is not cached; returns the table, held once."""
    found = match(cache, text, salt=salt).block_ids
    cache.referenced([block for block in found if cache.pool.incref(block) == 1])
    taken = cache.pool.allocate(len(text) // 4 - len(found))
    assert taken is not None
    table = [*found, *taken]
    assert cache.insert(ids(text), table, cursor, salt) == InsertResult(len(table), ())
    return table


def release(cache: HashCache, table: list[int]) -> None:
    cache.unreferenced([block for block in reversed(table) if cache.pool.decref(block) == 0])


def run(cache: HashCache, text: str, salt: str | None = None) -> list[int]:
    table = insert(cache, text, salt=salt)
    release(cache, table)
    return table


def test_a_repeated_sequence_finds_its_blocks_in_order(cache):
    assert match(cache, "aaaabbbb") == PrefixMatch((), None, 0)
    assert run(cache, "aaaabbbbcccc") == [1, 2, 3]
    assert match(cache, "aaaabbbbccccdddd") == PrefixMatch((1, 2, 3), None, 12)
    assert match(cache, "aaaabbbb").cursor == 2
    assert (cache.num_cached, cache.num_evictable) == (3, 3)


@pytest.mark.parametrize("agreeing", range(13))
def test_only_blocks_that_agree_to_the_last_token_match(cache, agreeing):
    run(cache, "abcdefghijkl")
    full = agreeing // 4
    text = "abcdefghijkl"[:agreeing] + "x" * (16 - agreeing)
    assert cache.peek(ids(text), 16) == 4 * full
    assert match(cache, text) == PrefixMatch((1, 2, 3)[:full], None, 4 * full)


@pytest.mark.parametrize("limit", range(-1, 15))
def test_only_blocks_wholly_within_the_limit_match(cache, limit):
    run(cache, "abcdefghijkl")
    full = max(0, min(limit, 12)) // 4
    assert match(cache, "abcdefghijkl", limit) == PrefixMatch((1, 2, 3)[:full], None, 4 * full)


def test_the_same_tokens_after_another_prefix_are_another_block(cache):
    assert run(cache, "aaaacccc") == [1, 2]
    assert run(cache, "bbbbcccc") == [3, 4]
    assert match(cache, "aaaacccc").block_ids == (1, 2)
    assert match(cache, "bbbbcccc").block_ids == (3, 4)
    assert match(cache, "cccc").block_ids == ()
    assert match(cache, "aaaaaaaa").block_ids == (1,)


def test_prefixes_whose_hashes_collide_are_kept_apart(pool):
    cache = HashCache(pool, 1)
    modulus = 2**61 - 1  # Python's integers hash by this modulus
    assert hash((5,)) == hash((5 + modulus,))
    for token in (5, 5 + modulus):
        cache.insert([token], pool.allocate(1))
    assert cache.match([5], 1).block_ids == (1,)
    assert cache.match([5 + modulus], 1).block_ids == (2,)
    assert cache.match([5 + 2 * modulus], 1).block_ids == ()


def test_salts_keep_equal_tokens_apart(cache):
    assert run(cache, "aaaabbbb", "one") == [1, 2]
    for salt in (None, "", "two"):
        assert match(cache, "aaaabbbb", salt=salt) == PrefixMatch((), None, 0)
    assert run(cache, "aaaabbbb") == [3, 4]
    assert match(cache, "aaaabbbb", salt="one").block_ids == (1, 2)


def test_with_a_cursor_only_the_new_tokens_are_read(pool, cache):
    class Unreadable(int):
        def __hash__(self):
            raise AssertionError("read")

    table = pool.allocate(3)
    cursor = cache.insert(ids("aaaabbbb"), table[:2]).cursor
    old = [Unreadable(token) for token in ids("aaaabbbb")]
    assert cache.insert(old + ids("cccc"), table, cursor) == InsertResult(3, ())
    assert match(cache, "aaaabbbbcccc").block_ids == (1, 2, 3)
    assert cache.insert(old, table[:2], 3) == InsertResult(2, ())


def test_a_cursor_from_before_a_clear_starts_over(pool, cache):
    table = insert(cache, "aaaabbbb")
    assert cache.clear() == []
    run(cache, "aaaacccc")  # block 3 holds "aaaa" now
    assert cache.insert(ids("aaaabbbb"), table, 2) == InsertResult(2, (Replacement(0, 3),))
    cache.referenced([3])
    pool.incref(3)
    pool.decref(1)
    pool.free([1])
    assert match(cache, "aaaabbbb").block_ids == (3, 2)


def test_the_second_to_compute_the_same_tokens_is_told_to_use_the_first_ones_blocks(pool, cache):
    insert(cache, "aaaabbbb")
    mine = pool.allocate(3)
    result = cache.insert(ids("aaaabbbbcccc"), mine)
    assert result == InsertResult(3, (Replacement(0, 1), Replacement(1, 2)))
    assert [cache.contains(block) for block in (1, 2, 3, 4, 5)] == [True, True, False, False, True]
    assert match(cache, "aaaabbbbcccc").block_ids == (1, 2, 5)


def test_a_block_enters_the_cache_only_while_one_table_has_it(pool, cache):
    table = pool.allocate(3)
    pool.incref(table[1])
    assert cache.insert(ids("aaaabbbbcccc"), table) == InsertResult(1, ())
    assert cache.insert(ids("aaaabbbbcccc"), table, 1) == InsertResult(1, ())
    pool.decref(table[1])
    assert cache.insert(ids("aaaabbbbcccc"), table, 1) == InsertResult(3, ())
    assert match(cache, "aaaabbbbcccc").block_ids == (1, 2, 3)


def test_longer_lists_are_cut_where_the_number_of_blocks_says(pool, cache):
    table = pool.allocate(3)
    assert cache.insert(ids("aaaabbbbcc"), table, num_blocks=2) == InsertResult(2, ())
    assert not cache.contains(3)
    with pytest.raises(AssertionError):
        cache.insert(ids("aaaabbbbcc"), table)


def test_the_last_blocks_of_a_request_are_evicted_first(cache):
    run(cache, "aaaabbbbcccc")
    run(cache, "dddd")
    assert cache.evict(2) == [3, 2]
    assert match(cache, "aaaabbbbcccc") == PrefixMatch((1,), None, 4)
    assert cache.evict(9) == [4, 1]
    assert (cache.num_cached, cache.num_evictable, cache.num_evicted) == (0, 0, 4)
    assert cache.evict(1) == []
    assert cache.snapshot() == []


def test_lru_counts_matches_and_releases_as_use(cache):
    held = insert(cache, "aaaa")
    for text in ("bbbb", "cccc", "dddd"):
        run(cache, text)
    match(cache, "bbbb")
    cache.peek(ids("cccc"), 4)
    release(cache, held)
    assert cache.evict(4) == [3, 4, 2, 1]


def test_lfu_evicts_what_was_matched_least_and_then_what_was_used_longest_ago(pool):
    cache = HashCache(pool, 4, "lfu")
    for text in ("aaaa", "bbbb", "cccc", "dddd"):
        run(cache, text)
    for text in ("bbbb", "bbbb", "aaaa", "dddd", "bbbb", "aaaa", "aaaa", "dddd"):
        match(cache, text)
    assert cache.evict(4) == [3, 4, 2, 1]


def test_fifo_evicts_what_was_inserted_first_but_no_block_before_those_after_it(pool):
    cache = HashCache(pool, 4, "fifo")
    for text in ("aaaabbbb", "cccc", "aaaadddd"):
        run(cache, text)
    match(cache, "cccc")
    assert cache.evict(5) == [2, 3, 4, 1]


def test_referenced_blocks_stay(cache):
    held = insert(cache, "aaaabbbb")
    run(cache, "aaaabbbbcccc")
    run(cache, "aaaadddd")
    assert cache.num_evictable == 2
    assert cache.evict(5) == [3, 4]
    release(cache, held)
    run(cache, "cccc")
    held = insert(cache, "aaaabbbb")  # was in the queue, and is now in use again
    assert cache.evict(5) == [5]
    release(cache, held)
    assert cache.evict(5) == [2, 1]


def test_clearing_returns_the_unused_blocks_and_forgets_those_in_use(pool, cache):
    held = insert(cache, "aaaa")
    run(cache, "aaaabbbb")
    run(cache, "cccc", "salt")
    assert sorted(cache.clear()) == [2, 3]
    assert (cache.num_cached, cache.num_evictable) == (0, 0)
    assert not cache.contains(held[0])
    assert match(cache, "aaaabbbb") == PrefixMatch((), None, 0)
    assert cache.evict(5) == []


def test_a_snapshot_is_plain_data(cache):
    run(cache, "aaaabbbb")
    run(cache, "cccc", "salt")
    held = insert(cache, "aaaa")
    plain, salted = json.loads(json.dumps(cache.snapshot()))
    (first,) = plain["children"]
    (second,) = first["children"]
    assert (plain["salt"], salted["salt"]) == (None, "salt")
    assert (first["start"], first["block_ids"], first["token_ids"]) == (0, held, ids("aaaa"))
    assert (first["references"], first["hits"]) == ([1], 1)
    assert (second["start"], second["block_ids"], second["children"]) == (4, [2], [])
    assert salted["children"][0]["block_ids"] == [3]


def test_the_queue_stays_small_through_thousands_of_unique_requests():
    pool = BlockPool(64)
    cache = HashCache(pool, 4)
    largest = 0
    for i in range(10_000):
        if pool.num_free < 2:
            pool.free(cache.evict(2 - pool.num_free))
        table = pool.allocate(2)
        cache.insert([i] * 8, table, salt=str(i))
        release(cache, table)
        largest = max(largest, len(cache._queue))
    assert largest <= 32 and cache.num_cached == cache.num_evictable == 64
    cache.check_invariants()


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache, first, second: setattr(second, "token_ids", (1, 2, 3, 4)),
        lambda cache, first, second: setattr(second, "block_id", first.block_id),
        lambda cache, first, second: setattr(first, "num_children", 0),
        lambda cache, first, second: setattr(second, "hits", 7),
        lambda cache, first, second: cache._node_of.pop(1),
        lambda cache, first, second: setattr(cache, "num_evictable", 1),
        lambda cache, first, second: cache.pool.incref(2),
        lambda cache, first, second: cache._queue._heap.pop(),
    ],
)
def test_damage_is_noticed(pool, damage):
    cache = HashCache(pool, 4)
    run(cache, "aaaabbbb")
    cache.check_invariants()
    damage(cache, *cache._entries.values())
    with pytest.raises(AssertionError):
        cache.check_invariants()
