"""Who owns which KV block: the one place that knows the pool, the tables and what is cached.

Every block is free, cached (unreferenced, evictable) or active (referenced); the three always add
up to the pool. Capacity trouble is a `None` or `False`; corruption is an `AssertionError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jpaged.request import Request
from jpaged.scheduling.block_pool import BlockPool


class KVManager:
    """Hands out KV blocks to requests.

    `request.block_ids[i]` holds the tokens `[i * block_size, (i + 1) * block_size)`.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    @property
    def num_available(self) -> int:
        """Blocks that could be allocated now."""
        return self.pool.num_free

    @property
    def num_active(self) -> int:
        """Blocks that some sequence uses."""
        return self.pool.num_blocks - self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def acquire(self, request: Request, promised: int) -> bool:
        """Admits a request that owns nothing, if all its known tokens fit. Allocates nothing yet.

        Args:
          promised: available blocks that earlier admissions still need for their known tokens.
        """
        assert not request.block_ids and request.num_scheduled == 0
        return self.blocks_for(request.num_tokens) <= self.num_available - promised

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Grows the request's table to hold `num_tokens` tokens; `False` changes nothing."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        request.block_ids.extend(blocks)
        return True

    def release(self, request: Request) -> None:
        """Takes everything back from a request that finished, was aborted or preempted."""
        dropped = [block for block in request.block_ids if self.pool.decref(block) == 0]
        self.pool.free(reversed(dropped))
        request.block_ids.clear()
        request.num_scheduled = 0

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Walks pool and tables; `requests` are all that may own blocks."""
        free = self.pool.free_blocks()
        used = Counter(block for request in requests for block in request.block_ids)
        assert len(set(free)) == len(free), "a block is twice on the free list"
        assert not set(free) & used.keys(), "a free block is in a table"
        assert 0 not in used, "the null block is in a table"
        for block in range(1, self.pool.num_blocks + 1):
            assert self.pool.references(block) == used[block], f"block {block}: wrong reference count"
        assert len(free) + len(used) == self.pool.num_blocks, "blocks were lost"
