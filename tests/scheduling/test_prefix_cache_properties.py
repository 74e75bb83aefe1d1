"""Any traffic: both caches, under every policy, against a dictionary of all cached prefixes.

A state machine does with pool and cache what their owner does: it matches, references, copies,
allocates with eviction, inserts, repoints, forks and releases. Beside them it keeps what was written
into every block, and a dictionary from cached prefixes to blocks that is updated in the plainest way.

About 10,000 steps by default. For a million: `JPAGED_PROPERTY_STEPS=1000000 pytest
tests/scheduling/test_prefix_cache_properties.py`, which also draws anew each time.
"""

from __future__ import annotations

import dataclasses
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.prefix_cache import make_prefix_cache

NUM_BLOCKS, SIZE = 12, 3
STEPS_PER_EXAMPLE = 50

Prefix = tuple[str | None, tuple[int, ...]]  # salt and tokens: what a full block is worth

suffixes = st.lists(st.sampled_from([0, 1]), max_size=SIZE + 1)
trunks = st.tuples(st.sampled_from([[0] * 12, [0, 1, 0, 2**40] * 3]), st.integers(0, 12))
salts = st.sampled_from([None, None, None, "salt"])


@dataclasses.dataclass(eq=False)
class Sequence:
    """A running request: its tokens are all computed."""

    salt: str | None
    tokens: list[int]
    table: list[int]
    cursor: int

    def prefix(self, num_blocks: int) -> Prefix:
        return self.salt, tuple(self.tokens[: num_blocks * SIZE])


