"""Reference counts and the free list of KV blocks.

Owns which blocks are free and how many sequences use each. Knows nothing of tokens; which blocks
hold something worth keeping is the prefix cache's knowledge.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Blocks 1 to `num_blocks`; block 0 is the null block and never handed out."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))  # popped from the end: lowest ids first
        self._references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` free blocks with one reference each, or `None` (and takes none)."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def references(self, block: int) -> int:
        """How many sequences use the block."""
        return self._references[block]

    def incref(self, block: int) -> int:
        """Adds a reference and returns the new count."""
        self._references[block] += 1
        return self._references[block]

    def decref(self, block: int) -> int:
        """Drops a reference and returns the new count; at 0 the caller frees or caches the block."""
        count = self._references[block] - 1
        assert count >= 0, f"block {block} has no reference to drop"
        self._references[block] = count
        return count

    def free(self, blocks: Iterable[int]) -> None:
        """Returns unreferenced blocks to the free list."""
        for block in blocks:
            assert self._references[block] == 0, f"block {block} is still in use"
            self._free.append(block)

    def free_blocks(self) -> list[int]:
        """A copy of the free list, for checks."""
        return list(self._free)
