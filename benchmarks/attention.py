"""Attention kernels: bytes that must move, time, and bandwidth as a share of a copy's; one JSON line last.

python benchmarks/attention.py            decode and prefill against XLA and against jax's own kernels
python benchmarks/attention.py --count    bytes that the decode kernel asks for, counted as it runs

Times need a GPU. On a CPU the kernels are interpreted on small shapes, which shows that they run, and
nothing about speed. `--count` is the same on any device: the kernel is interpreted, and every load from
a pool adds what it asks for.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kv_cache import Pool
from jpaged.ops import attention
from jpaged.ops.attention import Backend
from jpaged.pallas import common
from jpaged.pallas.decode import paged_decode

P = 16
REPEAT = 20
# name: (sequences, context, query heads, KV heads, head_dim)
SHAPES = {
    "llama3-8b 64 x 1024": (64, 1024, 32, 8, 128),
    "llama3-8b 64 x 4096": (64, 4096, 32, 8, 128),
    "llama3-8b 4 x 16384": (4, 16384, 32, 8, 128),
    "qwen2.5-7b 64 x 1024": (64, 1024, 28, 4, 128),
    "qwen2.5-7b 256 x 1024": (256, 1024, 28, 4, 128),
}
SMALL = {"small 3 x 130": (3, 130, 6, 2, 64), "small 2 x 40": (2, 40, 4, 4, 128)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", action="store_true", help="count bytes instead of measuring times")
    args = parser.parse_args(argv)
    result = {"count": count_bytes()} if args.count else measure()
    print(json.dumps(result))
    return 0


# -- counting -------------------------------------------------------------------------------------


def count_bytes() -> list[dict]:
    """Bytes of K and V that decode asks for, against those of the context, at several table widths."""
    print(f"{'context':>8s} {'width':>6s} {'window':>7s} {'asked':>10s} {'needed':>10s} {'ratio':>7s}")
    rows = []
    for context in (512, 513, 1000, 1023, 2049, 4096):
        for width, window in ((256, None), (2048, None), (256, 512)):
            asked = counted_bytes(context, width, window)
            needed = 2 * min(context, window or context) * 64 * 4
            row = dict(context=context, width=width, window=window, asked=asked, needed=needed)
            row["ratio"] = round(asked / needed, 4)
            print(
                f"{context:8d} {width:6d} {window or '-':>7} {asked:10d} {needed:10d} {row['ratio']:7.4f}",
                flush=True,
            )
            rows.append(row)
    return rows


def counted_bytes(context: int, width: int, window: int | None) -> int:
    """Runs the decode kernel in the interpreter, with loads that report their size."""
    total = 0
    load = common._load

    def counting(fixed: common.Attention, ref, ids: jax.Array, offset: int, size: int, end: int) -> jax.Array:
        columns = min(size, end - offset)  # what lies past the end is masked
        entry = fixed.block_size * columns * jnp.dtype(ref.dtype).itemsize

        def add(blocks: np.ndarray) -> None:
            nonlocal total
            total += blocks.size * entry

        jax.debug.callback(add, ids)
        return load(fixed, ref, ids, offset, size, end)

    blocks = -(-context // P)
    pool = jnp.zeros((blocks + 1, 1, P, 64), jnp.float32)
    tables = np.zeros((1, width), np.int32)
    tables[0, :blocks] = np.arange(1, blocks + 1)
    common._load = counting
    try:
        lens = np.array([context], np.int32)
        options = dict(dtype="float32", window=window, capability=0, interpret=True)
        jax.block_until_ready(paged_decode(jnp.ones((1, 1, 6, 64)), pool, pool, tables, lens, **options))
        jax.effects_barrier()
    finally:
        common._load = load
    return total


# -- measuring ------------------------------------------------------------------------------------


def measure(save: Callable[[dict], None] = lambda result: None) -> dict:
    """Times of every implementation that runs here, on every shape; `save` gets what there is so far."""
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    if not on_gpu:
        print("no GPU: kernels are interpreted on small shapes; the times say nothing about speed")
    dtype = "bfloat16" if on_gpu else "float32"
    copy = copy_bandwidth(1 << 30 if on_gpu else 1 << 24)
    print(f"{device.device_kind}, {dtype}; copy {copy / 1e9:.0f} GB/s (read and write)")
    header = ("kernel", "shape", "implementation", "MB", "us", "GB/s", "of copy")
    print("{:8s} {:24s} {:18s} {:>8s} {:>9s} {:>7s} {:>8s}".format(*header))
    rows: list[dict] = []
    result = dict(device=device.device_kind, dtype=dtype, copy_gb_per_s=round(copy / 1e9, 1), kernels=rows)
    for name, shape in (SHAPES if on_gpu else SMALL).items():
        for kernel, problem in (("decode", decode_problem), ("prefill", prefill_problem)):
            needed, implementations = problem(*shape, dtype=dtype, on_gpu=on_gpu)
            for implementation, call in implementations.items():
                row = dict(kernel=kernel, shape=name, implementation=implementation, bytes=needed)
                try:
                    seconds = best_time(call)
                except Exception as error:  # a peer that does not run here is a row of the table too
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
                    print(f"{kernel:8s} {name:24s} {implementation:18s} {row['error'][:60]}")
                    rows.append(row)
                    continue
                row |= dict(us=round(seconds * 1e6, 1), gb_per_s=round(needed / seconds / 1e9, 1))
                row["of_copy"] = round(needed / seconds / copy, 3)
                print(
                    f"{kernel:8s} {name:24s} {implementation:18s} {needed / 1e6:8.1f} {row['us']:9.1f} "
                    f"{row['gb_per_s']:7.1f} {row['of_copy']:8.3f}",
                    flush=True,
                )
                rows.append(row)
                save(result)
    return result


def best_time(call: Callable[[], jax.Array]) -> float:
    """Seconds per call: the best of three runs of `REPEAT` calls dispatched back to back."""
    jax.block_until_ready(call())
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(REPEAT):
            out = call()
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / REPEAT)
    return best


def copy_bandwidth(size: int) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes."""
    x = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * size / best_time(lambda: copy(x))


