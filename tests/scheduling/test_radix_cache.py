"""The radix tree on a pool of ten blocks of four tokens: exact blocks, counts and order of eviction.

Sequences are written as strings, a letter a token; blocks are handed out from 1 upwards.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.prefix_cache import (
    InsertResult,
    PartialMatch,
    PrefixMatch,
    Replacement,
    make_prefix_cache,
)
from jpaged.scheduling.radix_cache import RadixCache


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class Owner:
    """A pool and a cache, and the bookkeeping between them, step by step as a test wants it."""

    def __init__(self, policy="lru", num_blocks: int = 10, block_size: int = 4):
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(self.pool, block_size, policy)

    def hold(self, *blocks: int) -> None:
        self.cache.referenced([block for block in blocks if self.pool.incref(block) == 1])

    def hold_uncached(self, *blocks: int) -> None:
        for block in blocks:
            self.pool.incref(block)

    def drop(self, *blocks: int) -> None:
        """Last blocks first, as a request gives up its table."""
        zero = [block for block in reversed(blocks) if self.pool.decref(block) == 0]
        self.cache.unreferenced([block for block in zero if self.cache.contains(block)])
        self.pool.free(block for block in zero if not self.cache.contains(block))

    def start(self, text: str, salt: str | None = None) -> list[int]:
        """A request that shares what is cached and computes the rest, all its blocks being full."""
        size = self.cache.block_size
        found = self.cache.match(ids(text), len(text), salt).block_ids
        self.hold(*found)
        taken = self.pool.allocate(len(text) // size - len(found))
        assert taken is not None
        table = [*found, *taken]
        self.insert(text, table, len(found), salt)
        return table

    def insert(self, text: str, table: list[int], cursor: int = 0, salt: str | None = None) -> InsertResult:
        result = self.cache.insert(ids(text), table, cursor, salt)
        for change in result.replaced:
            self.hold(change.block_id)
            self.drop(table[change.index])
            table[change.index] = change.block_id
        return result

    def run(self, text: str, salt: str | None = None) -> list[int]:
        """A request that comes and goes."""
        table = self.start(text, salt)
        self.drop(*table)
        return table

    def evict(self, count: int) -> list[int]:
        blocks = self.cache.evict(count)
        self.pool.free(blocks)
        return blocks

    def match(self, text: str, limit: int | None = None, salt: str | None = None) -> PrefixMatch:
        return self.cache.match(ids(text), len(text) if limit is None else limit, salt)

    def shape(self) -> list:
        """The tree as nested lists: text, blocks, children."""

        def of(node: dict) -> list:
            return [
                "".join(map(chr, node["token_ids"])),
                node["block_ids"],
                [of(c) for c in node["children"]],
            ]

        return [[root["salt"], [of(child) for child in root["children"]]] for root in self.cache.snapshot()]

    def counts(self) -> tuple[int, int, int]:
        """Free, cached, evictable."""
        return self.pool.num_free, self.cache.num_cached, self.cache.num_evictable


@pytest.fixture
def owner():
    made = Owner()
    yield made
    made.cache.check_invariants()


# -- matching ---------------------------------------------------------------------------------


def test_an_empty_cache_finds_nothing(owner):
    assert owner.match("aaaabbbb") == PrefixMatch((), None, 0)
    assert owner.cache.peek(ids("aaaabbbb"), 8) == 0
    assert owner.counts() == (10, 0, 0)


def test_a_repeated_sequence_finds_its_blocks_in_order(owner):
    assert owner.run("aaaabbbbcccc") == [1, 2, 3]
    assert owner.match("aaaabbbbccccdddd") == PrefixMatch((1, 2, 3), None, 12)
    assert owner.match("aaaabbbb") == PrefixMatch((1, 2), None, 8)
    assert owner.match("aaaabbbb").cursor == 2
    assert owner.counts() == (7, 3, 3)


@pytest.mark.parametrize("agreeing", range(13))
def test_a_match_ends_at_the_token_where_the_sequences_part(owner, agreeing):
    owner.run("abcdefghijkl")
    full, rest = divmod(agreeing, 4)
    expected = PrefixMatch((1, 2, 3)[:full], PartialMatch(full + 1, rest) if rest else None, agreeing)
    text = "abcdefghijkl"[:agreeing] + "x" * (16 - agreeing)
    assert owner.cache.peek(ids(text), 16) == agreeing
    assert owner.match(text) == expected
    assert owner.match(text) == expected


@pytest.mark.parametrize("limit", range(-1, 15))
def test_a_match_ends_at_the_limit_and_cuts_a_block_where_it_must(owner, limit):
    owner.run("abcdefghijkl")
    found = max(0, min(limit, 12))
    full, rest = divmod(found, 4)
    expected = PrefixMatch((1, 2, 3)[:full], PartialMatch(full + 1, rest) if rest else None, found)
    assert owner.cache.peek(ids("abcdefghijkl"), limit) == found
    assert owner.match("abcdefghijkl", limit) == expected


def test_a_sequence_given_as_a_tuple_matches_too(owner):
    owner.run("abcdefgh")
    assert owner.cache.match(tuple(ids("abcdefgx")), 8) == PrefixMatch((1,), PartialMatch(2, 3), 7)


@pytest.mark.parametrize(
    ("text", "block", "agreeing"),
    [
        ("abzz", 2, 2),  # after all that share "ab"
        ("abaa", 1, 2),  # before all that share "ab"
        ("abcz", 1, 3),
        ("abkz", 2, 3),
        ("axxz", 3, 3),
        ("azzz", 3, 1),
        ("bzzz", 4, 1),
        ("bbbz", 4, 3),
    ],
)
def test_among_siblings_the_one_that_agrees_longest_is_taken(owner, text, block, agreeing):
    for other in ("abcd", "abkl", "axxx", "bbbb"):
        owner.run(other)
    assert owner.match(text) == PrefixMatch((), PartialMatch(block, agreeing), agreeing)
    assert owner.match(text, agreeing - 1).num_tokens == agreeing - 1


def test_siblings_below_a_shared_prefix_are_searched_by_token_as_well(owner):
    owner.run("aaaabcde")
    owner.run("aaaabxyz")
    assert owner.match("aaaabcdx") == PrefixMatch((1,), PartialMatch(2, 3), 7)
    assert owner.match("aaaabxyq") == PrefixMatch((1,), PartialMatch(3, 3), 7)
    assert owner.match("aaaaqqqq") == PrefixMatch((1,), None, 4)
    assert owner.match("aaabqqqq") == PrefixMatch((), PartialMatch(1, 3), 3)


def test_peeking_changes_neither_the_order_of_eviction_nor_the_tree(owner):
    owner.run("aaaabbbb")
    owner.run("cccc")
    before = owner.cache.snapshot()
    assert owner.cache.peek(ids("aaaabbxx"), 8) == 6
    assert owner.cache.snapshot() == before
    assert owner.evict(3) == [2, 1, 3]


# -- inserting, splitting ---------------------------------------------------------------------


def test_nodes_split_at_block_boundaries_only(owner):
    owner.run("aaaabbbbcccc")
    assert owner.shape() == [[None, [["aaaabbbbcccc", [1, 2, 3], []]]]]
    owner.run("aaaabbbbccxx")
    assert owner.shape() == [
        [None, [["aaaabbbb", [1, 2], [["cccc", [3], []], ["ccxx", [4], []]]]]],
    ]
    owner.run("aaaazzzz")
    assert owner.shape() == [
        [
            None,
            [["aaaa", [1], [["bbbb", [2], [["cccc", [3], []], ["ccxx", [4], []]]], ["zzzz", [5], []]]]],
        ],
    ]


def test_inserting_without_a_cursor_walks_and_splits_by_itself(owner):
    assert owner.insert("aaaabbbb", owner.pool.allocate(2)) == InsertResult(2, ())
    table = owner.pool.allocate(3)
    assert owner.insert("aaaaccccdddd", table) == InsertResult(3, (Replacement(0, 1),))
    assert table == [1, 4, 5]
    assert owner.shape() == [[None, [["aaaa", [1], [["bbbb", [2], []], ["ccccdddd", [4, 5], []]]]]]]
    assert owner.counts() == (6, 4, 0)


def test_what_parts_inside_a_node_does_not_fall_among_its_children(owner):
    owner.run("aaaabbbb")
    owner.run("aaaabbbbcccc")
    assert owner.shape() == [[None, [["aaaabbbb", [1, 2], [["cccc", [3], []]]]]]]
    table = owner.pool.allocate(2)
    assert owner.insert("aaaacccc", table) == InsertResult(2, (Replacement(0, 1),))
    assert table == [1, 5]
    assert owner.shape() == [
        [None, [["aaaa", [1], [["bbbb", [2], [["cccc", [3], []]]], ["cccc", [5], []]]]]],
    ]


def test_a_prefix_of_what_is_cached_adds_nothing(owner):
    owner.run("aaaabbbbcccc")
    owner.hold(1, 2)
    assert owner.insert("aaaabbbb", [1, 2]) == InsertResult(2, ())
    assert owner.shape() == [[None, [["aaaabbbbcccc", [1, 2, 3], []]]]]


def test_nothing_to_insert_leaves_no_trace(owner):
    assert owner.cache.insert([], []) == InsertResult(0, ())
    assert owner.cache.insert(ids("abc"), [], num_blocks=0, salt="s") == InsertResult(0, ())
    assert owner.cache.snapshot() == []


def test_longer_lists_are_cut_where_the_number_of_blocks_says(owner):
    table = owner.pool.allocate(3)
    assert owner.cache.insert(ids("aaaabbbbcc"), table, num_blocks=2) == InsertResult(2, ())
    assert owner.shape() == [[None, [["aaaabbbb", [1, 2], []]]]]
    owner.cache.check_invariants()


@pytest.mark.parametrize("text", ["aaaabbb", "aaaabbbbc", ""])
def test_tokens_that_do_not_fill_the_blocks_are_refused(owner, text):
    with pytest.raises(AssertionError):
        owner.cache.insert(ids(text), owner.pool.allocate(2))
    with pytest.raises(AssertionError):
        owner.cache.insert(ids("aaaabbb"), owner.pool.allocate(2), num_blocks=2)


def test_blocks_that_nobody_references_cannot_be_inserted(owner):
    owner.pool.decref(owner.pool.allocate(1)[0])
    with pytest.raises(AssertionError, match="block 1 is inserted without being referenced"):
        owner.cache.insert(ids("aaaa"), [1])


def test_a_block_cannot_be_cached_for_two_contents(owner):
    owner.start("aaaa")
    with pytest.raises(AssertionError, match="block 1 is cached for other tokens"):
        owner.cache.insert(ids("bbbb"), [1])
    owner.cache.clear()


# -- cursors ----------------------------------------------------------------------------------


class CountedList(list):
    """Counts the tokens that are read from it."""

    read = 0

    def __getitem__(self, key):
        got = super().__getitem__(key)
        CountedList.read += len(got) if isinstance(key, slice) else 1
        return got


def test_with_a_cursor_only_the_new_tokens_are_read():
    owner = Owner(num_blocks=1000)
    tokens, table = CountedList(range(4000)), owner.pool.allocate(999)
    cursor = owner.cache.insert(tokens, table, num_blocks=900).cursor
    CountedList.read = 0
    for count in range(901, 951):
        cursor = owner.cache.insert(tokens, table, cursor, num_blocks=count).cursor
        assert cursor == count
    assert CountedList.read <= 50 * 4 * 2
    owner.match("".join(map(chr, tokens[:3700])))  # parts the leaf: the next blocks start a new one
    CountedList.read = 0
    assert owner.cache.insert(tokens, table, cursor, num_blocks=951).cursor == 951
    assert CountedList.read <= 8
    assert [len(child["block_ids"]) for child in owner.cache.snapshot()[0]["children"]] == [925]
    owner.cache.check_invariants()


def test_a_growing_sequence_stays_one_node_until_somebody_matches_it(owner):
    table = owner.pool.allocate(4)
    cursor = 0
    for count in (1, 2, 3):
        cursor = owner.insert("aaaabbbbcccc"[: 4 * count], table[:count], cursor).cursor
    assert owner.shape() == [[None, [["aaaabbbbcccc", [1, 2, 3], []]]]]
    owner.match("aaaabbbbcccc")
    owner.insert("aaaabbbbccccdddd", table, cursor)
    assert owner.shape() == [[None, [["aaaabbbbcccc", [1, 2, 3], [["dddd", [4], []]]]]]]


@pytest.mark.parametrize("cursor", [1, 2, 3])
def test_a_cursor_survives_splits_before_at_and_after_it(owner, cursor):
    table = owner.start("aaaabbbbcccc")
    for other in ("aaaabbbbzzzz", "aaaayyyy"):
        owner.run(other)
    assert owner.shape()[0][1][0][:2] == ["aaaa", [1]]
    table += owner.pool.allocate(1)
    assert table == [1, 2, 3, 6]
    assert owner.insert("aaaabbbbccccdddd", table, cursor) == InsertResult(4, ())
    assert owner.match("aaaabbbbccccdddd").block_ids == (1, 2, 3, 6)


def test_a_cursor_inside_a_node_meets_what_others_have_added_behind_it(owner):
    mine = owner.start("aaaa")
    owner.run("aaaabbbbcccc")
    mine += owner.pool.allocate(2)
    assert mine == [1, 4, 5]
    assert owner.insert("aaaabbbbxxxx", mine, 1) == InsertResult(3, (Replacement(1, 2),))
    assert mine == [1, 2, 5]
    assert owner.match("aaaabbbbxxxx").block_ids == (1, 2, 5)
    assert owner.match("aaaabbbbcccc").block_ids == (1, 2, 3)


def test_a_cursor_that_is_already_far_enough_adds_nothing(owner):
    table = owner.start("aaaabbbb")
    shape = owner.shape()
    assert owner.cache.insert(ids("aaaabbbb"), table, 2) == InsertResult(2, ())
    assert owner.cache.insert(ids("aaaa"), table[:1], 2) == InsertResult(1, ())
    assert owner.shape() == shape


def test_a_cursor_from_before_a_clear_starts_over(owner):
    table = owner.start("aaaabbbb")
    assert owner.cache.clear() == []
    assert owner.insert("aaaabbbb", table, 2) == InsertResult(2, ())
    assert owner.match("aaaabbbb").block_ids == (1, 2)
    assert owner.cache.clear() == []
    table += owner.pool.allocate(1)
    assert owner.insert("aaaabbbbcccc", table, 2) == InsertResult(3, ())
    assert owner.shape() == [[None, [["aaaabbbbcccc", [1, 2, 3], []]]]]


def test_a_cursor_from_before_a_clear_accepts_what_others_cached_since(owner):
    table = owner.start("aaaabbbb")
    owner.cache.clear()
    owner.run("aaaacccc")  # block 3 holds "aaaa" now
    assert owner.insert("aaaabbbb", table, 1) == InsertResult(2, (Replacement(0, 3),))
    assert table == [3, 2]
    assert owner.counts() == (7, 3, 1)


# -- duplicates -------------------------------------------------------------------------------


def test_the_second_to_compute_the_same_tokens_is_told_to_use_the_first_ones_blocks(owner):
    first, second = owner.pool.allocate(2), owner.pool.allocate(3)
    owner.insert("aaaabbbb", first)
    result = owner.insert("aaaabbbbcccc", second)
    assert result == InsertResult(3, (Replacement(0, 1), Replacement(1, 2)))
    assert second == [1, 2, 5]
    assert [owner.pool.references(block) for block in (1, 2, 3, 4, 5)] == [2, 2, 0, 0, 1]
    assert [owner.cache.contains(block) for block in (1, 2, 3, 4, 5)] == [True, True, False, False, True]
    assert owner.counts() == (7, 3, 0)
    owner.drop(*first)
    assert owner.counts() == (7, 3, 0)
    owner.drop(*second)
    assert owner.counts() == (7, 3, 3)


def test_eight_copies_of_one_prompt_leave_one_chain(owner):
    tables = [owner.pool.allocate(1) for _ in range(8)]
    for table in tables:
        owner.insert("aaaa", table)
    assert tables == [[1]] * 8
    assert owner.pool.references(1) == 8
    assert owner.counts() == (9, 1, 0)
    owner.drop(1)  # the one who computed it
    assert owner.match("aaaa").block_ids == (1,)


def test_a_block_enters_the_cache_only_while_one_table_has_it(owner):
    owner.start("aaaa")
    mine = owner.pool.allocate(3)
    fork = mine[:2]
    owner.hold_uncached(*fork)
    assert owner.insert("aaaabbbbcccc", mine) == InsertResult(1, (Replacement(0, 1),))
    assert mine == [1, 3, 4] and fork == [2, 3]  # were 3 cached, `fork` would hold it without holding 1
    assert owner.insert("aaaabbbbcccc", mine, 1) == InsertResult(1, ())
    owner.cache.check_invariants()
    owner.drop(*fork)
    assert owner.insert("aaaabbbbcccc", mine, 1) == InsertResult(3, ())
    assert owner.shape() == [[None, [["aaaabbbbcccc", [1, 3, 4], []]]]]


def test_a_sequence_of_shared_blocks_alone_leaves_no_trace(owner):
    table = owner.pool.allocate(2)
    owner.hold_uncached(*table)
    assert owner.insert("aaaabbbb", table, salt="salt") == InsertResult(0, ())
    assert owner.cache.snapshot() == []


# -- salts ------------------------------------------------------------------------------------


def test_requests_of_different_salts_share_nothing(owner):
    owner.run("aaaabbbb", "one")
    assert owner.match("aaaabbbb") == PrefixMatch((), None, 0)
    assert owner.match("aaaabbbb", salt="") == PrefixMatch((), None, 0)
    assert owner.match("aaaabbbb", salt="two") == PrefixMatch((), None, 0)
    assert owner.run("aaaabbbb") == [3, 4]
    assert owner.run("aaaabbbb", "two") == [5, 6]
    assert owner.match("aaaabbbb", salt="one").block_ids == (1, 2)
    assert owner.evict(10) == [4, 3, 6, 5, 2, 1]
    assert owner.cache.snapshot() == []  # nothing is kept of a salt without blocks


def test_salts_take_part_in_one_order_of_eviction(owner):
    owner.run("aaaa", "one")
    owner.run("bbbb")
    owner.run("cccc", "two")
    owner.match("aaaa", salt="one")
    assert owner.evict(3) == [2, 3, 1]


# -- eviction ---------------------------------------------------------------------------------


def test_a_leaf_goes_block_by_block_from_its_end(owner):
    owner.run("aaaabbbbcccc")
    assert owner.evict(1) == [3]
    assert owner.shape() == [[None, [["aaaabbbb", [1, 2], []]]]]
    assert owner.match("aaaabbbbcccc") == PrefixMatch((1, 2), None, 8)
    assert owner.evict(1) == [2]
    assert owner.evict(1) == [1]
    assert owner.evict(1) == []
    assert owner.counts() == (10, 0, 0)
    assert owner.cache.num_evicted == 3


def test_blocks_that_were_evicted_are_found_no_more(owner):
    table = owner.run("aaaabbbb")
    owner.evict(2)
    assert owner.run("xxxxyyyy") == [1, 2]
    assert sorted(table) == [1, 2]
    assert owner.match("aaaabbbb") == PrefixMatch((), None, 0)


def test_a_shared_trunk_goes_last(owner):
    owner.run("aaaabbbb")
    owner.run("aaaacccc")
    owner.run("dddd")
    assert owner.evict(2) == [2, 3]
    assert owner.shape() == [[None, [["aaaa", [1], []], ["dddd", [4], []]]]]
    assert owner.evict(2) == [1, 4]


def test_a_leaf_that_was_a_trunk_for_a_while_is_queued_once(owner):
    owner.run("aaaa")
    owner.run("aaaabbbb")
    assert owner.evict(1) == [2]
    assert len(owner.cache._queue) == 1
    held = owner.start("aaaa")
    assert owner.evict(1) == []
    assert len(owner.cache._queue) == 0
    owner.drop(*held)
    assert owner.evict(1) == [1]


def test_referenced_blocks_stay_and_those_behind_them_go(owner):
    owner.run("aaaabbbbcccc")
    owner.hold(1, 2)
    assert owner.counts() == (7, 3, 1)
    assert owner.evict(5) == [3]
    assert owner.evict(5) == []
    owner.drop(1, 2)
    assert owner.evict(5) == [2, 1]


def test_fewer_blocks_than_asked_for_are_evicted_only_if_there_are_no_more(owner):
    owner.run("aaaabbbb")
    held = owner.start("aaaacccc")
    assert held == [1, 3]
    owner.run("dddd")
    assert owner.counts() == (6, 4, 2)
    assert owner.evict(0) == []
    assert owner.evict(-1) == []
    assert owner.evict(9) == [2, 4]
    assert owner.counts() == (8, 2, 0)


def test_lru_evicts_what_was_matched_longest_ago(owner):
    for text in ("aaaa", "bbbb", "cccc", "dddd"):
        owner.run(text)
    owner.match("bbbb")
    owner.match("aaax")  # a source of a copy is used, too
    assert owner.evict(4) == [3, 4, 2, 1]


def test_lru_counts_blocks_in_use_as_used_until_they_are_released(owner):
    long = owner.start("aaaabbbb")
    for text in ("cccc", "dddd"):
        owner.run(text)
    owner.drop(*long)
    assert owner.evict(4) == [3, 4, 2, 1]


def test_lru_keeps_what_a_longer_sequence_was_built_on(owner):
    table = owner.start("aaaa")
    owner.run("bbbb")
    table += owner.pool.allocate(1)
    owner.match("aaaa")
    owner.insert("aaaacccc", table, 1)
    assert owner.shape()[0][1][0] == ["aaaa", [1], [["cccc", [3], []]]]
    owner.run("dddd")
    owner.drop(*table)
    assert owner.evict(1) == [2]
    owner.run("eeee")  # takes block 2
    assert owner.evict(4) == [4, 3, 1, 2]


def test_a_match_makes_recent_what_it_found_and_not_what_follows(owner):
    owner.run("aaaabbbbcccc")
    owner.run("dddd")
    owner.match("aaaaxxxx")
    assert owner.shape()[0][1][0] == ["aaaa", [1], [["bbbbcccc", [2, 3], []]]]
    assert owner.evict(4) == [3, 2, 4, 1]


def test_a_prompt_matched_but_for_its_last_token_is_not_parted(owner):
    owner.run("aaaabbbb")
    assert owner.match("aaaabbbb", 7) == PrefixMatch((1,), PartialMatch(2, 3), 7)
    assert owner.shape() == [[None, [["aaaabbbb", [1, 2], []]]]]


def test_lfu_evicts_what_was_matched_least_and_then_what_was_used_longest_ago():
    owner = Owner("lfu")
    for text in ("aaaa", "bbbb", "cccc", "dddd"):
        owner.run(text)
    for text in ("bbbb", "bbbb", "aaaa", "dddd", "bbbb", "aaaa", "aaaa"):
        owner.match(text)
    owner.match("dddd")
    assert owner.evict(4) == [3, 4, 2, 1]


def test_lfu_does_not_credit_new_blocks_with_the_hits_of_those_before_them():
    owner = Owner("lfu")
    owner.run("aaaa")
    for _ in range(5):
        owner.match("aaaa")
    owner.run("bbbb")
    owner.match("bbbb")
    owner.run("aaaacccc")
    assert owner.evict(3) == [3, 2, 1]


def test_fifo_evicts_what_was_inserted_first_however_much_it_is_used():
    owner = Owner("fifo")
    for text in ("aaaa", "bbbb", "cccc"):
        owner.run(text)
    for _ in range(3):
        owner.match("aaaa")
    owner.hold(1)
    owner.drop(1)
    assert owner.evict(3) == [1, 2, 3]


def test_fifo_keeps_a_trunk_for_the_sake_of_its_last_branch():
    owner = Owner("fifo")
    owner.run("aaaabbbb")
    owner.run("cccc")
    owner.run("aaaadddd")
    assert owner.evict(5) == [2, 3, 4, 1]


def test_fifo_remembers_the_age_of_a_trunk_that_was_parted():
    owner = Owner("fifo")
    owner.run("aaaabbbb")
    held = owner.start("cccc")
    owner.run("aaaadddd")
    assert owner.evict(2) == [2, 4]
    owner.drop(*held)
    assert owner.evict(2) == [1, 3]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_the_queue_stays_small_through_thousands_of_unique_requests(policy):
    owner = Owner(policy, num_blocks=64)
    largest = 0
    for i in range(10_000):
        if owner.pool.num_free < 2:
            owner.evict(2 - owner.pool.num_free)
        found = owner.cache.match([i] * 8, 7)
        assert found.num_tokens == 0
        table = owner.pool.allocate(2)
        owner.cache.insert([i] * 8, table, found.cursor, salt=str(i) if i % 3 == 0 else None)
        owner.drop(*table)
        largest = max(largest, len(owner.cache._queue))
    assert largest <= 32 and len(owner.cache._roots) <= 33
    assert owner.counts() == (0, 64, 64)
    assert owner.cache.num_evicted == 2 * 10_000 - 64
    owner.cache.check_invariants()


# -- the rest ---------------------------------------------------------------------------------


def test_clearing_returns_the_unused_blocks_and_forgets_those_in_use(owner):
    owner.run("aaaabbbb")
    owner.run("cccc", "salt")
    held = owner.start("aaaadddd")
    assert held == [1, 4]
    freed = owner.cache.clear()
    assert sorted(freed) == [2, 3]
    owner.pool.free(freed)
    assert owner.counts() == (8, 0, 0)
    assert owner.match("aaaabbbb") == PrefixMatch((), None, 0)
    assert owner.evict(5) == []
    owner.drop(*held)
    assert owner.counts() == (10, 0, 0)
    assert owner.cache.num_evicted == 0


def test_a_snapshot_is_plain_data_and_a_copy(owner):
    owner.run("abcdefgh")
    held = owner.start("abcdijkl")
    assert held == [1, 3]
    snapshot = owner.cache.snapshot()
    (root,) = json.loads(json.dumps(snapshot))
    (trunk,) = root["children"]
    assert root["salt"] is None
    assert (trunk["start"], trunk["block_ids"], trunk["references"], trunk["hits"]) == (0, [1], [1], 1)
    assert [(c["start"], c["token_ids"], c["references"]) for c in trunk["children"]] == [
        (4, ids("efgh"), [0]),
        (4, ids("ijkl"), [1]),
    ]
    assert trunk["last_access"] > trunk["children"][0]["last_access"]
    snapshot[0]["children"][0]["token_ids"].clear()
    assert owner.match("abcd").block_ids == (1,)


def test_a_chain_of_thousands_of_nodes_is_no_deeper_than_python_can_go():
    owner = Owner(num_blocks=1500, block_size=1)
    text = "a" * 1500
    table = owner.start(text)
    for limit in range(1499, 0, -1):
        owner.match(text, limit)
    assert len(list(owner.cache._nodes())) == 1501
    assert owner.match(text).block_ids == tuple(table)
    owner.cache.check_invariants()
    assert len(owner.cache.snapshot()) == 1
    owner.drop(*table)
    assert owner.evict(1500) == table[::-1]


def test_results_cannot_be_changed(owner):
    with pytest.raises(dataclasses.FrozenInstanceError):
        owner.match("aaaa").num_tokens = 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache, node: node.token_ids.pop(),
        lambda cache, node: node.block_ids.append(9),
        lambda cache, node: node.keys.reverse(),
        lambda cache, node: node.children.reverse(),
        lambda cache, node: setattr(node.children[0], "start", 0),
        lambda cache, node: node.children[0].children.append(node),
        lambda cache, node: cache._node_of.pop(1),
        lambda cache, node: setattr(cache, "num_evictable", 2),
        lambda cache, node: cache.pool.incref(2),
        lambda cache, node: cache.pool.free([2]),
        lambda cache, node: cache._queue._heap.pop(),
        lambda cache, node: cache._queue._heap.append(cache._queue._heap[0]),
        lambda cache, node: setattr(node.children[1], "hits", 9),
    ],
)
def test_damage_is_noticed(damage):
    owner = Owner()
    owner.run("aaaabbbb")
    owner.run("aaaacccc")
    owner.cache.check_invariants()
    damage(owner.cache, owner.cache._roots[None].children[0])
    with pytest.raises((AssertionError, IndexError)):
        owner.cache.check_invariants()


def test_the_factory_makes_what_is_asked_for_and_refuses_what_it_does_not_know():
    pool = BlockPool(3)
    assert type(make_prefix_cache("radix", pool, 4)) is RadixCache
    assert make_prefix_cache("hash", pool, 4, "lfu").policy == "lfu"
    assert make_prefix_cache("off", pool, 4) is None
    with pytest.raises(ValueError, match="kind='tree' must be one of"):
        make_prefix_cache("tree", pool, 4)
    with pytest.raises(ValueError, match="policy='mru' must be one of"):
        make_prefix_cache("off", pool, 4, "mru")
