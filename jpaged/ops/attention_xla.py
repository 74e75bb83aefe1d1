"""Paged attention in plain XLA: the specification of every kernel, and what runs where none can.

One core, `attend_tiles`, serves decode (tiles of one query token) and ragged prefill (tiles of
`QUERY_TILE` tokens of one sequence). It walks the context in tiles of `CONTEXT_TILE` tokens with
a running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022), up to the longest real
context: a tile that is masked for a row changes none of its bits, and the order of the sum depends
on nothing but the positions.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jpaged.kv_cache import Pool, decode_scale, decode_values
from jpaged.pallas.common import NEVER

CONTEXT_TILE = 64  # tokens of context per iteration
QUERY_TILE = 16  # tokens of one sequence that share a gather of K and V

# Query tiles that walk their contexts together. What an iteration touches then fits in a CPU's
# cache, and a group stops at its own longest context. One size whatever the batch: so a row's
# products have one shape.
_GROUP_DECODE = 8
_GROUP_PREFILL = 2


@struct.dataclass
class QueryTiles:
    """How T packed tokens of S sequences fall into B tiles of QUERY_TILE tokens of one sequence.

    Attributes:
      sequence: int32 [B], which sequence a tile belongs to.
      token: int32 [B, Q], packed index of each of its tokens (0 where there is none).
      position: int32 [B, Q], position in the sequence, -1 where there is none.
      place: int32 [T], index into B * Q of each packed token.
    """

    sequence: jax.Array
    token: jax.Array
    position: jax.Array
    place: jax.Array


def query_tiles(query_start: jax.Array, context_lens: jax.Array, num_tokens: int) -> QueryTiles:
    """Cuts a ragged batch into query tiles.

    Args:
      query_start: int32 [S + 1], cumulative; sequence s has the packed tokens
        [query_start[s], query_start[s + 1]), the last ones of its context.
      context_lens: int32 [S], tokens in the pool once this step has written its own.
      num_tokens: T, padding included.
    """
    num_seqs = query_start.shape[0] - 1
    num_tiles = -(-num_tokens // QUERY_TILE) + min(num_seqs, num_tokens)
    lens = query_start[1:] - query_start[:-1]  # [S]
    end_tile = jnp.cumsum((lens + QUERY_TILE - 1) // QUERY_TILE)  # [S]
    first_tile = end_tile - (lens + QUERY_TILE - 1) // QUERY_TILE  # [S]

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    sequence = jnp.sum(end_tile[None, :] <= tile[:, None], axis=1)  # [B]
    sequence = jnp.minimum(sequence, num_seqs - 1).astype(jnp.int32)
    offset = (tile - first_tile[sequence])[:, None] * QUERY_TILE + jnp.arange(QUERY_TILE, dtype=jnp.int32)[
        None, :
    ]
    real = offset < lens[sequence][:, None]  # [B, Q]
    token = jnp.where(real, query_start[sequence][:, None] + offset, 0)
    position = jnp.where(real, (context_lens - lens)[sequence][:, None] + offset, -1)

    packed = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.sum(query_start[None, 1:] <= packed[:, None], axis=1)  # [T]
    owner = jnp.minimum(owner, num_seqs - 1)
    within = packed - query_start[owner]
    place = (first_tile[owner] + within // QUERY_TILE) * QUERY_TILE + within % QUERY_TILE
    place = jnp.minimum(place, num_tiles * QUERY_TILE - 1)  # padding tokens read some tile's row
    return QueryTiles(sequence=sequence, token=token, position=position, place=place)


def paged_prefill(
    q: jax.Array,
    k_pool: Pool,
    v_pool: Pool,
    tables: jax.Array,
    tiles: QueryTiles,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Causal attention of packed tokens over their contexts: q [T, H, D] -> float32 [T, H, D].

    Rows of padding tokens hold finite values of no meaning.
    """
    out = attend_tiles(
        q[tiles.token],
        k_pool,
        v_pool,
        tables[tiles.sequence],
        tiles.position,
        window=window,
        soft_cap=soft_cap,
    )
    return out.reshape(-1, *q.shape[1:])[tiles.place]


