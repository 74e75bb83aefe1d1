"""Who owns which KV block: the one place that knows the pool, the tables and what is cached.

Every block is free, cached (unreferenced, evictable) or active (referenced); the three always add
up to the pool. Capacity trouble is a `None` or `False`; corruption is an `AssertionError`.

A request's table, in half-open token intervals, with m the tokens it found at admission and P the
block size:

  [0, m // P * P)          blocks of others, referenced as they are
  [m // P * P, m)          a block of its own, copied from the cached one that agrees so far
  [m, num_scheduled)       blocks of its own, written by steps; full ones become cached
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from jpaged.request import Request, RequestStatus
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.prefix_cache import CacheKind, EvictionPolicy, PartialMatch, make_prefix_cache


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block that is copied, in every layer, before the step writes anything."""

    source: int
    target: int


@dataclasses.dataclass(slots=True)
class KVStats:
    """Counts since the start, in tokens and blocks."""

    queried_tokens: int = 0  # of requests that were looked up in the prefix cache at admission
    hit_tokens: int = 0  # of those, found
    copies: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """Blocks that a request may start from."""

    block_ids: Sequence[int]
    partial: PartialMatch | None
    num_committed: int  # of the blocks, known to the cache


class KVManager:
    """Hands out KV blocks to requests, new ones and those that are cached.

    `request.block_ids[i]` holds the tokens `[i * block_size, (i + 1) * block_size)`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: CacheKind = "off",
        eviction_policy: EvictionPolicy = "lru",
    ):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = make_prefix_cache(prefix_cache, self.pool, block_size, eviction_policy)
        self.stats = KVStats()
        self._copies: dict[str, BlockCopy] = {}  # of the step that is being planned
        self._pinned: list[int] = []  # sources of its copies and their prefixes, until it is dispatched

    # -- counts -------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody uses."""
        return self.cache.num_evictable if self.cache else 0

    @property
    def num_available(self) -> int:
        """Blocks that could be allocated now."""
        return self.pool.num_free + self.num_evictable

    @property
    def num_active(self) -> int:
        """Blocks that some sequence uses."""
        return self.pool.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    # -- a request's life ---------------------------------------------------------------------

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens that `acquire` would find. Changes nothing; valid until the next change."""
        if self.cache is None or _computes_all(request):
            return 0
        return self.cache.peek(request.token_ids, request.num_tokens - 1, request.cache_salt)

    def acquire(self, request: Request, promised: int) -> bool:
        """Admits a request that owns nothing, if all its known tokens fit; `False` changes nothing.

        It starts from what is cached of its tokens, all but the last at most, or from the blocks of
        the request it was forked from. `num_scheduled` says how many it found.

        Args:
          promised: available blocks that earlier admissions still need for their known tokens.
        """
        assert not request.block_ids and request.num_scheduled == 0
        found = self._find(request)
        partial = found.partial
        self._reference(found.block_ids)
        missing = self.blocks_for(request.num_tokens) - len(found.block_ids)
        if partial is not None:
            self._reference([partial.block_id])
            if missing > self.num_available - promised:  # the source itself may be what is missing
                self._dereference([partial.block_id])
                partial = None
        if missing > self.num_available - promised:
            self._dereference(found.block_ids)
            return False
        request.block_ids.extend(found.block_ids)
        request.num_committed = found.num_committed
        request.num_scheduled = len(found.block_ids) * self.block_size
        if partial is not None:
            self._copy(request, partial)
        self._count_hits(request)
        request.fork_parent = None
        return True

    def _find(self, request: Request) -> _Found:
        parent = request.fork_parent
        if parent is not None and self._can_share(parent):
            self.commit(parent)
            count, rest = divmod(min(parent.num_scheduled, request.num_tokens - 1), self.block_size)
            if self.cache is not None and count > parent.num_committed:
                count, rest = parent.num_committed, 0  # tables share what is cached only
            partial = PartialMatch(parent.block_ids[count], rest) if rest else None
            return _Found(parent.block_ids[:count], partial, min(count, parent.num_committed))
        if self.cache is None or _computes_all(request):
            return _Found((), None, 0)
        match = self.cache.match(request.token_ids, request.num_tokens - 1, request.cache_salt)
        return _Found(match.block_ids, match.partial, match.cursor)

    def _can_share(self, parent: Request) -> bool:
        """Whether the parent's blocks hold what they should by the time a copy of this step reads them."""
        return parent.status is RequestStatus.RUNNING and parent.request_id not in self._copies

    def _copy(self, request: Request, partial: PartialMatch) -> None:
        """Gives the request a copy of a block that it agrees with in part; the source is pinned."""
        blocks = self._allocate(1)
        assert blocks is not None, "the caller has made sure that it fits"
        target = blocks[0]
        request.block_ids.append(target)
        request.num_scheduled += partial.num_tokens
        self._copies[request.request_id] = BlockCopy(partial.block_id, target)
        # What comes before the source is pinned with it: who references a block references its prefix.
        chain = [*request.block_ids[:-1], partial.block_id]
        self._reference(chain[:-1])
        self._pinned += chain
        self.stats.copies += 1

    def _count_hits(self, request: Request) -> None:
        if self.cache is None or request.num_preemptions or request.fork_parent is not None:
            return
        request.num_cached_tokens = request.num_scheduled
        self.stats.queried_tokens += request.num_tokens
        self.stats.hit_tokens += request.num_scheduled

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Grows the request's table to hold `num_tokens` tokens; `False` changes nothing."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        blocks = self._allocate(missing)
        if blocks is None:
            return False
        request.block_ids.extend(blocks)
        return True

    def commit(self, request: Request) -> None:
        """Caches the request's full blocks: those whose ids are known and that were dispatched.

        Where the same tokens are cached in another block, the table is repointed to it and the
        duplicate is freed: `request.table_changed` says from where on.
        """
        if self.cache is None:
            return
        count = min(request.num_scheduled, len(request.token_ids)) // self.block_size
        if count <= request.num_committed:
            return
        result = self.cache.insert(
            request.token_ids,
            request.block_ids,
            request.num_committed,
            request.cache_salt,
            num_blocks=count,
        )
        request.num_committed = result.cursor
        for replacement in result.replaced:
            duplicate = request.block_ids[replacement.index]
            request.block_ids[replacement.index] = replacement.block_id
            request.table_changed = min(request.table_changed, replacement.index)
            self._reference([replacement.block_id])
            self._dereference([duplicate])

    def commit_all(self, requests: Iterable[Request]) -> None:
        """Commits each of the requests; most have no new full block, which costs little to see."""
        if self.cache is None:
            return
        size = self.block_size
        for request in requests:
            if request.num_scheduled >= (request.num_committed + 1) * size:
                self.commit(request)

    def release(self, request: Request, *, keep: bool = True) -> None:
        """Takes everything back from a request that finished, was aborted or preempted.

        Args:
          keep: whether its full blocks stay cached, as far as they are.
        """
        if keep:
            self.commit(request)
        self._copies.pop(request.request_id, None)
        self._dereference(request.block_ids)
        request.block_ids.clear()
        request.num_scheduled = request.num_committed = 0

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies of the step that is being planned, which is now complete."""
        copies = tuple(self._copies.values())
        self._copies.clear()
        return copies

    def unpin(self) -> None:
        """All planned steps have been dispatched: the sources of their copies may go."""
        self._dereference(self._pinned)
        self._pinned = []

    def clear_cache(self) -> None:
        """Forgets all cached prefixes."""
        if self.cache is not None:
            self.pool.free(self.cache.clear())

    # -- references ---------------------------------------------------------------------------

    def _allocate(self, count: int) -> list[int] | None:
        missing = count - self.pool.num_free
        if missing > 0:
            if missing > self.num_evictable:
                return None
            assert self.cache is not None
            self.pool.free(self.cache.evict(missing))
        return self.pool.allocate(count)

    def _reference(self, blocks: Iterable[int]) -> None:
        cache = self.cache
        first = [block for block in blocks if self.pool.incref(block) == 1]
        if cache is not None:
            cache.referenced(first)

    def _dereference(self, blocks: Iterable[int]) -> None:
        cache = self.cache
        dropped = [block for block in blocks if self.pool.decref(block) == 0]
        if cache is None:
            self.pool.free(reversed(dropped))
            return
        self.pool.free([block for block in reversed(dropped) if not cache.contains(block)])
        cache.unreferenced([block for block in dropped if cache.contains(block)])

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Walks pool, cache and tables; `requests` are all that may own blocks."""
        requests = list(requests)
        free = self.pool.free_blocks()
        used = Counter(block for request in requests for block in request.block_ids)
        used.update(self._pinned)
        cached = {b for b in range(1, self.pool.num_blocks + 1) if self.cache and self.cache.contains(b)}
        assert len(set(free)) == len(free), "a block is twice on the free list"
        assert not set(free) & used.keys(), "a free block is in a table"
        assert not set(free) & cached, "a free block is cached"
        assert 0 not in used, "the null block is in a table"
        for block in range(1, self.pool.num_blocks + 1):
            assert self.pool.references(block) == used[block], f"block {block}: wrong reference count"
        evictable = cached - used.keys()
        assert len(evictable) == self.num_evictable
        assert len(free) + len(evictable) + len(used) == self.pool.num_blocks, "blocks were lost"
        for request in requests:
            assert len(set(request.block_ids)) == len(request.block_ids)
            assert request.num_committed <= len(request.block_ids)
        if self.cache is not None:
            self.cache.check_invariants()


def _computes_all(request: Request) -> bool:
    """Whether the prompt must be computed, cached or not: its log-probabilities are asked for."""
    return request.params.prompt_logprobs is not None
