"""Ownership of blocks on a small pool: exact ids, references and counts."""

from __future__ import annotations

import pytest

from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.kv_manager import BlockCopy, KVManager


def request_of(name: str, tokens: list[int], **changes) -> Request:
    return Request(name, tokens, SamplingParams(), **changes)


def compute(kv: KVManager, request: Request, count: int | None = None) -> None:
    """Books the request's next tokens, as a scheduler would."""
    end = request.num_tokens if count is None else request.num_scheduled + count
    assert kv.extend(request, end)
    request.num_scheduled = end


@pytest.fixture
def kv() -> KVManager:
    return KVManager(10, 4, prefix_cache="radix")


def test_a_block_is_copied_before_anything_is_appended_to_what_is_shared_in_part(kv):
    first = request_of("a", list(range(10)))
    assert kv.acquire(first, 0)
    compute(kv, first)
    assert first.block_ids == [1, 2, 3]
    kv.release(first)
    second = request_of("b", [0, 1, 2, 3, 4, 5, 99, 98])
    kv.unpin()
    assert kv.acquire(second, 0)
    assert second.block_ids == [1, 3] and second.num_scheduled == 6
    assert kv.take_copies() == (BlockCopy(2, 3),)
    assert kv.pool.references(2) == 1  # the source, until the step is dispatched
    kv.check_invariants([second])
    kv.unpin()
    assert kv.pool.references(2) == 0
    kv.check_invariants([second])


def test_a_request_that_goes_before_its_copy_was_dispatched_takes_the_copy_along(kv):
    first = request_of("a", list(range(10)))
    assert kv.acquire(first, 0)
    compute(kv, first)
    kv.release(first)
    second = request_of("b", [0, 1, 2, 3, 4, 5, 99, 98])
    assert kv.acquire(second, 0)
    kv.release(second)
    assert kv.take_copies() == ()
    kv.check_invariants([])
    assert kv.num_available == 8  # the source and its prefix are pinned
    assert kv.extend(request_of("c", [7] * 32), 32)


def test_the_source_of_a_copy_is_given_up_where_it_is_all_that_is_left():
    kv = KVManager(3, 4, prefix_cache="radix")
    first = request_of("a", list(range(12)))
    assert kv.acquire(first, 0)
    compute(kv, first)
    kv.release(first)
    second = request_of("b", [0, 1, 2, 3, 4, 5, 99, 98, 97, 96, 95, 94])
    assert kv.acquire(second, 0)
    assert second.num_scheduled == 4 and kv.take_copies() == ()
    compute(kv, second)
    kv.check_invariants([second])


def test_a_duplicate_is_freed_and_the_table_repointed(kv):
    one, two = request_of("a", list(range(9))), request_of("b", list(range(9)))
    for request in (one, two):
        assert kv.acquire(request, 0)
        compute(kv, request)
        request.table_changed = len(request.block_ids)
    assert (one.block_ids, two.block_ids) == ([1, 2, 3], [4, 5, 6])
    kv.commit(one)
    kv.commit(two)
    assert two.block_ids == [1, 2, 6] and two.table_changed == 0
    assert [kv.pool.references(block) for block in range(1, 7)] == [2, 2, 1, 0, 0, 1]
    assert kv.pool.num_free == 6
    kv.check_invariants([one, two])


def test_admission_counts_what_others_were_promised(kv):
    assert not kv.acquire(request_of("a", [1] * 20), 6)
    assert kv.acquire(request_of("b", [1] * 16), 6)


def test_a_fork_shares_full_blocks_and_copies_the_last(kv):
    parent = request_of("a", list(range(10)))
    assert kv.acquire(parent, 0)
    compute(kv, parent)
    parent.status = parent.status.RUNNING
    parent.token_ids.append(10)
    child = request_of("b", list(range(11)))
    child.fork_parent = parent
    assert kv.acquire(child, 0)
    assert child.block_ids == [1, 2, 4] and child.num_scheduled == 10
    assert kv.take_copies() == (BlockCopy(3, 4),)
    kv.check_invariants([parent, child])
    kv.release(parent)
    kv.check_invariants([child])
    kv.unpin()
    kv.release(child)
    kv.check_invariants([])
    assert kv.num_active == 0 and kv.num_evictable == 2


def test_nothing_is_kept_of_a_request_that_failed(kv):
    request = request_of("a", list(range(10)))
    assert kv.acquire(request, 0)
    compute(kv, request)
    kv.release(request, keep=False)
    assert kv.pool.num_free == 10


def test_clearing_frees_what_is_unused_and_leaves_what_runs(kv):
    one, two = request_of("a", list(range(9))), request_of("b", list(range(20, 29)))
    for request in (one, two):
        assert kv.acquire(request, 0)
        compute(kv, request)
        kv.commit(request)
    kv.release(one)
    kv.clear_cache()
    assert kv.num_evictable == 0 and kv.pool.num_free == 7
    kv.check_invariants([two])
    assert kv.num_cached_tokens(request_of("c", list(range(20, 29)))) == 0
