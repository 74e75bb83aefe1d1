"""Paged attention on a CPU, compiled by Numba and called by XLA.

XLA's own form (`attention_xla`) copies every tile of keys and values out of the pool and runs a dozen
operations on it. This one reads each block where it lies, once for all query heads of its KV head: scores of
the whole context, their softmax, the weighted sum of values. Prefill is decode with a row for each token. A
row's result depends on its own context alone.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np
from numba import types
from numba.extending import overload

from jpaged.kv_cache import Pool
from jpaged.ops import native
from jpaged.ops.native import compiled
from jpaged.pallas.common import LOG2_E, NEVER

PART_TOKENS = 256  # of context, times KV heads: what is worth the trouble of another part

_TARGET = "jpaged_paged_decode"
_part_pointer = native.pointer_to(_TARGET)


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
    """`attention_xla.paged_decode` of pools in float32 or bfloat16; queries and weights are not rounded."""
    native.register(_TARGET, _handler, _run_part)
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q * q.shape[-1] ** -0.5,
        k_pool.data,
        v_pool.data,
        tables,
        context_lens,
        np.int32(window or 0),
        np.float32(soft_cap or 0),
    )


def token_contexts(
    query_start: jax.Array, context_lens: jax.Array, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Sequence, and length of the context, itself included, of each packed token: int32 [T] each.

    Padding tokens have length 0. Arguments as of `attention_xla.query_tiles`.
    """
    packed = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.sum(query_start[None, 1:] <= packed[:, None], axis=1)
    sequence = jnp.minimum(owner, query_start.shape[0] - 2)
    length = context_lens[sequence] - query_start[1:][sequence] + packed + 1
    return sequence, jnp.where(owner == sequence, length, 0)


# -- what XLA calls ---------------------------------------------------------------------------


