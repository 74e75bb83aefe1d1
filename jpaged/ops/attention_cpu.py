"""Paged attention on a CPU, compiled by Numba and called by XLA.

XLA's own form (`attention_xla`) copies every tile of keys and values out of the pool and runs a dozen
operations on it. This one reads each block where it lies, once for all query heads of its KV head: scores of
the whole context, their softmax, the weighted sum of values. Prefill is decode with a row for each token. A
row's result depends on its own context alone.

XLA calls a handler with one pointer to an `XLA_FFI_CallFrame`; `_handler` and `_run_part` alone know
that structure (jaxlib's `xla/ffi/api/c_api.h`, version 0.3, to which fields are only ever added). Pairs of
sequence and KV head are dealt out to as many POSIX threads as there are cores, begun and ended in each call:
that takes some 30 microseconds and leaves nothing spinning on the cores that the next product needs.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import llvmlite.binding
import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from jpaged.kv_cache import Pool
from jpaged.pallas.common import LOG2_E, NEVER

THREAD_TOKENS = 256  # of context, times KV heads: what is worth a thread

_TARGET = "jpaged_paged_decode"
_WORKER = "jpaged_paged_decode_worker"


def _kept(decorator: Any, *arguments: Any, **options: Any) -> Any:
    """A decorator of Numba's that keeps machine code on disk, if there is a folder for it."""

    def decorate(function: Any) -> Any:
        try:
            return decorator(*arguments, cache=True, **options)(function)
        except RuntimeError:  # no folder can be written
            return decorator(*arguments, **options)(function)

    return decorate


# Sums may be reordered, which vector instructions need; NaN and infinities keep their meaning.
_compiled = _kept(
    numba.njit, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"}
)


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
    _register()
    integers = np.array([_num_threads(), window or 0], np.int32)
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q * q.shape[-1] ** -0.5,
        k_pool.data,
        v_pool.data,
        tables,
        context_lens,
        integers,
        np.array([soft_cap or 0], np.float32),
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


@functools.cache
def _register() -> tuple[Any, Any]:
    """Compiles the handler, or loads it, and makes it known to XLA. What it returns keeps the code alive."""
    as_callback = _kept(numba.cfunc, types.int64(types.int64))
    worker = as_callback(_worker)
    llvmlite.binding.add_symbol(_WORKER, worker.address)  # found by name, so that the handler can be kept
    handler = as_callback(_handler)
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler.ctypes), platform="cpu")
    return worker, handler


def _num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_intrinsic: Any = intrinsic  # its type hints know nothing of the typing context


# -- addresses --------------------------------------------------------------------------------


