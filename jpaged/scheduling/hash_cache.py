"""Prefix cache as a table of whole blocks, after the automatic prefix caching of vLLM.

Owns the table: which block holds given tokens after a given block. Who references a block is the
pool's knowledge; the promises of the owner are written in `prefix_cache`.

A block is found under its own tokens and the entry of the block before it, or the salt if it is the
first; so a chain of look-ups compares every token of the prefix. The keys are the tokens themselves,
not a digest of them: Python compares them where hashes agree, and two prefixes are never taken for
one another. It is simpler than the radix tree, and finds nothing of a block of which a part agrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.prefix_cache import (
    CacheBase,
    EvictionPolicy,
    InsertResult,
    PrefixMatch,
    Replacement,
    Usage,
)


class _Entry(Usage):
    """One cached block. Compared by identity, which no later entry has while this one is a key."""

    __slots__ = ("block_id", "num_children", "parent", "token_ids")

    def __init__(self, parent: _Entry | str | None, token_ids: tuple[int, ...], block_id: int, now: int):
        super().__init__(now)
        self.parent = parent  # the salt, or None without one, for a first block
        self.token_ids = token_ids
        self.block_id = block_id
        self.num_children = 0


class HashCache(CacheBase[_Entry]):
    """Finds cached prefixes block by block. See `prefix_cache.PrefixCache` for the interface."""

    def __init__(self, pool: BlockPool, block_size: int, policy: EvictionPolicy = "lru"):
        super().__init__(pool, block_size, policy)
        self._entries: dict[tuple[_Entry | str | None, tuple[int, ...]], _Entry] = {}

    def match(self, token_ids: Sequence[int], limit: int, salt: str | None = None) -> PrefixMatch:
        """Returns the longest cached prefix of `token_ids[:limit]`, in whole blocks of the same salt.

        Counts as a use of what it finds. The answer holds until the next `insert`, `evict` or `clear`,
        and afterwards for as long as its blocks are referenced.
        """
        self._clock += 1
        block_ids = []
        for entry in self._walk(token_ids, limit, salt):
            entry.last_access = self._clock
            entry.hits += 1
            block_ids.append(entry.block_id)
        return PrefixMatch(tuple(block_ids), None, len(block_ids) * self.block_size)

    def peek(self, token_ids: Sequence[int], limit: int, salt: str | None = None) -> int:
        """Returns how many tokens `match` would find. Changes nothing and is no use of them."""
        return sum(self.block_size for _ in self._walk(token_ids, limit, salt))

    def _walk(self, token_ids: Sequence[int], limit: int, salt: str | None) -> Iterator[_Entry]:
        size = self.block_size
        parent: _Entry | str | None = salt
        for start in range(0, min(limit, len(token_ids)) - size + 1, size):
            entry = self._entries.get((parent, tuple(token_ids[start : start + size])))
            if entry is None:
                return
            yield entry
            parent = entry

    def insert(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        cursor: int = 0,
        salt: str | None = None,
        *,
        num_blocks: int | None = None,
    ) -> InsertResult:
        """Caches the blocks of a sequence; see `prefix_cache.PrefixCache.insert`."""
        count, size = self._num_to_insert(token_ids, block_ids, num_blocks), self.block_size
        cursor = min(cursor, count)
        self._clock += 1
        parent: _Entry | str | None = self._node_of.get(block_ids[cursor - 1]) if cursor else None
        if parent is None:
            parent, cursor = salt, 0
        replaced: list[Replacement] = []
        for i in range(cursor, count):
            key = (parent, tuple(token_ids[i * size : (i + 1) * size]))
            entry = self._entries.get(key)
            if entry is None:
                if not self._num_unshared([block_ids[i]]):
                    return InsertResult(i, tuple(replaced))
                entry = self._add(key, block_ids[i])
            elif entry.block_id != block_ids[i]:
                replaced.append(Replacement(i, entry.block_id))
            parent = entry
        return InsertResult(count, tuple(replaced))

    def _add(self, key: tuple[_Entry | str | None, tuple[int, ...]], block_id: int) -> _Entry:
        parent, token_ids = key
        entry = self._entries[key] = _Entry(parent, token_ids, block_id, self._clock)
        if isinstance(parent, _Entry):
            parent.num_children += 1
        self._adopt(entry, [block_id])
        return entry

    def _can_shrink(self, node: _Entry) -> bool:
        return not node.num_children and self.pool.references(node.block_id) == 0

    def _shrink(self, node: _Entry, count: int) -> list[int]:
        parent = node.parent
        del self._entries[parent, node.token_ids]
        if isinstance(parent, _Entry):
            parent.num_children -= 1
            self._queue_if_fit(parent)
        return [node.block_id]

    def _drop_all(self) -> None:
        self._entries = {}

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns a copy of the chains as plain data, in the form of `RadixCache.snapshot`.

        Every block is a node of its own.
        """
        roots: dict[str | None, list[dict[str, Any]]] = {}
        nodes: dict[int, dict[str, Any]] = {}
        for entry in self._entries.values():  # parents come before their children
            parent = entry.parent
            above = nodes[id(parent)] if isinstance(parent, _Entry) else None
            node = nodes[id(entry)] = {
                "start": above["start"] + self.block_size if above else 0,
                "token_ids": list(entry.token_ids),
                "block_ids": [entry.block_id],
                "references": [self.pool.references(entry.block_id)],
                "created": entry.created,
                "last_access": entry.last_access,
                "hits": entry.hits,
                "children": [],
            }
            siblings = above["children"] if above else roots.setdefault(parent, [])  # type: ignore[arg-type]
            siblings.append(node)
        return [{"salt": salt, "children": children} for salt, children in roots.items()]

    def check_invariants(self) -> None:
        """Proves that table, map, counts and references agree; for tests."""
        held: dict[int, _Entry] = {}
        children = dict.fromkeys(map(id, self._entries.values()), 0)
        for key, entry in self._entries.items():
            assert key == (entry.parent, entry.token_ids), "an entry has a wrong key"
            assert len(entry.token_ids) == self.block_size, "a block is not full"
            assert entry.block_id not in held, f"block {entry.block_id} has two entries"
            held[entry.block_id] = entry
            parent = entry.parent
            if isinstance(parent, _Entry):
                assert self._node_of.get(parent.block_id) is parent, "a block outlived the one before it"
                children[id(parent)] += 1
                assert entry.hits <= parent.hits, "a block has been hit without the one before it"
                if self.pool.references(entry.block_id):
                    assert self.pool.references(parent.block_id), (
                        "a referenced block follows an unreferenced one"
                    )
        for entry in self._entries.values():
            assert entry.num_children == children[id(entry)], "a count of children is wrong"
        self._check_counts(held)
