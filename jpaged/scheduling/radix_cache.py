"""Prefix cache as a radix tree over token ids, after Zheng et al. 2024, "SGLang" (RadixAttention).

Owns the tree: which tokens a block holds and which blocks came before it. Who references a block is
the pool's knowledge; the promises of the owner are written in `prefix_cache`.

A node holds one or more whole blocks and is split at block boundaries only. So a block is in one node,
and siblings may share leading tokens, though never a whole first block. Matching is by tokens all the
same: siblings are kept in the order of their tokens, and the one that agrees longest with given tokens
is next to the place where those would stand.

Half-open ranges, in blocks from the start of the sequence; `end = start + len(block_ids)`:

    node                 [start, end)
    node.parent          [..., start)
    split at k           head [start, start + k), new; tail [start + k, end), the same object
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.prefix_cache import (
    CacheBase,
    EvictionPolicy,
    InsertResult,
    PartialMatch,
    PrefixMatch,
    Replacement,
    Usage,
)


class _Node(Usage):
    """Consecutive blocks that everything below shares. A root holds none and has no parent."""

    __slots__ = ("block_ids", "children", "keys", "parent", "salt", "start", "token_ids")

    def __init__(self, parent: _Node | None, salt: str | None, start: int, now: int):
        super().__init__(now)
        self.parent = parent
        self.salt = salt
        self.start = start
        self.token_ids: list[int] = []
        self.block_ids: list[int] = []
        self.keys: list[tuple[int, ...]] = []  # the children's first blocks of tokens, ascending
        self.children: list[_Node] = []

    @property
    def end(self) -> int:
        return self.start + len(self.block_ids)

    def child(self, key: tuple[int, ...]) -> _Node | None:
        """The child whose first block holds exactly these tokens."""
        place = bisect.bisect_left(self.keys, key)
        return self.children[place] if place < len(self.keys) and self.keys[place] == key else None

    def closest_child(self, wanted: tuple[int, ...]) -> tuple[_Node | None, int]:
        """The child whose first block agrees with most of `wanted` (a block or less), and with how much."""
        place = bisect.bisect_left(self.keys, wanted)
        closest, most = None, 0
        for i in (place, place - 1):
            if 0 <= i < len(self.keys) and most < len(wanted):
                agreeing = _count_agreeing(self.keys[i], wanted, 0, len(wanted))
                if agreeing > most:
                    closest, most = self.children[i], agreeing
        return closest, most

    def add_child(self, key: tuple[int, ...], child: _Node) -> None:
        place = bisect.bisect_left(self.keys, key)
        self.keys.insert(place, key)
        self.children.insert(place, child)

    def remove_child(self, key: tuple[int, ...]) -> None:
        place = bisect.bisect_left(self.keys, key)
        del self.keys[place], self.children[place]


@dataclasses.dataclass(slots=True)
class _Path:
    """Where a sequence leads: the nodes with whole blocks of it, and the one it ends inside of."""

    nodes: list[_Node]
    num_blocks: int = 0
    partial_node: _Node | None = None  # the last of `nodes`, or a child of it
    partial_tokens: int = 0


class RadixCache(CacheBase[_Node]):
    """Finds cached prefixes to the token. See `prefix_cache.PrefixCache` for the interface."""

    def __init__(self, pool: BlockPool, block_size: int, policy: EvictionPolicy = "lru"):
        super().__init__(pool, block_size, policy)
        self._roots: dict[str | None, _Node] = {}  # by salt; none without children

    # -- finding ------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], limit: int, salt: str | None = None) -> PrefixMatch:
        """Returns the longest cached prefix of `token_ids[:limit]` among those of the same salt.

        Ends inside a block where tokens or limit do; the block is then the result's `partial`. What
        is found counts as used, and is parted from what follows it, which does not. The answer
        holds until the next `insert`, `evict` or `clear`, and afterwards for as long as its blocks
        are referenced.
        """
        path = self._walk(token_ids, limit, salt)
        self._clock += 1
        if path.nodes:
            last = path.nodes[-1]
            used = path.num_blocks - last.start
            if used + (path.partial_node is last) < len(last.block_ids):
                path.nodes[-1] = self._split(last, used)
        partial = None
        if path.partial_node is not None:
            block = path.partial_node.block_ids[path.num_blocks - path.partial_node.start]
            partial = PartialMatch(block, path.partial_tokens)
            if not path.nodes or path.partial_node is not path.nodes[-1]:
                self._hit(path.partial_node)
        block_ids: list[int] = []
        for node in path.nodes:
            self._hit(node)
            block_ids += node.block_ids
        return PrefixMatch(tuple(block_ids[: path.num_blocks]), partial, self._num_tokens(path))

    def peek(self, token_ids: Sequence[int], limit: int, salt: str | None = None) -> int:
        """Returns how many tokens `match` would find. Changes nothing and is no use of them."""
        return self._num_tokens(self._walk(token_ids, limit, salt))

    def _num_tokens(self, path: _Path) -> int:
        return path.num_blocks * self.block_size + path.partial_tokens

    def _hit(self, node: _Node) -> None:
        node.last_access = self._clock
        node.hits += 1

    def _walk(self, token_ids: Sequence[int], limit: int, salt: str | None) -> _Path:
        """Follows a sequence as far as the tree goes. Changes nothing."""
        tokens, size = _as_list(token_ids), self.block_size
        limit = min(limit, len(tokens))
        path = _Path([])
        node, position = self._roots.get(salt), 0
        while node is not None and position < limit:
            wanted = tuple(tokens[position : min(position + size, limit)])
            child = node.child(wanted)
            if child is None:
                path.partial_node, path.partial_tokens = node.closest_child(wanted)
                break
            agreeing = size
            if len(child.block_ids) > 1:
                agreeing = _count_agreeing(child.token_ids, tokens, position, limit)
            path.nodes.append(child)
            path.num_blocks += agreeing // size
            if agreeing < len(child.token_ids):
                if agreeing % size:
                    path.partial_node, path.partial_tokens = child, agreeing % size
                break
            position += agreeing
            node = child
        return path

    # -- keeping ------------------------------------------------------------------------------

    def insert(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        cursor: int = 0,
        salt: str | None = None,
        *,
        num_blocks: int | None = None,
    ) -> InsertResult:
        """Caches the blocks of a sequence; see `prefix_cache.PrefixCache.insert`.

        With a `cursor` it does not look at what lies before it. The blocks need no list of where
        they are: the one before the cursor leads to its node, however that was split since.
        """
        count, size = self._num_to_insert(token_ids, block_ids, num_blocks), self.block_size
        if count == 0:
            return InsertResult(0, ())
        tokens = _as_list(token_ids)
        self._clock += 1
        node, done = self._resume(block_ids, min(cursor, count), salt)
        replaced: list[Replacement] = []
        while done < count:
            if done == node.end:
                child = node.child(tuple(tokens[done * size : (done + 1) * size])) if node.children else None
                if child is None:
                    break
                node = child
            known = self._agreeing_blocks(node, tokens, done, count)
            replaced += [Replacement(i, b) for i, b in enumerate(known, done) if block_ids[i] != b]
            done += len(known)
            if done < node.end:
                break
        end = done + self._num_unshared(block_ids[done:count])
        if end > done:
            self._append(node, done - node.start, tokens[done * size : end * size], block_ids[done:end])
        return InsertResult(end, tuple(replaced))

    def _resume(self, block_ids: Sequence[int], cursor: int, salt: str | None) -> tuple[_Node, int]:
        """The node that holds the block before the cursor, and the cursor; else the root, and 0."""
        node = self._node_of.get(block_ids[cursor - 1]) if cursor else None
        if node is None:
            return self._roots.get(salt) or _Node(None, salt, 0, self._clock), 0
        assert node.block_ids[cursor - 1 - node.start] == block_ids[cursor - 1], "cached in another place"
        return node, cursor

    def _agreeing_blocks(self, node: _Node, tokens: list[int], done: int, count: int) -> list[int]:
        """The node's blocks, from block `done` of the sequence on, that hold the sequence's tokens."""
        size, skipped = self.block_size, done - node.start
        own = node.token_ids[skipped * size : (count - node.start) * size]
        agreeing = _count_agreeing(own, tokens, done * size, count * size)
        return node.block_ids[skipped : skipped + agreeing // size]

    def _append(self, node: _Node, offset: int, token_ids: list[int], block_ids: Sequence[int]) -> None:
        """Puts new blocks behind the first `offset` blocks of a node.

        A leaf that no match has found yet just grows. Otherwise the new blocks get their own node:
        they are younger than the leaf and have not earned its hits.
        """
        if offset < len(node.block_ids):
            node = self._split(node, offset)
        if node.parent is None:
            self._roots[node.salt] = node  # if it is new
        if node.parent is None or node.children or node.hits:
            child = _Node(node, node.salt, node.end, self._clock)
            node.add_child(tuple(token_ids[: self.block_size]), child)
            node = child
        node.token_ids += token_ids
        node.block_ids += block_ids
        self._adopt(node, block_ids)

    def _split(self, tail: _Node, count: int) -> _Node:
        """Parts a node after `count` blocks and returns the new head; the object itself is the tail."""
        parent, cut = tail.parent, count * self.block_size
        assert parent is not None and 0 < count < len(tail.block_ids)
        head = _Node(parent, tail.salt, tail.start, tail.created)
        head.last_access, head.hits = tail.last_access, tail.hits
        head.token_ids, head.block_ids = tail.token_ids[:cut], tail.block_ids[:count]
        del tail.token_ids[:cut], tail.block_ids[:count]
        tail.parent, tail.start = head, head.end
        head.add_child(self._key(tail), tail)
        key = self._key(head)
        parent.children[bisect.bisect_left(parent.keys, key)] = head
        for block in head.block_ids:
            self._node_of[block] = head
        return head

    def _key(self, node: _Node) -> tuple[int, ...]:
        return tuple(node.token_ids[: self.block_size])

    # -- giving up ----------------------------------------------------------------------------

    def _can_shrink(self, node: _Node) -> bool:
        return not node.children and bool(node.block_ids) and self.pool.references(node.block_ids[-1]) == 0

    def _shrink(self, node: _Node, count: int) -> list[int]:
        taken: list[int] = []
        key = self._key(node)
        while len(taken) < count and self._can_shrink(node):
            taken.append(node.block_ids.pop())
        del node.token_ids[len(node.block_ids) * self.block_size :]
        if not node.block_ids:
            self._take_out(node, key)
        else:
            self._queue_if_fit(node)
        return taken

    def _take_out(self, node: _Node, key: tuple[int, ...]) -> None:
        """Removes an empty leaf; its parent may be the next to go."""
        parent = node.parent
        assert parent is not None
        parent.remove_child(key)
        if parent.parent is not None:
            self._queue_if_fit(parent)
        elif not parent.children:
            del self._roots[parent.salt]

    def _drop_all(self) -> None:
        self._roots = {}

    # -- looking at it ------------------------------------------------------------------------

    def _nodes(self) -> Iterator[_Node]:
        """All nodes, roots included, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += reversed(node.children)

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns a copy of the tree as plain data, for drawing.

        One dictionary per salt, `{"salt", "children"}`; a child is `{"start", "token_ids", "block_ids",
        "references", "created", "last_access", "hits", "children"}`, where `start` counts the tokens
        before it and times are of a logical clock.
        """
        roots: list[dict[str, Any]] = []
        children_of: dict[int, list[dict[str, Any]]] = {}
        for node in self._nodes():
            children: list[dict[str, Any]] = []
            children_of[id(node)] = children
            if node.parent is None:
                roots.append({"salt": node.salt, "children": children})
                continue
            children_of[id(node.parent)].append({
                "start": node.start * self.block_size,
                "token_ids": list(node.token_ids),
                "block_ids": list(node.block_ids),
                "references": [self.pool.references(block) for block in node.block_ids],
                "created": node.created,
                "last_access": node.last_access,
                "hits": node.hits,
                "children": children,
            })  # fmt: skip
        return roots

    def check_invariants(self) -> None:
        """Proves by a full walk that tree, map, counts and references agree; for tests."""
        held: dict[int, _Node] = {}
        for node in self._nodes():
            self._check_node(node)
            for block in node.block_ids:
                assert block not in held, f"block {block} is in two nodes"
                held[block] = node
        for salt, root in self._roots.items():
            assert root.parent is None and root.salt == salt and root.start == 0 and not root.block_ids
            assert root.children, "a root without children was left"
        self._check_counts(held)

    def _check_node(self, node: _Node) -> None:
        assert len(node.token_ids) == len(node.block_ids) * self.block_size, "a block is not full"
        assert node.keys == [self._key(child) for child in node.children], "a child has a wrong key"
        assert all(a < b for a, b in zip(node.keys, node.keys[1:], strict=False)), "children out of order"
        for child in node.children:
            assert child.parent is node and child.salt == node.salt and child.start == node.end
            assert child.block_ids, "an empty node was left"
            assert child.hits <= node.hits or node.parent is None, "a child has been hit without its parent"
        used = [self.pool.references(block) > 0 for block in node.block_ids]
        used.append(any(self.pool.references(child.block_ids[0]) for child in node.children))
        if node.parent is not None:
            assert used == sorted(used, reverse=True), "a referenced block follows an unreferenced one"


def _as_list(token_ids: Sequence[int]) -> list[int]:
    """Lists compare with lists only."""
    return token_ids if isinstance(token_ids, list) else list(token_ids)


def _count_agreeing(own: Sequence[int], tokens: Sequence[int], start: int, stop: int) -> int:
    """How many leading elements `own` has in common with `tokens[start:stop]`, by bisection."""
    low, high = 0, min(len(own), stop - start)
    if own[:high] == tokens[start : start + high]:
        return high
    while high - low > 1:  # [0, low) agrees and [low, high) does not
        middle = (low + high) // 2
        if own[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