def _handler(frame: int) -> int:
    if not native.answered(frame):
        native.run_parts(frame, _work(frame) // PART_TOKENS, _part_pointer())
    return 0


@compiled
def _work(frame: int) -> int:
    """Tokens of all contexts, times KV heads."""
    arguments = native.operands(frame, 5)
    _, pool_shape = native.buffer(arguments[1], 4)
    lens_data, lens_shape = native.buffer(arguments[4], 1)
    tokens = np.int64(0)
    for length in numba.carray(lens_data, (lens_shape[0],), np.int32):
        tokens += length
    return tokens * pool_shape[1]


def _run_part(task: int) -> int:
    """Reads a call frame, and computes every `parts`-th pair of sequence and KV head."""
    frame, part, parts = native.words(task, 3)
    arguments = native.operands(frame, 7)
    q_data, q_shape = native.buffer(arguments[0], 3)
    k_data, pool_shape = native.buffer(arguments[1], 4)
    v_data, _ = native.buffer(arguments[2], 4)
    tables_data, tables_shape = native.buffer(arguments[3], 2)
    lens_data, _ = native.buffer(arguments[4], 1)
    window_data, _ = native.buffer(arguments[5], 0)
    cap_data, _ = native.buffer(arguments[6], 0)
    out_data, _ = native.buffer(native.result(frame), 3)
    shape = (q_shape[0], q_shape[1], q_shape[2])
    pool = (pool_shape[0], pool_shape[1], pool_shape[2], pool_shape[3])
    q, out = numba.carray(q_data, shape, np.float32), numba.carray(out_data, shape, np.float32)
    tables = numba.carray(tables_data, (tables_shape[0], tables_shape[1]), np.int32)
    lens = numba.carray(lens_data, (shape[0],), np.int32)
    window = numba.carray(window_data, (1,), np.int32)[0]
    soft_cap = numba.carray(cap_data, (1,), np.float32)[0]
    if native.dtype_of(arguments[1]) == native.FLOAT32:
        k, v = numba.carray(k_data, pool, np.float32), numba.carray(v_data, pool, np.float32)
        _attend(q, k, v, tables, lens, window, soft_cap, out, part, parts)
    else:
        k16, v16 = numba.carray(k_data, pool, np.uint16), numba.carray(v_data, pool, np.uint16)
        _attend(q, k16, v16, tables, lens, window, soft_cap, out, part, parts)
    return 0


# -- attention --------------------------------------------------------------------------------


@compiled
def _attend(
    q: np.ndarray,
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    tables: np.ndarray,
    lens: np.ndarray,
    window: int,
    soft_cap: float,
    out: np.ndarray,
    part: int,
    parts: int,
) -> None:
    """float32 q [S, H, D], scaled, over pools [N, K, P, D]: out [S, H, D]."""
    num_seqs, num_heads, D = q.shape
    _, K, P, _ = k_pool.shape
    G = num_heads // K
    scores = np.empty((G, tables.shape[1] * P), np.float32)
    powers = np.empty(tables.shape[1] * P, np.int32)
    entries = np.empty((P, D), np.int32)
    for pair in range(part, num_seqs * K, parts):
        sequence, head = pair // K, pair % K
        length = lens[sequence]
        first = max(0, length - window) if window > 0 else 0
        heads = q[sequence, head * G : head * G + G]
        result = out[sequence, head * G : head * G + G]
        result[:] = 0
        for index in range(first // P, (length + P - 1) // P):
            begin, end = max(first, index * P), min(length, (index + 1) * P)
            keys = _values(k_pool[tables[sequence, index], head], begin - index * P, end - index * P, entries)
            for token in range(begin, end):
                for g in range(G):
                    score = np.float32(0)
                    for d in range(D):
                        score += heads[g, d] * keys[token - index * P, d]
                    scores[g, token] = score
        for g in range(G):
            if soft_cap > 0:
                for token in range(first, length):
                    scores[g, token] = soft_cap * math.tanh(scores[g, token] / soft_cap)
            _softmax(scores[g, first:length], powers)
        for index in range(first // P, (length + P - 1) // P):
            begin, end = max(first, index * P), min(length, (index + 1) * P)
            values = _values(
                v_pool[tables[sequence, index], head], begin - index * P, end - index * P, entries
            )
            for g in range(G):
                _add_weighted(result[g], scores[g, begin:end], values[begin - index * P : end - index * P])


@compiled
def _add_weighted(result: np.ndarray, weights: np.ndarray, values: np.ndarray) -> None:
    """`result += weights @ values`, four rows at a time: [D], [n], [n, D]."""
    n, D = values.shape
    whole = n // 4 * 4
    for t in range(0, whole, 4):
        w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for d in range(D):
            result[d] += (
                w0 * values[t, d] + w1 * values[t + 1, d] + w2 * values[t + 2, d] + w3 * values[t + 3, d]
            )
    for t in range(whole, n):
        for d in range(D):
            result[d] += weights[t] * values[t, d]


@compiled
def _softmax(x: np.ndarray, powers: np.ndarray) -> None:
    """Softmax of float32 [n], in place. `powers` is room for n whole numbers.

    exp(x) = 2^n 2^f with a polynomial for 2^f, |f| <= 1/2: loops that become vector instructions, which
    calls of the C library's function would not.
    """
    top = np.float32(NEVER)
    for score in x:
        if score > top:
            top = score
    for i in range(len(x)):
        y = (x[i] - top) * np.float32(LOG2_E)
        if y < np.float32(-126):  # not so for NaN, which stays
            y = np.float32(-126)
        whole = np.rint(y)
        f = y - whole
        powers[i] = np.int32(whole) + np.int32(127) << np.int32(23)  # bits of 2^n
        p = np.float32(0.00015403530393381608)  # ln(2)^k / k!
        p = p * f + np.float32(0.0013333558146428443)
        p = p * f + np.float32(0.009618129107628477)
        p = p * f + np.float32(0.05550410866482158)
        p = p * f + np.float32(0.2402265069591007)
        p = p * f + np.float32(0.6931471805599453)
        x[i] = p * f + np.float32(1)
    factors = powers.view(np.float32)
    total = np.float32(0)
    for i in range(len(x)):
        x[i] *= factors[i]
        total += x[i]
    for i in range(len(x)):
        x[i] /= total


def _values(block: np.ndarray, begin: int, end: int, room: np.ndarray) -> np.ndarray:
    """Tokens [begin, end) of one head's block [P, D] as float32 [P, D], in `room` if they must be widened."""
    raise NotImplementedError("for compiled code only")


@overload(_values, strict=False)  # which would compare annotations, too
def _values_overload(block: Any, begin: Any, end: Any, room: Any) -> Any:
    if block.dtype == types.float32:
        return lambda block, begin, end, room: block

    def widen(block: np.ndarray, begin: int, end: int, room: np.ndarray) -> np.ndarray:
        for token in range(begin, end):
            for d in range(block.shape[1]):
                room[token, d] = np.int32(block[token, d]) << np.int32(16)
        return room.view(np.float32)

    return widen