def pools_and_tables(num_seqs: int, context: int, kv_heads: int, head_dim: int, dtype: str):
    """Random pools whose blocks belong to the sequences in random order."""
    blocks = -(-context // P)
    keys = jax.random.split(jax.random.key(0), 2)
    shape = (num_seqs * blocks + 1, kv_heads, P, head_dim)
    k_pool, v_pool = (jax.random.normal(key, shape, dtype) for key in keys)
    order = np.random.default_rng(0).permutation(num_seqs * blocks) + 1
    return k_pool, v_pool, jnp.asarray(order.reshape(num_seqs, blocks).astype(np.int32))


def decode_problem(num_seqs, context, heads, kv_heads, head_dim, *, dtype: str, on_gpu: bool):
    """Bytes of K and V, and a call per implementation: one token per sequence."""
    k_pool, v_pool, tables = pools_and_tables(num_seqs, context, kv_heads, head_dim, dtype)
    lens = jnp.full(num_seqs, context, jnp.int32)
    shape = (num_seqs, kv_heads, heads // kv_heads + 2, head_dim)
    qkv = jax.random.normal(jax.random.key(1), shape, jnp.float32)

    def ours(backend: Backend) -> Callable[[], jax.Array]:
        run = jax.jit(functools.partial(attention.paged_decode, backend))
        pools = (Pool(x, None, dtype, dtype) for x in (k_pool, v_pool))
        return functools.partial(run, qkv, *pools, tables, lens)

    calls = {backend.name: ours(backend) for backend in backends()}
    if on_gpu:
        q = attention.split_qkv(qkv)[0].astype(dtype)
        calls["jax paged_attention"] = jax_paged_attention(q, k_pool, v_pool, tables, lens)
        calls["cudnn paged"] = cudnn_paged_attention(q, k_pool, v_pool, tables, lens)
    return 2 * num_seqs * context * kv_heads * head_dim * jnp.dtype(dtype).itemsize, calls


def prefill_problem(num_seqs, context, heads, kv_heads, head_dim, *, dtype: str, on_gpu: bool):
    """The last 2,048 tokens (or all there are) of one context; bytes are those of K and V, once."""
    k_pool, v_pool, tables = pools_and_tables(1, context, kv_heads, head_dim, dtype)
    num_tokens = min(2048, context)
    shape = (num_tokens, kv_heads, heads // kv_heads + 2, head_dim)
    qkv = jax.random.normal(jax.random.key(1), shape, jnp.float32)
    pools = [Pool(x, None, dtype, dtype) for x in (k_pool, v_pool)]
    start, lens = jnp.array([0, num_tokens], jnp.int32), jnp.array([context], jnp.int32)

    def ours(backend: Backend) -> Callable[[], jax.Array]:
        def run(qkv, k_pool, v_pool, tables, start, lens):
            return attention.paged_prefill(backend, tables, start, lens, num_tokens)(qkv, k_pool, v_pool)

        return functools.partial(jax.jit(run), qkv, *pools, tables, start, lens)

    needed = 2 * context * kv_heads * head_dim * jnp.dtype(dtype).itemsize
    return needed, {backend.name: ours(backend) for backend in backends()}


def backends() -> list[Backend]:
    device = jax.devices()[0]
    capability = attention.capability_of(device)
    return [Backend("pallas", capability) if capability else Backend("pallas_interpret"), Backend("xla")]


def jax_paged_attention(q, k_pool, v_pool, tables, lens) -> Callable[[], jax.Array]:
    """jax's own kernel: pools [K, N, P, D]."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    k_pages, v_pages = (jnp.swapaxes(pool, 0, 1).copy() for pool in (k_pool, v_pool))
    run = jax.jit(paged_attention)
    return lambda: run(q, k_pages, v_pages, tables, lens)


def cudnn_paged_attention(q, k_pool, v_pool, tables, lens) -> Callable[[], jax.Array]:
    """cuDNN's: pools as ours without the null block, tables [S, 1, M, 1], one query token per sequence."""

    def run(q, k_pages, v_pages, tables, lens) -> jax.Array:
        from jax._src.cudnn.fused_attention_stablehlo import paged_attention

        ones, scale = jnp.ones_like(lens), q.shape[-1] ** -0.5
        return paged_attention(
            q, k_pages, v_pages, ones, lens, tables, tables, scale=scale, qkv_layout="BNTH"
        )

    compiled = jax.jit(run)
    arguments = (q[:, :, None], k_pool[1:], v_pool[1:], (tables - 1)[:, None, :, None], lens)
    return lambda: compiled(*arguments)


if __name__ == "__main__":
    raise SystemExit(main())