def paged_decode(
    q: jax.Array,
    k_pool: Pool,
    v_pool: Pool,
    tables: jax.Array,
    context_lens: jax.Array,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Attention of one token per sequence, the last of its context: q [S, H, D] -> float32 [S, H, D].

    A sequence of length 0 gives zeros.
    """
    out = attend_tiles(
        q[:, None],
        k_pool,
        v_pool,
        tables,
        context_lens[:, None] - 1,
        window=window,
        soft_cap=soft_cap,
    )
    return out[:, 0]


def attend_tiles(
    q: jax.Array,
    k_pool: Pool,
    v_pool: Pool,
    tables: jax.Array,
    positions: jax.Array,
    *,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """Attention of query tiles over paged keys and values.

    Args:
      q: float32 [B, Q, H, D].
      k_pool, v_pool: of one layer; slots past a tile's last position may hold anything, NaN included.
        Products have operands of the pools' dtype, sums are float32. The scale of a quantized key is
        applied to its scores, that of a value to its weights.
      tables: int32 [B, M], valid block ids wherever a position is reached.
      positions: int32 [B, Q]; a query sees positions 0 to its own; -1 sees nothing and gives 0.
      window: a query sees itself and the `window - 1` positions before it.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.

    Returns:
      float32 [B, Q, H, D].
    """
    num_tiles, num_queries = positions.shape
    size = min(_GROUP_DECODE if num_queries == 1 else _GROUP_PREFILL, num_tiles)
    tables = _pad_to_multiple(tables, 1, max(1, CONTEXT_TILE // k_pool.block_size), 0)

    def grouped(x: jax.Array, fill: int) -> jax.Array:
        x = _pad_to_multiple(x, 0, size, fill)
        return x.reshape(-1, size, *x.shape[1:])

    out = lax.map(
        lambda group: _attend_group(
            group[0], group[1], group[2], k_pool, v_pool, window=window, soft_cap=soft_cap
        ),
        (grouped(q, 0), grouped(tables, 0), grouped(positions, -1)),
    )
    return out.reshape(-1, *q.shape[1:])[:num_tiles]


def _attend_group(
    q: jax.Array,
    tables: jax.Array,
    positions: jax.Array,
    k_pool: Pool,
    v_pool: Pool,
    *,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """`attend_tiles` of one group: q [B, Q, H, D], tables [B, M], positions [B, Q]."""
    B, Q, H, D = q.shape
    K, P, dtype = k_pool.num_heads, k_pool.block_size, k_pool.dtype
    G = H // K
    tile_blocks = max(1, CONTEXT_TILE // P)
    tile_len = tile_blocks * P
    last = jnp.max(positions, axis=1)  # [B]
    product = functools.partial(
        jnp.einsum,
        precision=lax.Precision.HIGHEST if dtype == "float32" else None,
        preferred_element_type=jnp.float32,
    )
    q = (q * D**-0.5).astype(dtype)
    q = q.reshape(B, Q, K, G, D).transpose(0, 2, 1, 3, 4).reshape(B, K, Q * G, D)
    row_position = jnp.repeat(positions, G, axis=1)  # [B, Q * G]

    def load(entries: jax.Array, tile: jax.Array) -> jax.Array:
        """Of the tile, [B, K, tile_len, ..]."""
        ids = lax.dynamic_slice_in_dim(tables, tile * tile_blocks, tile_blocks, axis=1)
        ids = ids[:, None] * K + jnp.arange(K, dtype=jnp.int32)[None, :, None]  # [B, K, tile_blocks]
        # A head's block is one row, and apart from what comes next: so it is copied whole, not by element.
        rows = (
            entries.reshape(entries.shape[0] * K, -1)
            .at[ids]
            .get(mode="promise_in_bounds", wrap_negative_indices=False)
        )
        return lax.optimization_barrier(rows).reshape(B, K, tile_len, *entries.shape[3:])

    def step(tile: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple:
        top, total, acc = carry
        key_position = tile * tile_len + jnp.arange(tile_len, dtype=jnp.int32)  # [tile_len]
        keys = decode_values(load(k_pool.data, tile), k_pool.format, dtype)
        scores = product("bkqd,bktd->bkqt", q, keys)
        if k_pool.scale is not None:
            scores *= decode_scale(load(k_pool.scale, tile))[:, :, None]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = key_position[None, None, :] <= row_position[:, :, None]  # [B, Q * G, tile_len]
        if window is not None:
            seen &= key_position[None, None, :] > row_position[:, :, None] - window
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))  # [B, K, Q * G]
        weights = jnp.exp(scores - new_top[..., None])
        keep = jnp.exp(top - new_top)
        total = total * keep + jnp.sum(weights, axis=-1)
        values = decode_values(load(v_pool.data, tile), v_pool.format, dtype)
        written = key_position[None, :] <= last[:, None]  # [B, tile_len]
        values = jnp.where(written[:, None, :, None], values, jnp.zeros((), values.dtype))
        if v_pool.scale is not None:
            scale = decode_scale(load(v_pool.scale, tile))[:, :, None]
            weights *= jnp.where(written[:, None, None], scale, 0)
        update = product("bkqt,bktd->bkqd", weights.astype(dtype), values)
        return new_top, total, acc * keep[..., None] + update

    begin = 0 if window is None else jnp.maximum(_first_seen(positions, window), 0) // tile_len
    end = (jnp.max(last) + tile_len) // tile_len
    init = (
        jnp.full((B, K, Q * G), NEVER, jnp.float32),
        jnp.zeros((B, K, Q * G), jnp.float32),
        jnp.zeros((B, K, Q * G, D), jnp.float32),
    )
    _, total, acc = lax.fori_loop(begin, end, step, init)
    out = acc / jnp.where(total > 0, total, 1)[..., None]
    return out.reshape(B, K, Q, G, D).transpose(0, 2, 1, 3, 4).reshape(B, Q, H, D)


def _first_seen(positions: jax.Array, window: int) -> jax.Array:
    """The smallest position that any query of the batch sees."""
    return jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max - window)) - window + 1


def _pad_to_multiple(x: jax.Array, axis: int, multiple: int, fill: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=fill)