def agreeing(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Traffic(RuleBasedStateMachine):
    @initialize(
        kind=st.sampled_from(["radix", "radix", "hash"]), policy=st.sampled_from(["lru", "lfu", "fifo"])
    )
    def begin(self, kind, policy):
        self.kind, self.policy = kind, policy
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = make_prefix_cache(kind, self.pool, SIZE, policy)
        self.running: list[Sequence] = []
        self.pinned: list[list[int]] = []  # tables that end with the source of a copy under way
        self.content: dict[int, Prefix] = {}  # what was written into a block, and all before it
        self.cached: dict[Prefix, int] = {}
        self.num_evicted = 0

    # -- the owner ----------------------------------------------------------------------------

    def tables(self):
        return [sequence.table for sequence in self.running] + self.pinned

    def reference(self, blocks):
        self.cache.referenced([b for b in blocks if self.pool.incref(b) == 1 and self.cache.contains(b)])

    def drop(self, blocks):
        zero = [block for block in reversed(blocks) if self.pool.decref(block) == 0]
        self.cache.unreferenced([block for block in zero if self.cache.contains(block)])
        self.pool.free([block for block in zero if not self.cache.contains(block)])

    def allocate(self, count) -> list[int] | None:
        if count > self.pool.num_free + self.cache.num_evictable:
            return None
        missing = count - self.pool.num_free
        if missing > 0:
            evicted = self.evict(missing)
            assert len(evicted) == missing
        taken = self.pool.allocate(count)
        for block in taken:
            self.content.pop(block, None)
        return taken

    def evict(self, count) -> list[int]:
        evicted = self.cache.evict(count)
        for block in evicted:
            self.forget(block)
        self.pool.free(evicted)
        self.num_evicted += len(evicted)
        return evicted

    def forget(self, block):
        """Takes an evicted block out of the dictionary: it was unused, and nothing followed it."""
        assert self.pool.references(block) == 0
        ((salt, tokens),) = [prefix for prefix, other in self.cached.items() if other == block]
        del self.cached[salt, tokens]
        assert not any(s == salt and t[: len(tokens)] == tokens for s, t in self.cached), "it had a child"

    def write(self, sequence):
        """Notes what every block of the table holds after the sequence's tokens were computed."""
        for i, block in enumerate(sequence.table):
            self.content[block] = (sequence.salt, tuple(sequence.tokens[: (i + 1) * SIZE]))

    # -- traffic ------------------------------------------------------------------------------

    @rule(trunk=trunks, suffix=suffixes, salt=salts, whole=st.booleans())
    def admit(self, trunk, suffix, salt, whole):
        tokens = trunk[0][: trunk[1]] + suffix + [7]
        found = self.find(tokens, len(tokens) - (not whole), salt)
        self.reference(found.block_ids)
        if found.partial:
            pinned = [*found.block_ids, found.partial.block_id]
            self.reference(pinned)
            self.pinned.append(pinned)
        taken = self.allocate(-(-len(tokens) // SIZE) - len(found.block_ids))
        if taken is None:
            self.drop(found.block_ids)
            return
        sequence = Sequence(salt, tokens, [*found.block_ids, *taken], found.cursor)
        self.running.append(sequence)
        self.write(sequence)

    @rule()
    def copies_are_done(self):
        while self.pinned:
            self.drop(self.pinned.pop())

    @rule(trunk=trunks, suffix=suffixes, salt=salts)
    def run(self, trunk, suffix, salt):
        """A request comes and goes in one."""
        before = len(self.running)
        self.admit(trunk, suffix, salt, False)
        if len(self.running) > before:
            sequence = self.running.pop()
            self.insert(sequence)
            self.drop(sequence.table)

    def find(self, tokens, limit, salt):
        """Matches, and compares with what the dictionary and the blocks' contents say."""
        peeked = self.cache.peek(tokens, limit, salt)
        found = self.cache.match(tokens, limit, salt)
        wanted = tuple(tokens[:limit])
        full = 0
        while (full + 1) * SIZE <= limit and (salt, wanted[: (full + 1) * SIZE]) in self.cached:
            full += 1
        assert found.block_ids == tuple(self.cached[salt, wanted[: i * SIZE]] for i in range(1, full + 1))
        rest = 0
        if self.kind == "radix":
            following = [t for s, t in self.cached if s == salt and len(t) == (full + 1) * SIZE]
            rest = max((agreeing(t, wanted) for t in following), default=0) - full * SIZE
        if rest > 0:
            assert found.partial.num_tokens == rest
            holder = self.content[found.partial.block_id]
            assert holder[0] == salt and holder[1][: full * SIZE + rest] == wanted[: full * SIZE + rest]
            assert len(holder[1]) == (full + 1) * SIZE
        else:
            assert found.partial is None
        assert found.num_tokens == peeked == full * SIZE + max(rest, 0)
        assert found.cursor == full
        for i, block in enumerate(found.block_ids):
            assert self.content[block] == (salt, wanted[: (i + 1) * SIZE])
        return found

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=suffixes)
    def grow(self, data, tokens):
        sequence = data.draw(st.sampled_from(self.running))
        taken = self.allocate(-(-(len(sequence.tokens) + len(tokens)) // SIZE) - len(sequence.table))
        if taken is not None:
            sequence.tokens += tokens
            sequence.table += taken
            self.write(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def commit(self, data):
        self.insert(data.draw(st.sampled_from(self.running)))

    def insert(self, sequence):
        count = len(sequence.tokens) // SIZE
        before = list(sequence.table)
        result = self.cache.insert(
            sequence.tokens, sequence.table, sequence.cursor, sequence.salt, num_blocks=count
        )
        for change in result.replaced:
            assert change.block_id != sequence.table[change.index]
            self.reference([change.block_id])
            self.drop([sequence.table[change.index]])
            sequence.table[change.index] = change.block_id
        sequence.cursor = result.cursor
        for i in range(result.cursor):
            assert self.cached.setdefault(sequence.prefix(i + 1), before[i]) == sequence.table[i]
        if result.cursor < count:
            assert self.pool.references(sequence.table[result.cursor]) > 1
            assert sequence.prefix(result.cursor + 1) not in self.cached

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        """A second sequence takes the full blocks, cached or not; the rest is computed again."""
        sequence = data.draw(st.sampled_from(self.running))
        full = len(sequence.tokens) // SIZE
        if full and len(self.running) < 6:
            self.reference(sequence.table[:full])
            fork = Sequence(
                sequence.salt,
                sequence.tokens[: full * SIZE],
                sequence.table[:full],
                min(sequence.cursor, full),
            )
            self.running.append(fork)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), early=st.booleans())
    def finish(self, data, early):
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        if not early:
            self.insert(sequence)
        self.drop(sequence.table)

    @rule(count=st.integers(1, 4))
    def evict_some(self, count):
        evictable = self.cache.num_evictable
        assert len(self.evict(count)) == min(count, evictable)

    @precondition(lambda self: self.cache.num_evictable)
    @rule()
    def evict_one(self):
        """What goes is the end of a leaf that no other evictable leaf has less claim than."""
        order = {
            "lru": lambda leaf: leaf["last_access"],
            "lfu": lambda leaf: (leaf["hits"], leaf["last_access"]),
            "fifo": lambda leaf: leaf["created"],
        }[self.policy]
        leaves = [node for node in self.nodes() if not node["children"] and not node["references"][-1]]
        (block,) = self.evict(1)
        (victim,) = [leaf for leaf in leaves if leaf["block_ids"][-1] == block]
        assert order(victim) == min(map(order, leaves))

    @rule(keep=st.integers(0, 9))
    def clear(self, keep):
        if keep:  # rarely, or nothing would ever be cached
            return
        unused = sorted(block for block in self.cached.values() if not self.pool.references(block))
        freed = self.cache.clear()
        assert sorted(freed) == unused
        self.pool.free(freed)
        self.cached.clear()

    # -- always -------------------------------------------------------------------------------

    def nodes(self):
        stack = [child for root in self.cache.snapshot() for child in root["children"]]
        while stack:
            node = stack.pop()
            yield node
            stack += node["children"]

    @invariant()
    def cache_and_dictionary_agree(self):
        self.cache.check_invariants()
        walked: dict[Prefix, int] = {}
        for root in self.cache.snapshot():
            stack = [((), child) for child in root["children"]]
            while stack:
                above, node = stack.pop()
                assert node["start"] == len(above)
                tokens = (*above, *node["token_ids"])
                for i, block in enumerate(node["block_ids"], 1):
                    walked[root["salt"], tokens[: node["start"] + i * SIZE]] = block
                stack += [(tokens, child) for child in node["children"]]
        assert walked == self.cached
        assert all(self.content[block] == prefix for prefix, block in self.cached.items())
        assert self.cache.num_cached == len(self.cached)
        assert self.cache.num_evicted == self.num_evicted

    @invariant()
    def every_block_is_free_evictable_or_active(self):
        tables = [block for table in self.tables() for block in table]
        for block in range(1, NUM_BLOCKS + 1):
            assert self.pool.references(block) == tables.count(block)
        assert self.pool.num_free + self.cache.num_evictable + len(set(tables)) == NUM_BLOCKS

    def teardown(self):
        """At the end everything can be given back."""
        if not hasattr(self, "cache"):
            return
        for table in self.tables():
            self.drop(table)
        self.evict(NUM_BLOCKS)
        assert self.pool.num_free == NUM_BLOCKS and not self.cached
        self.cache.check_invariants()
        assert self.cache.snapshot() == []


def test_any_traffic_leaves_the_cache_as_the_dictionary_says():
    asked = os.environ.get("JPAGED_PROPERTY_STEPS")
    run_state_machine_as_test(
        Traffic,
        settings=settings(
            max_examples=int(asked or 10_000) // STEPS_PER_EXAMPLE,
            stateful_step_count=STEPS_PER_EXAMPLE,
            derandomize=not asked,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
