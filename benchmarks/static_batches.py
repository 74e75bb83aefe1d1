"""What was done before paging: memory reserved ahead, batches that wait for their slowest member.

The same model, kernels and steps as ours; only memory and scheduling differ. A sequence reserves
`max_model_len` tokens in consecutive blocks, since nobody knows how long its output gets. A batch is as many
waiting requests as memory and rows hold; nothing joins until its last member has finished, and what its
members reserved counts as reserved until then. In one thing it is better than what it stands for: members
that have finished are not computed on.
"""

from __future__ import annotations

from jpaged import Engine
from jpaged.request import Request
from jpaged.scheduling.kv_manager import KVManager
from jpaged.scheduling.scheduler import Scheduler


class StaticEngine(Engine):
    """An engine of static batches over contiguous memory. Wants `prefix_cache="off"`."""

    def _new_scheduler(self) -> Scheduler:
        sizes = self.sizes
        kv = ReservingKVManager(sizes.num_kv_blocks, sizes.block_size, reserve=sizes.max_model_len)
        return StaticScheduler(
            kv, max_num_seqs=sizes.max_num_seqs, max_num_batched_tokens=sizes.max_num_batched_tokens
        )


class ReservingKVManager(KVManager):
    """Admits a request only with all the blocks that it could ever need."""

    def __init__(self, num_blocks: int, block_size: int, *, reserve: int):
        super().__init__(num_blocks, block_size)
        self._reserve = reserve
        if self.blocks_for(reserve) > num_blocks:
            raise ValueError(f"{num_blocks} blocks of {block_size} hold no sequence of {reserve} tokens")

    def acquire(self, request: Request, promised: int) -> bool:
        """See `KVManager.acquire`."""
        if self.blocks_for(self._reserve) > self.num_available:
            return False
        return super().acquire(request, promised) and self.extend(request, self._reserve)


class StaticScheduler(Scheduler):
    """Admits a batch, and nothing more until all of it has finished."""

    _filling = False
    _reserved_blocks = 0

    def _admit(self, grants: dict[Request, int], admitted: list[Request], budget: int) -> int:
        if not self.running:
            self._reserved_blocks = 0
        elif not self._filling:
            return 0
        used = super()._admit(grants, admitted, budget)
        self._filling = used == budget  # the step is full; the batch may not be
        return used

    def _count(self, num_tokens: int) -> None:
        super()._count(num_tokens)
        active = self.kv.num_active
        self._reserved_blocks = max(self._reserved_blocks, active)
        self.stats.slots_allocated += (self._reserved_blocks - active) * self.kv.block_size
