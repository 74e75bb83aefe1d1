"""Paged attention problems with known answers, for every implementation: no test framework needed.

Every slot that may not be read holds NaN or an infinity. Keys are built so that the slots at the
edges of what a query sees weigh most, and those just beyond would weigh all: one slot too many or
too few is an error of the order of the values themselves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jpaged.kv_cache import Pool, storage_dtype
from jpaged.ops import attention
from jpaged.ops.attention import Backend

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}  # of the largest value
VISIBLE, HIDDEN = 6.0, 12.0  # scores of the edge slots that a query sees, and of those just beyond


OPTIONS = ("window", "soft_cap")


def as_qkv(q: jax.Array, kv_heads: int) -> jax.Array:
    """Queries [T, H, D] with keys and values beside them that are not to be read: [T, K, G + 2, D]."""
    q = jnp.asarray(q).reshape(q.shape[0], kv_heads, -1, q.shape[2])
    return jnp.pad(q, ((0, 0), (0, 0), (0, 2), (0, 0)), constant_values=jnp.nan)


def decode_of(backend: Backend):
    def decode(q, k_pool, *arguments, **options):
        return attention.paged_decode(backend, as_qkv(q, k_pool.num_heads), k_pool, *arguments, **options)

    return jax.jit(decode, static_argnames=OPTIONS)


def prefill_of(backend: Backend):
    def prefill(q, k_pool, v_pool, tables, query_start, context_lens, **options):
        attend = attention.paged_prefill(backend, tables, query_start, context_lens, q.shape[0])
        return attend(as_qkv(q, k_pool.num_heads), k_pool, v_pool, **options)

    return jax.jit(prefill, static_argnames=OPTIONS)


@dataclasses.dataclass
class Case:
    """Sequences in a pool, and what their queries should give.

    Attributes:
      q: per sequence, float32 [queries, H, D]; the last ones of the context.
      k, v: per sequence, float32 [context, K, D], as the pools mean them.
      k_pool, v_pool: as stored; numpy arrays.
    """

    lens: list[tuple[int, int]]  # (context, queries)
    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]
    k_pool: Pool
    v_pool: Pool
    tables: np.ndarray
    window: int | None
    soft_cap: float | None

    def expected(self) -> list[np.ndarray]:
        """Dense attention of each sequence in float64: [queries, H, D]."""
        return [self._dense(*sequence) for sequence in zip(self.q, self.k, self.v, strict=True)]

    def _dense(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,thd->hqt", q, k) / np.sqrt(q.shape[-1])
        if self.soft_cap is not None:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        position = np.arange(len(k) - len(q), len(k))[:, None]
        key = np.arange(len(k))[None, :]
        seen = key <= position
        if self.window is not None:
            seen &= key > position - self.window
        scores = np.where(seen[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) if len(q) else scores
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqt,thd->qhd", weights, v)

    def check(self, got: list[np.ndarray]) -> None:
        expected = self.expected()
        scale = max(np.abs(x).max() for x in expected if x.size)
        assert scale > 1
        for lens, g, e in zip(self.lens, got, expected, strict=True):
            assert g.shape == e.shape
            np.testing.assert_allclose(
                g,
                e,
                rtol=0,
                atol=TOLERANCE[self.k_pool.dtype] * scale,
                err_msg=f"(context, queries) = {lens}",
            )

    def options(self) -> dict:
        return dict(window=self.window, soft_cap=self.soft_cap)

    # -- running it ---------------------------------------------------------------------------

    def run_decode(self, decode: Callable) -> np.ndarray:
        """All sequences, each with at most one query: [S, H, D]."""
        q = np.zeros((len(self.lens), *self.q[0].shape[1:]), np.float32)
        for row, own in zip(q, self.q, strict=True):
            row[:] = own[0] if len(own) else np.nan  # the query of an empty row is not read either
        lens = np.array([context for context, _ in self.lens], np.int32)
        out = decode(q, self.k_pool, self.v_pool, self.tables, lens, **self.options())
        assert out.dtype == np.float32
        return np.asarray(out)

    def run_prefill(self, prefill: Callable, *, padding: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
        """All sequences packed, then `padding` tokens: results per sequence, and those of padding."""
        counts = [queries for _, queries in self.lens]
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        q = np.concatenate([*self.q, np.ones((padding, *self.q[0].shape[1:]), np.float32)])
        lens = np.array([context for context, _ in self.lens], np.int32)
        out = prefill(q, self.k_pool, self.v_pool, self.tables, start, lens, **self.options())
        assert out.dtype == np.float32
        pieces = np.split(np.asarray(out), start[1:])
        return pieces[:-1], pieces[-1]


def edge_keys(rng, direction: np.ndarray, common: np.ndarray, window: int | None) -> np.ndarray:
    """Keys [context, K, D] for queries along `direction[t] + common`, all vectors of length about 1.

    Slot j scores `VISIBLE` with the queries that see it as their first or last slot, and `HIDDEN`
    with those for which it is one before the first or one after the last.
    """
    length = len(direction)
    keys = 0.2 * rng.standard_normal(direction.shape)

    def add(slot: int, query: int, score: float) -> None:
        if 0 <= slot < length and 0 <= query < length:
            keys[slot] += score * direction[query]

    for t in range(length):
        add(t, t, VISIBLE)
        add(t + 1, t, HIDDEN)
        if window is not None:
            add(t - window + 1, t, VISIBLE)
            add(t - window, t, HIDDEN)
    if length:
        keys[0] += VISIBLE * common
    return keys


def make_case(
    lens: list[tuple[int, int]],
    *,
    group: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    format: str | None = None,
    platform: str = "cpu",
    window: int | None = None,
    soft_cap: float | None = None,
    width: int | None = None,
    seed: int = 0,
) -> Case:
    """Sequences in permuted blocks of a pool whose every other slot is poisoned.

    Args:
      dtype: of the operands of products.
      format: of the pool, by default `dtype`.
      platform: whose way of storing values the pools follow.
      width: of the block tables.
    """
    rng = np.random.default_rng(seed)
    value_type = DTYPES[dtype]
    store = functools.partial(_stored, dtype=dtype, platform=platform)
    counts = [-(-context // block_size) for context, _ in lens]
    width = width or max(counts) + 2
    num_blocks = sum(counts) + 4
    poison = rng.choice([np.nan, np.inf, -np.inf], (2, num_blocks, kv_heads, block_size, head_dim))
    k_pool, v_pool = poison.astype(value_type)
    tables = np.zeros((len(lens), width), np.int32)
    blocks = rng.permutation(np.arange(1, num_blocks)).tolist()

    q = []
    for (context, queries), count, table in zip(lens, counts, tables, strict=True):
        own = [blocks.pop() for _ in range(count)]
        table[:count] = own
        shape = (context, kv_heads, head_dim)
        direction = rng.standard_normal(shape)
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
        common = rng.standard_normal((kv_heads, head_dim))
        common /= np.linalg.norm(common, axis=-1, keepdims=True)
        keys = edge_keys(rng, direction, common, window).astype(value_type)
        values = rng.standard_normal(shape).astype(value_type)
        for slot in range(context):
            k_pool[own[slot // block_size], :, slot % block_size] = keys[slot]
            v_pool[own[slot // block_size], :, slot % block_size] = values[slot]
        # q · k / sqrt(D) is the score that edge_keys means.
        query = np.sqrt(head_dim) * (direction + common[None])[context - queries :]
        query = np.repeat(query, group, axis=1) + 0.3 * rng.standard_normal(
            (queries, kv_heads * group, head_dim)
        )
        q.append(query.astype(value_type).astype(np.float32))
    format = format or dtype
    k_pool, k_meant = store(
        k_pool, format="int8" if format == "int4" else format, rotated=format not in DTYPES
    )
    v_pool, v_meant = store(v_pool, format=format, rotated=format == "int4")

    def contexts(meant: np.ndarray) -> list[np.ndarray]:
        slots = [np.arange(context) for context, _ in lens]
        own = zip(tables, slots, strict=True)
        return [meant[table[slot // block_size], :, slot % block_size] for table, slot in own]

    return Case(lens, q, contexts(k_meant), contexts(v_meant), k_pool, v_pool, tables, window, soft_cap)


def _stored(
    values: np.ndarray, *, format: str, dtype: str, platform: str, rotated: bool
) -> tuple[Pool, np.ndarray]:
    """A pool [N, K, P, D] in a format, and the values float32 that its entries mean.

    Slots that nobody may read are those that are not finite; of a quantized pool they have a scale of
    NaN, and entries of NaN where there is such a thing.
    """
    if format in DTYPES:
        stored = values.astype(DTYPES[format])
        data = stored.view(storage_dtype(format, platform))
        return Pool(data, None, format, dtype), stored.astype(np.float32)
    poisoned = ~np.isfinite(values).all(axis=-1)
    known = np.where(poisoned[..., None], 0, values.astype(np.float32))
    rotation = hadamard(values.shape[-1]) if rotated else np.eye(values.shape[-1])
    known = known @ rotation
    largest = {"int8": 127, "fp8_e4m3": 448, "int4": 7}[format]
    scale = (np.abs(known).max(axis=-1) / largest).astype(ml_dtypes.bfloat16)
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
    entries = np.clip(known / divisor, -largest, largest)
    entries = entries.astype(ml_dtypes.float8_e4m3fn) if format == "fp8_e4m3" else np.rint(entries)
    meant = (entries.astype(np.float32) * scale[..., None].astype(np.float32)) @ rotation.T
    scale[poisoned] = np.nan
    if format == "fp8_e4m3":
        entries[poisoned] = np.nan
        data = entries.view(storage_dtype(entries.dtype, platform))
    else:
        entries[poisoned] = largest
        data = entries.astype(np.int8)
    if format == "int4":
        low, high = np.split(data.view(np.uint8), 2, axis=-1)
        data = low % 16 + 16 * (high % 16)
    return Pool(data, scale.view(storage_dtype(scale.dtype, platform)), format, dtype, rotated), meant


def hadamard(head_dim: int) -> np.ndarray:
    """The rotation of quantized pools [D, D]: Sylvester's matrix, as many times as it fits head_dim."""
    size = head_dim & -head_dim
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(head_dim // size), matrix / np.sqrt(size))