@_intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@_intrinsic
def _worker_pointer(typing_context: Any) -> Any:
    """What pthread_create is to call."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        symbol = cgutils.get_or_insert_function(builder.module, _WORKER_TYPE, _WORKER)
        return builder.bitcast(symbol, cgutils.voidptr_t)

    return types.voidptr(), generate


_WORKER_TYPE = llvmlite.ir.FunctionType(llvmlite.ir.IntType(64), [llvmlite.ir.IntType(64)])
_pthread_create = types.ExternalFunction(
    "pthread_create", types.int32(types.voidptr, types.voidptr, types.voidptr, types.voidptr)
)
_pthread_join = types.ExternalFunction("pthread_join", types.int32(types.int64, types.voidptr))


@_compiled
def _words(address: int, count: int) -> np.ndarray:
    return numba.carray(_pointer(address), (count,), np.int64)


@_compiled
def _buffer(address: int, rank: int) -> tuple[Any, np.ndarray]:
    """Data and shape of an XLA_FFI_Buffer: size, extension, dtype, data, rank, dimensions."""
    words = _words(address, 6)
    return _pointer(words[3]), _words(words[5], rank)


# -- what XLA calls ---------------------------------------------------------------------------


def _handler(frame: int) -> int:
    """An XLA_FFI_Handler: the address of an XLA_FFI_CallFrame in, no error out."""
    extension = _words(frame, 2)[1]
    if extension != 0:
        words = _words(extension, 4)  # size, kind, next, metadata
        if words[1] & 0xFFFFFFFF == 1:  # asked for once, before any call: which version this is written for
            _words(words[3], 4)[3] = 3 << 32  # major version 0, minor version 3
            return 0
    parts = _num_parts(frame)
    threads = np.zeros(parts, np.int64)
    tasks = np.empty((parts, 3), np.int64)
    is_begun = np.zeros(parts, np.bool_)
    for part in range(1, parts):
        tasks[part, 0], tasks[part, 1], tasks[part, 2] = frame, part, parts
        thread = _pointer(threads.ctypes.data + 8 * part)
        task = _pointer(tasks.ctypes.data + 24 * part)
        is_begun[part] = _pthread_create(thread, _pointer(0), _worker_pointer(), task) == 0
    _run_part(frame, np.int64(0), parts)
    for part in range(1, parts):
        if is_begun[part]:
            _pthread_join(threads[part], _pointer(0))
        else:
            _run_part(frame, part, parts)
    return 0


def _worker(task: int) -> int:
    """A thread: the address of frame, part and number of parts."""
    words = _words(task, 3)
    _run_part(words[0], words[1], words[2])
    return 0


@_compiled
def _num_parts(frame: int) -> int:
    """How many threads share a call: no more than `THREAD_TOKENS` make worth it."""
    arguments = _words(_words(frame, 10)[9], 6)
    _, pool_shape = _buffer(arguments[1], 4)
    lens_data, lens_shape = _buffer(arguments[4], 1)
    lens = numba.carray(lens_data, (lens_shape[0],), np.int32)
    threads_data, _ = _buffer(arguments[5], 1)
    tokens = np.int64(0)
    for length in lens:
        tokens += length
    threads = np.int64(numba.carray(threads_data, (2,), np.int32)[0])
    return max(np.int64(1), min(threads, tokens * pool_shape[1] // THREAD_TOKENS))


@_compiled
def _run_part(frame: int, part: int, parts: int) -> None:
    """Reads a call frame, and computes every `parts`-th pair of sequence and KV head."""
    words = _words(frame, 15)  # .. [9]: arguments .. [14]: results
    arguments, results = _words(words[9], 7), _words(words[14], 1)
    q_data, q_shape = _buffer(arguments[0], 3)
    k_data, pool_shape = _buffer(arguments[1], 4)
    v_data, _ = _buffer(arguments[2], 4)
    tables_data, tables_shape = _buffer(arguments[3], 2)
    lens_data, _ = _buffer(arguments[4], 1)
    window_data, _ = _buffer(arguments[5], 1)
    cap_data, _ = _buffer(arguments[6], 1)
    out_data, _ = _buffer(results[0], 3)
    shape = (q_shape[0], q_shape[1], q_shape[2])
    pool = (pool_shape[0], pool_shape[1], pool_shape[2], pool_shape[3])
    q, out = numba.carray(q_data, shape, np.float32), numba.carray(out_data, shape, np.float32)
    tables = numba.carray(tables_data, (tables_shape[0], tables_shape[1]), np.int32)
    lens = numba.carray(lens_data, (shape[0],), np.int32)
    window = numba.carray(window_data, (2,), np.int32)[1]
    soft_cap = numba.carray(cap_data, (1,), np.float32)[0]
    if _words(arguments[1], 3)[2] & 0xFFFFFFFF == 11:  # XLA_FFI_DataType: float32
        k, v = numba.carray(k_data, pool, np.float32), numba.carray(v_data, pool, np.float32)
        _attend(q, k, v, tables, lens, window, soft_cap, out, part, parts)
    else:
        k16, v16 = numba.carray(k_data, pool, np.uint16), numba.carray(v_data, pool, np.uint16)
        _attend(q, k16, v16, tables, lens, window, soft_cap, out, part, parts)


# -- attention --------------------------------------------------------------------------------


@_compiled
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


@_compiled
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


@_compiled
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
