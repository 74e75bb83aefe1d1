"""What every prefix cache has in common: its interface, its results, and the order of eviction.

A prefix cache knows which blocks hold the KV of which tokens. It owns no block: it never allocates,
never frees and never counts references (it reads them from the pool). Its owner keeps three promises.

1. Whoever references a cached block references all blocks before it, too: who holds blocks, a copy's
   source included, holds them as a table from the first.
2. The owner says when a cached block gets its first reference or loses its last (`referenced`,
   `unreferenced`).
3. It repoints a table as `insert` says before anything else happens to the cache.

So the unreferenced cached blocks can all be evicted, by taking the last block of some prefix each time.
A block enters the cache while it is in one table only; the first promise is then kept for it, even if
blocks before it are found to be duplicates and repointed.

How the prefixes are stored is the business of `radix_cache` (token by token, after Zheng et al. 2024,
"SGLang") and `hash_cache` (block by block, after the automatic prefix caching of vLLM). The blocks
are those of Kwon et al. 2023, "PagedAttention".
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

from jpaged.scheduling.block_pool import BlockPool

CacheKind = Literal["radix", "hash", "off"]
EvictionPolicy = Literal["lru", "lfu", "fifo"]


@dataclasses.dataclass(frozen=True, slots=True)
class PartialMatch:
    """A cached block whose first `num_tokens` tokens, but not all, are the ones looked for."""

    block_id: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a sequence.

    Attributes:
      block_ids: blocks that may stand in the sequence's table as they are.
      partial: the block after them, to be copied before anything is appended to it.
      num_tokens: tokens in both.
    """

    block_ids: tuple[int, ...]
    partial: PartialMatch | None
    num_tokens: int

    @property
    def cursor(self) -> int:
        """Where `insert` may go on, for a table that starts with `block_ids`."""
        return len(self.block_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class Replacement:
    """Entry `index` of the table should name `block_id`, which was cached first for the same tokens."""

    index: int
    block_id: int


class InsertResult(NamedTuple):
    """What an insert found.

    Attributes:
      cursor: how many leading blocks of the table, once repointed, are cached. Fewer than were given
        if a block was not cached and several tables share it.
      replaced: the duplicates, in the order of the table.
    """

    cursor: int
    replaced: tuple[Replacement, ...]


class PrefixCache(Protocol):
    """Finds, keeps and gives up cached prefixes. See the module for what the owner promises."""

    block_size: int
    num_evictable: int  # cached blocks without references; `evict` can take exactly so many
    num_evicted: int  # since the start

    @property
    def num_cached(self) -> int:
        """Blocks in the cache, referenced or not."""
        ...

    def contains(self, block_id: int) -> bool:
        """Whether the block is cached. Changes nothing."""
        ...

    def match(self, token_ids: Sequence[int], limit: int, salt: str | None = None) -> PrefixMatch:
        """Returns the longest cached prefix of `token_ids[:limit]` among those of the same salt.

        Counts as a use of what it finds, and changes nothing else that can be seen. The answer holds
        until the next `insert`, `evict` or `clear`, and afterwards for as long as its blocks are
        referenced.
        """
        ...

    def peek(self, token_ids: Sequence[int], limit: int, salt: str | None = None) -> int:
        """Returns how many tokens `match` would find. Changes nothing and is no use of them."""
        ...

    def insert(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        cursor: int = 0,
        salt: str | None = None,
        *,
        num_blocks: int | None = None,
    ) -> InsertResult:
        """Caches the blocks of a sequence, which are full and will not be written again.

        Blocks that are not cached yet become so, up to the first that is shared with another table:
        to keep all, insert a table before sharing it. Where another block is cached for the same
        tokens, the result names it; the owner repoints its table, references that block and gives up
        its own, which does not become cached. The result holds until the next `evict` or `clear`.

        Args:
          token_ids: tokens from the start of the sequence.
          block_ids: the sequence's table, whose blocks the owner references: entry `i` holds tokens
            `[i, i + 1) * block_size`.
          cursor: as returned for this table before, if the table has been repointed and has
            referenced its blocks ever since. The work is then proportional to the blocks after it.
            A cursor from before a `clear` is harmless.
          num_blocks: how many blocks to cache. By default all of `block_ids`, which `token_ids`
            must then fill exactly; given it, both may be longer, and need not be copied to be cut.
        """
        ...

    def referenced(self, block_ids: Iterable[int]) -> None:
        """Takes note that these cached blocks, each named once, have got their first reference."""
        ...

    def unreferenced(self, block_ids: Iterable[int]) -> None:
        """Takes note that these cached blocks, each named once, have lost their last reference.

        Being in use until now, they count as used now.
        """
        ...

    def evict(self, count: int) -> list[int]:
        """Forgets up to `count` unreferenced blocks and returns them; the owner frees them.

        Fewer are returned only if `num_evictable` is smaller. No block goes before those after it.
        """
        ...

    def clear(self) -> list[int]:
        """Forgets everything and returns the unreferenced blocks; the owner frees them.

        Blocks in use are merely no longer cached: they are freed when their last reference is
        dropped, unless they are inserted again.
        """
        ...

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns a copy of what is cached as plain data, for drawing: one entry per salt."""
        ...

    def check_invariants(self) -> None:
        """Proves by a full walk that structure and counts agree; for tests."""
        ...


def make_prefix_cache(
    kind: CacheKind, pool: BlockPool, block_size: int, policy: EvictionPolicy = "lru"
) -> PrefixCache | None:
    """Returns a new, empty cache for the blocks of `pool`, or `None` if `kind` is "off".

    Raises:
      ValueError: `kind` or `policy` is unknown.
    """
    from jpaged.scheduling.hash_cache import HashCache  # both import this module
    from jpaged.scheduling.radix_cache import RadixCache

    if kind not in get_args(CacheKind):
        raise ValueError(f"{kind=} must be one of {get_args(CacheKind)}")
    if policy not in get_args(EvictionPolicy):
        raise ValueError(f"{policy=} must be one of {get_args(EvictionPolicy)}")
    if kind == "off":
        return None
    return (RadixCache if kind == "radix" else HashCache)(pool, block_size, policy)


class Usage:
    """How something cached has been used: what eviction goes by. Times are of a logical clock."""

    __slots__ = ("created", "hits", "last_access", "queued")

    def __init__(self, now: int):
        self.created = now
        self.last_access = now
        self.hits = 0  # matches that found it
        self.queued = False


NodeT = TypeVar("NodeT", bound=Usage)


class EvictionQueue(Generic[NodeT]):
    """Nodes by how soon they should go: a heap that is put right only where it is looked at.

    A node is queued at most once, so the heap is never larger than the cache. What a policy orders by
    never decreases; an entry that has become out of date is thus too early, and is moved back when it
    comes up. Policies: "lru" by last access, "lfu" by hits and then last access, "fifo" by creation.
    """

    _PRIORITIES: dict[str, Callable[[Usage], Any]] = {
        "lru": operator.attrgetter("last_access"),
        "lfu": operator.attrgetter("hits", "last_access"),
        "fifo": operator.attrgetter("created"),
    }

    def __init__(self, policy: EvictionPolicy):
        self._priority = self._PRIORITIES[policy]
        self._heap: list[tuple[Any, int, NodeT]] = []
        self._serial = itertools.count()  # among equals the one queued first goes first

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: NodeT) -> None:
        """Queues a node, unless it is queued already."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (self._priority(node), next(self._serial), node))

    def pop(self) -> NodeT | None:
        """Takes out the node that should go first; it may have become unfit to go since its push."""
        heap = self._heap
        while heap:
            queued_at, _, node = heap[0]
            priority = self._priority(node)
            if queued_at < priority:
                heapq.heapreplace(heap, (priority, next(self._serial), node))
                continue
            heapq.heappop(heap)
            node.queued = False
            return node
        return None

    def nodes(self) -> list[NodeT]:
        """A copy of what is queued, in no order; for checks."""
        return [node for _, _, node in self._heap]


class CacheBase(Generic[NodeT]):
    """The half of a prefix cache that needs no tokens: which node has a block, and what may go.

    A subclass says what a node is, which nodes can lose a block (`_can_shrink`), and how.
    """

    def __init__(self, pool: BlockPool, block_size: int, policy: EvictionPolicy = "lru"):
        self.pool = pool
        self.block_size = block_size
        self.policy: EvictionPolicy = policy
        self.num_evictable = 0
        self.num_evicted = 0
        self._clock = 0  # one tick per call that uses something
        self._node_of: dict[int, NodeT] = {}
        self._queue: EvictionQueue[NodeT] = EvictionQueue(policy)

    def _can_shrink(self, node: NodeT) -> bool:
        """Whether nothing follows the node's last block and nobody references it."""
        raise NotImplementedError

    def _shrink(self, node: NodeT, count: int) -> list[int]:
        """Takes one to `count` blocks from a node that can shrink, and takes out a node left empty."""
        raise NotImplementedError

    def _drop_all(self) -> None:
        """Forgets all nodes."""
        raise NotImplementedError

    @property
    def num_cached(self) -> int:
        """Blocks in the cache, referenced or not."""
        return len(self._node_of)

    def contains(self, block_id: int) -> bool:
        """Whether the block is cached. Changes nothing."""
        return block_id in self._node_of

    def referenced(self, block_ids: Iterable[int]) -> None:
        """Takes note that these cached blocks, each named once, have got their first reference."""
        for block in block_ids:
            assert block in self._node_of, f"block {block} is not cached"
            self.num_evictable -= 1

    def unreferenced(self, block_ids: Iterable[int]) -> None:
        """Takes note that these cached blocks, each named once, have lost their last reference.

        Being in use until now, they count as used now.
        """
        self._clock += 1
        for block in block_ids:
            node = self._node_of[block]
            node.last_access = self._clock
            self.num_evictable += 1
            if not node.queued and self._can_shrink(node):
                self._queue.push(node)

    def evict(self, count: int) -> list[int]:
        """Forgets up to `count` unreferenced blocks and returns them; the owner frees them.

        Fewer are returned only if `num_evictable` is smaller. No block goes before those after it.
        The cost per block is that of a heap operation, counted with the uses since the last call.
        """
        evicted: list[int] = []
        while len(evicted) < count:
            node = self._queue.pop()
            if node is None:
                break
            if self._can_shrink(node):
                evicted += self._shrink(node, count - len(evicted))
        for block in evicted:
            del self._node_of[block]
        self.num_evictable -= len(evicted)
        self.num_evicted += len(evicted)
        return evicted

    def clear(self) -> list[int]:
        """Forgets everything and returns the unreferenced blocks; the owner frees them.

        Blocks in use are merely no longer cached.
        """
        unreferenced = [block for block in self._node_of if self.pool.references(block) == 0]
        self._drop_all()
        self._node_of = {}
        self._queue = EvictionQueue(self.policy)
        self.num_evictable = 0
        return unreferenced

    def _adopt(self, node: NodeT, block_ids: Iterable[int]) -> None:
        """Notes that a node has got new blocks at its end."""
        for block in block_ids:
            assert block not in self._node_of, f"block {block} is cached for other tokens"
            self._node_of[block] = node

    def _num_unshared(self, block_ids: Iterable[int]) -> int:
        """How many blocks, up to the first that is not, are in one table only.

        Another table may hold a shared block behind duplicates of what it would be cached behind.
        """
        count = 0
        for block in block_ids:
            references = self.pool.references(block)
            assert references, f"block {block} is inserted without being referenced"
            if references > 1:
                break
            count += 1
        return count

    def _queue_if_fit(self, node: NodeT) -> None:
        if self._can_shrink(node):
            self._queue.push(node)

    def _num_to_insert(
        self, token_ids: Sequence[int], block_ids: Sequence[int], num_blocks: int | None
    ) -> int:
        """How many blocks an insert is about; checks that there are tokens for them."""
        count = len(block_ids) if num_blocks is None else num_blocks
        assert count <= len(block_ids) and count * self.block_size <= len(token_ids)
        assert num_blocks is not None or len(token_ids) == count * self.block_size
        return count

    def _check_counts(self, held: dict[int, NodeT]) -> None:
        """Compares the counts with the blocks that a walk has found, and by which node."""
        assert held == self._node_of, "the map from blocks to nodes is wrong"
        unreferenced = sum(self.pool.references(block) == 0 for block in held)
        assert self.num_evictable == unreferenced, f"{self.num_evictable=} but {unreferenced=}"
        assert not held.keys() & set(self.pool.free_blocks()), "a cached block is on the free list"
        assert 0 not in held, "the null block is cached"
        alive = {id(node) for node in held.values()}
        queued = [id(node) for node in self._queue.nodes()]
        in_queue = set(queued)
        assert len(in_queue) == len(queued) and in_queue <= alive, "the queue holds strays"
        for node in held.values():
            assert node.queued == (id(node) in in_queue), "a node is wrong about being queued"
            assert node.queued or not self._can_shrink(node), "a node that can go is not queued"
