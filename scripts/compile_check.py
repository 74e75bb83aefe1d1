"""Compiles the kernels and a model's steps for a GPU, on a machine that has none.

Nothing runs: this shows that everything compiles, what each kernel uses and what a step moves, not how
fast it is. Matrix products are not tuned either, so on a real GPU a step may differ by a few launches.
The exit code is 1 if something does not compile, a kernel spills registers or reads K, V or a quantized
matrix in pieces of less than 16 bytes, or a step copies a weight or a pool, or dequantizes a whole matrix.

Needs `pip install jpaged[gpu-compile]`.
Example: `python scripts/compile_check.py --target h200 --model-config llama3-8b`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from jpaged.batch import init_row_state
from jpaged.config import DTYPES, LARGEST, QUANTIZATIONS, EngineConfig, ModelConfig, check_int
from jpaged.engine import steps
from jpaged.engine.packing import Buckets, Packer
from jpaged.engine.sizing import Sizes, device_pool_bytes, resolve_sizes
from jpaged.gpu_compile import (
    ENVIRONMENT,
    TARGETS,
    Compiler,
    Program,
    Target,
    check_plugin,
    count_launches,
    dump_flags,
    pool_operands,
)
from jpaged.kv_cache import KVLayout, bytes_per_block, bytes_per_token, init_kv_cache
from jpaged.models.transformer import Params, abstract_params
from jpaged.ops import attention
from jpaged.ops.attention import Backend
from jpaged.ops.quantized import QuantizedMatrix
from jpaged.ops.sampling import Variant
from jpaged.pallas.add_norm import add_norm
from jpaged.pallas.common import Attention, addressable_blocks, cap_splits
from jpaged.pallas.decode import default_tuning
from jpaged.pallas.quantized_matmul import quantized_matmul
from jpaged.presets import PRESETS, preset

TIMEOUT_S = 900  # of one compilation
LEAST_LOAD_BYTES = 16  # or what a token's bytes are a multiple of: 8 for int4 values at head_dim 80
KV_DTYPES = ("bfloat16", "float32", "float16", *LARGEST)
WEIGHTS = ("bf16", *QUANTIZATIONS)
STEPS = ("decode_step", "prefill_step")
TRAFFIC = "decode_traffic"
TRAFFIC_SEQS, TRAFFIC_CONTEXT = 64, 2048
# Each process is forked from one that has imported what takes long and done nothing.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["jpaged.engine.steps", "jpaged.gpu_compile"])


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel of attention and its shapes."""

    operation: str  # decode, prefill or write
    head_dim: int
    group: int
    pool: str  # format of the KV cache
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None

    @property
    def shape(self) -> str:
        values = [f"d{self.head_dim}", f"g{self.group}", self.pool]
        values += [f"p{self.block_size}"] * (self.block_size != 16)
        return " ".join(values + ["window"] * bool(self.window) + ["soft_cap"] * bool(self.soft_cap))

    @property
    def name(self) -> str:
        return f"{self.operation} {self.shape}"


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A product with a quantized matrix and its shapes."""

    rows: int
    columns: int
    bits: int
    group: int
    num_tokens: int = 32
    dtype: str = "bfloat16"
    operation: str = dataclasses.field(default="matmul", init=False)

    @property
    def shape(self) -> str:
        group = "" if self.group == self.rows else f" g{self.group}"
        return f"int{self.bits}{group} {self.rows}x{self.columns} t{self.num_tokens} {self.dtype}"

    @property
    def name(self) -> str:
        return f"{self.operation} {self.shape}"


@dataclasses.dataclass(frozen=True)
class AddNorm:
    """A sum of parts and the residual, and its norm."""

    width: int
    parts: int
    dtype: str = "bfloat16"
    has_bias: bool = False
    operation: str = dataclasses.field(default="add", init=False)

    @property
    def shape(self) -> str:
        return f"{self.width} x{self.parts} {self.dtype}" + " bias" * self.has_bias

    @property
    def name(self) -> str:
        return f"{self.operation} {self.shape}"


def select_cases(quick: bool) -> list[Case | Matmul | AddNorm]:
    """What is compiled: attention, writes, products with quantized matrices, and sums with norms.

    Args:
      quick: the shapes of the presets alone, writes of every quantized format, a product of each kind.
    """
    return [*attention_cases(quick), *matmul_cases(quick), *add_norm_cases(quick)]


def add_norm_cases(quick: bool) -> list[AddNorm]:
    """Widths of the presets, from one part to the most that there are."""
    if quick:
        return [AddNorm(3584, 8)]
    cases = [AddNorm(width, parts) for width in (576, 896, 1536, 3584, 4096, 8192) for parts in (1, 4, 8)]
    return [
        *cases,
        AddNorm(3584, 10),
        AddNorm(3584, 4, "float32"),
        AddNorm(3584, 4, "float16", has_bias=True),
    ]


def matmul_cases(quick: bool) -> list[Matmul]:
    """Widths of the presets in each format, then other numbers of tokens, groups and dtypes."""
    wide = [Matmul(18944, 3584, 4, 128), Matmul(18944, 3584, 8, 18944)]
    if quick:
        return wide
    shapes = [(576, 960, 64), (896, 1152, 128), (1536, 17920, 128), (3584, 4608, 128), (3584, 3584, 128)]
    shapes += [(3584, 37888, 128), (4096, 28672, 128), (14336, 4096, 128)]
    cases = wide + [Matmul(E, X, *format) for E, X, group in shapes for format in ((4, group), (8, E))]
    formats = [(4, 128), (4, 64), (4, 32), (8, 3584), (8, 128), (8, 64), (8, 32)]
    cases += [Matmul(3584, 3584, *format, num_tokens=64) for format in formats]
    cases += [Matmul(3584, 3584, *format, num_tokens=1) for format in ((4, 128), (8, 3584))]
    cases += [Matmul(576, columns, 4, 32) for columns in (96, 192)]
    for dtype in ("float16", "float32"):
        cases += [Matmul(3584, 3584, *format, 64, dtype) for format in ((4, 128), (4, 32), (8, 3584))]
    return cases


def attention_cases(quick: bool) -> list[Case]:
    """Every dtype of the pool meets every head_dim and every group size."""
    both = ("decode", "prefill")
    common = [(128, 4, "bfloat16"), (128, 7, "bfloat16"), (64, 3, "bfloat16"), (128, 4, "int8")]
    if quick:
        writes = [Case("write", 128, 4, pool) for pool in ("bfloat16", *LARGEST)]
        return [Case(o, *shape) for shape in common for o in both] + writes
    head_dims, groups = (64, 80, 96, 128, 256), (3, 1, 7, 4, 8)
    dtypes = ("bfloat16", "float32", "int8", "fp8_e4m3", "int4")
    square = [(d, groups[(i + j) % 5], t) for i, t in enumerate(dtypes) for j, d in enumerate(head_dims)]
    cases = [Case(o, *shape) for shape in dict.fromkeys(common + square) for o in both]
    cases += [Case("write", d, 4, t) for t in dtypes for d in head_dims]
    cases += [Case(o, 128, 4, "float16") for o in (*both, "write")]
    plain = [Case(o, 128, 4, "bfloat16") for o in both]
    changes: list[dict[str, Any]] = [dict(window=1000), dict(soft_cap=50.0), dict(block_size=32)]
    return cases + [dataclasses.replace(case, **change) for change in changes for case in plain]


# -- compiling one thing, in a process of its own -------------------------------------------------


def compile_case(compiler: Compiler, case: Case | Matmul | AddNorm) -> list[dict[str, Any]]:
    """A record for each GPU kernel of the case."""
    if isinstance(case, Matmul):
        return compile_matmul(compiler, case)
    if isinstance(case, AddNorm):
        return compile_add_norm(compiler, case)
    kv_heads, tokens, seqs, width, num_blocks = 2, 256, 32, 128, 8191
    config = preset("llama3-8b").replace(
        num_layers=1,
        layer_windows=(),
        num_heads=case.group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=case.head_dim,
    )
    layout = kv_layout(config, case.pool)
    cache = jax.eval_shape(lambda: init_kv_cache(config, num_blocks, case.block_size, layout, "gpu"))
    pools = jax.tree.map(lambda x: compiler.array(x.shape, x.dtype), (cache.k[0], cache.v[0]))
    backend = Backend("pallas", compiler.target.capability)
    decode = case.operation == "decode"
    masks = dict(window=case.window, soft_cap=case.soft_cap)
    lens, tables = compiler.array((seqs,), "int32"), compiler.array((seqs, width), "int32")
    rows = seqs if decode else tokens
    qkv = compiler.array((rows, kv_heads, case.group + 2, case.head_dim), "float32")
    if case.operation == "write":
        function = jax.jit(functools.partial(attention.write_kv, backend), donate_argnums=(0, 1))
        arguments = [*pools, qkv, compiler.array((tokens,), "int32")]
    elif decode:
        function = jax.jit(functools.partial(attention.paged_decode, backend, **masks))
        arguments = [qkv, *pools, tables, lens]
    else:

        def prefill(qkv, k_pool, v_pool, tables, query_start, lens):
            attend = attention.paged_prefill(backend, tables, query_start, lens, tokens)
            return attend(qkv, k_pool, v_pool, **masks)

        function = jax.jit(prefill)
        arguments = [qkv, *pools, tables, compiler.array((seqs + 1,), "int32"), lens]
    program = compiler.compile(function, *arguments).as_text()
    row_bytes = [pool.data.shape[-1] * pool.data.dtype.itemsize for pool in pools]
    least = min(LEAST_LOAD_BYTES, *(size & -size for size in row_bytes))
    return kernel_records(compiler, case, program, {pool.data.size for pool in pools}, least)


def compile_matmul(compiler: Compiler, case: Matmul) -> list[dict[str, Any]]:
    """A record for the kernel."""
    factors = (case.rows // case.group, case.columns)
    data = compiler.array((case.rows * case.bits // 8, case.columns), "int8" if case.bits == 8 else "uint8")
    zero = compiler.array(factors, "uint8") if case.bits == 4 else None
    x, scale = compiler.array((case.num_tokens, case.rows), case.dtype), compiler.array(factors, "float32")
    function = jax.jit(functools.partial(quantized_matmul, bits=case.bits, group=case.group))
    return kernel_records(
        compiler,
        case,
        compiler.compile(function, x, data, scale, zero).as_text(),
        {data.size},
        LEAST_LOAD_BYTES,
    )


def compile_add_norm(compiler: Compiler, case: AddNorm) -> list[dict[str, Any]]:
    """A record for the kernel."""
    rows = 64
    parts = compiler.array((case.parts, rows, case.width), case.dtype)
    vector = compiler.array((case.width,), case.dtype)
    program = compiler.compile(
        jax.jit(functools.partial(add_norm, eps=1e-6)),
        compiler.array((rows, case.width), "float32"),
        parts,
        vector if case.has_bias else None,
        vector,
    )
    return kernel_records(compiler, case, program.as_text(), {parts.size}, LEAST_LOAD_BYTES)


def kernel_records(
    compiler: Compiler, case: Case | Matmul | AddNorm, program: str, sizes: set[int], least_load_bytes: int
) -> list[dict[str, Any]]:
    """A record for each GPU kernel of a program; loads from operands of `sizes` entries are counted."""
    found = compiler.kernels(pool_operands(program, sizes))
    if not found or (case.operation != "write" and not any(record["loads"] for record in found.values())):
        raise RuntimeError(f"of the kernels {list(found)} none is seen to read what it must")
    return [
        {"name": f"{name} {case.shape}", "least_load_bytes": least_load_bytes} | record
        for name, record in found.items()
    ]


def kv_layout(config: ModelConfig, kv_dtype: str) -> KVLayout:
    """How keys and values are stored; weights have the pools' dtype where that is a float."""
    return KVLayout.of(config, kv_dtype if kv_dtype in DTYPES else config.dtype, kv_dtype)


def whole_matrices(
    program: Program, params: Params, num_tokens: int
) -> tuple[tuple[str, ...], list[tuple[str, int]]]:
    """Copies of whole quantized matrices, dequantized or not.

    They are found by size: arrays with as many entries as a matrix. Floats of a size that activations of
    `num_tokens` tokens have too are not looked for.

    Returns:
      prefixes of the matrices' labels in the program; (what, bytes written) of each copy.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, QuantizedMatrix))
    matrices = {
        f"params{jax.tree_util.keystr(path)}.": x for path, x in leaves if isinstance(x, QuantizedMatrix)
    }
    widths = {x.data.shape[1] for x in matrices.values()}
    entries = {x.data.size for x in matrices.values()}
    values = {x.data.size * 8 // x.bits for x in matrices.values()}
    floats = values - {num_tokens * width for width in widths}
    found = [
        (f"a quantized matrix in {instruction}", size)
        for instruction, dtype, count, size in program.written()
        if count in (floats if dtype in ("bf16", "f16", "f32") else entries | values)
    ]
    return tuple(matrices), found


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step."""

    compiled: Any
    config: ModelConfig
    layout: KVLayout
    params: Params
    sizes: Sizes

    @property
    def weight_bytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.params))


def compiled_step(compiler: Compiler, name: str, args: argparse.Namespace, max_num_seqs: int | None) -> Step:
    """Compiles the largest bucket of a step, sized as an engine would be on this GPU.

    `decode_step` is the greedy variant; `prefill_step` the full one, whose temporaries an engine
    subtracts from its memory.
    """
    config, engine = preset(args.model_config), EngineConfig(max_num_seqs=max_num_seqs)
    layout = kv_layout(config, args.kv_dtype)
    params = abstract_params(config, layout.dtype, None if args.weights == "bf16" else args.weights)
    weight_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    block_bytes = bytes_per_block(config, engine.block_size, layout)
    left = pool_bytes(compiler.target, weight_bytes, 1 << 30)
    left = max(left, 1024 * block_bytes)  # a model that does not fit is compiled all the same
    sizes = resolve_sizes(config, engine, layout=layout, platform="gpu", pool_bytes=left)
    num_blocks = sizes.num_kv_blocks + 1
    decode, ragged = name == "decode_step", (sizes.max_num_batched_tokens, sizes.max_num_seqs)
    packer = Packer(
        Buckets((sizes.max_num_seqs,), ()) if decode else Buckets((), (ragged,)),
        max_num_seqs=sizes.max_num_seqs,
        table_width=sizes.table_width,
        block_size=sizes.block_size,
        vocab_size=config.vocab_size,
    )
    cache = jax.eval_shape(lambda: init_kv_cache(config, num_blocks, sizes.block_size, layout, "gpu"))
    state = jax.eval_shape(lambda: init_row_state(sizes.max_num_seqs, config.vocab_size))
    arguments = jax.tree.map(
        lambda x: compiler.array(x.shape, x.dtype), (params, cache, state, packer.padding_batch())
    )
    options: dict[str, Any] = dict(config=config, backend=Backend("pallas", compiler.target.capability))
    if decode:
        compiled = compiler.compile(steps.decode_step, *arguments, **options, variant=Variant.GREEDY)
    else:
        options |= dict(variant=Variant.FULL, deterministic=False)
        compiled = compiler.compile(steps.prefill_step, *arguments, **options)
    return Step(compiled, config, layout, params, sizes)


def compile_step(compiler: Compiler, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a step needs, launches and copies."""
    step = compiled_step(compiler, name, args, args.max_num_seqs)
    compiled, sizes = step.compiled, step.sizes
    num_blocks = sizes.num_kv_blocks + 1
    block_bytes = bytes_per_block(step.config, sizes.block_size, step.layout)
    memory, program = compiled.memory_analysis(), Program(compiled.as_text())
    others = sum(p.bytes for p in program.parameters() if not p.label.startswith("cache."))
    pools, expected = memory.argument_size_in_bytes - others, num_blocks * block_bytes
    if pools != expected:
        raise RuntimeError(f"the pools take {pools} bytes where bytes_per_block says {expected}")
    if memory.alias_size_in_bytes < pools:
        raise RuntimeError(
            f"only {memory.alias_size_in_bytes} bytes of the pools' {pools} are updated in place"
        )
    state = jax.eval_shape(lambda: init_row_state(sizes.max_num_seqs, step.config.vocab_size))
    num_tokens = sizes.max_num_seqs if name == "decode_step" else sizes.max_num_batched_tokens
    quantized, whole = whole_matrices(program, step.params, num_tokens)
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "launches": count_launches(compiler.thunks),
        "copies": program.copies(("params.", "cache."), but=quantized) + whole,
        "weight_bytes": step.weight_bytes,
        "state_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
    }


def measure_traffic(compiler: Compiler, args: argparse.Namespace) -> dict[str, Any]:
    """What a decode step of `TRAFFIC_SEQS` sequences with contexts of `TRAFFIC_CONTEXT` tokens moves.

    Returns:
      `layer`: (name, bytes) of each launch of a layer in the middle, from its first product on;
      `traffic_bytes`: see `Program.launches`; `floor_bytes`: every weight, the contexts' keys and values,
      and the logits, once.
    """
    step = compiled_step(compiler, "decode_step", args, TRAFFIC_SEQS)
    config = step.config
    launches = Program(step.compiled.as_text()).launches(kernel_bytes(step, compiler.target))

    def first_of(layer: int) -> int:
        prefix = f"params.layers[{layer}].wqkv"
        reads = (any(label.startswith(prefix) for label in launch.arguments) for launch in launches)
        return next((i for i, found in enumerate(reads) if found), len(launches))

    middle = config.num_layers // 2 - 1
    layer = launches[first_of(middle) : first_of(middle + 1)]
    embedding = step.params.embed.size * step.params.embed.dtype.itemsize
    floor = step.weight_bytes - (0 if config.tie_word_embeddings else embedding)
    floor += TRAFFIC_SEQS * TRAFFIC_CONTEXT * bytes_per_token(config, step.layout)
    floor += TRAFFIC_SEQS * config.vocab_size * 4
    return {
        "layer": [(launch.name, launch.bytes) for launch in layer],
        "traffic_bytes": sum(launch.bytes for launch in launches),
        "floor_bytes": floor,
    }


def kernel_bytes(step: Step, target: Target) -> dict[str, Callable[[list[int], list[int]], int]]:
    """What kernels move that need not all of their operands: see `Program.launches`.

    Decode reads the queries, the context in the pools and the table, and writes and merges the ranges
    that a context is cut into. No preset has a window below `TRAFFIC_CONTEXT`.
    """
    config, layout, sizes = step.config, step.layout, step.sizes
    blocks = -(-TRAFFIC_CONTEXT // sizes.block_size)
    fixed = Attention(
        group=config.group_size,
        head_dim=config.head_dim,
        block_size=sizes.block_size,
        dtype=layout.dtype,
        quantized=layout.k[0] in LARGEST,
        packed_values=layout.v[0] == "int4",
        capability=target.capability,
        window=None,
        soft_cap=None,
    )
    tuning = cap_splits(default_tuning(fixed), sizes.table_width)
    tiles = -(-blocks // (tuning.tile_blocks * tuning.max_splits))
    ranges = -(-blocks // max(tiles * tuning.tile_blocks, tuning.split_blocks))
    slots = (sizes.num_kv_blocks + 1) * sizes.block_size

    def decode(operands: list[int], results: list[int]) -> int:
        qkv, *pools, table, lengths = operands
        read = qkv * fixed.group // fixed.head_rows + table * blocks // sizes.table_width + lengths
        read += sum(pools) * TRAFFIC_SEQS * TRAFFIC_CONTEXT // slots
        return read + sum(results) * ranges // tuning.max_splits

    def merge(operands: list[int], results: list[int]) -> int:
        lengths, *partials = operands
        return lengths + sum(partials) * ranges // tuning.max_splits + sum(results)

    def write(operands: list[int], results: list[int]) -> int:
        qkv, new_slots, *_ = operands
        return qkv * 2 // fixed.head_rows + new_slots + sum(results) * TRAFFIC_SEQS // slots

    kernels = {"paged_decode": decode, "paged_decode_merge": merge}
    return kernels | {"write_kv": write, "write_quantized_kv": write}


def pool_bytes(target: Target, weight_bytes: int, temporary_bytes: int) -> int:
    """What is left for the pool on this GPU; 0 if nothing is."""
    device: Any = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": target.memory})
    try:
        utilization = EngineConfig().gpu_memory_utilization
        return device_pool_bytes(device, utilization, weight_bytes, temporary_bytes) or 0
    except ValueError:
        return 0


# -- compiling everything -------------------------------------------------------------------------


def in_process(name: str, args: argparse.Namespace) -> tuple[Any, str | None]:
    """What a process of its own found for `name`, or why there is nothing."""
    with tempfile.TemporaryDirectory() as dump:
        receiver, sender = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=work, args=(name, Path(dump), args, sender))
        process.start()
        sender.close()
        if not receiver.poll(TIMEOUT_S):
            process.kill()
            return None, f"does not compile within {TIMEOUT_S} s"
        try:
            return receiver.recv()
        except EOFError:
            process.join()
            said = (Path(dump) / "stderr").read_text().strip().splitlines() or ["it said nothing"]
            telling = [line for line in said if re.search("error|fatal|failed", line, re.I)] or said[-1:]
            return None, f"the compiler ended with exit code {process.exitcode}: {telling[0][:500]}"


def work(name: str, dump: Path, args: argparse.Namespace, sender: Connection) -> None:
    """Compiles one thing in a fresh process and sends what was found, or why there is nothing."""
    os.environ["XLA_FLAGS"] = dump_flags(dump)
    with open(dump / "stderr", "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        compiler = Compiler(TARGETS[args.target], dump)
        found: Any
        if name in STEPS:
            found = compile_step(compiler, name, args)
        elif name == TRAFFIC:
            found = measure_traffic(compiler, args)
        else:
            found = compile_case(compiler, next(case for case in select_cases(False) if case.name == name))
        sender.send((found, None))
    except Exception as error:
        sender.send((None, f"does not compile: {type(error).__name__}: {error}"[:500]))


def find_problems(kernels: list[dict[str, Any]], found_steps: dict[str, dict[str, Any]]) -> list[str]:
    """What must not be, by name."""
    problems = []
    for kernel in kernels:
        if kernel["spill_bytes"]:
            problems.append(f"{kernel['name']}: spills {kernel['spill_bytes']} bytes")
        narrow = {
            int(width): count
            for width, count in kernel["loads"].items()
            if int(width) < kernel["least_load_bytes"]
        }
        if narrow:
            total = sum(kernel["loads"].values())
            parts = ", ".join(f"{count} of {width} bytes" for width, count in narrow.items())
            problems.append(f"{kernel['name']}: of {total} loads of K, V or a matrix {parts}")
    for name, step in found_steps.items():
        problems += [f"{name}: copies {what} ({size} bytes)" for what, size in step["copies"]]
    return problems


def kernel_record(kernel: dict[str, Any]) -> dict[str, Any]:
    """As it is reported: `global_load_bytes` is the narrowest load of K, V or a matrix, if any."""
    used = {key: kernel[key] for key in ("name", "registers", "spill_bytes", "shared_bytes")}
    narrowest = min(kernel["loads"], default=None)
    return used | {"global_load_bytes": narrowest, "mma": kernel["mma"], "tf32": kernel["tf32"]}


def step_record(step: dict[str, Any]) -> dict[str, int]:
    """As it is reported."""
    names = ("argument_bytes", "alias_bytes", "temp_bytes", "launches")
    return {name: step[name] for name in names} | {"copied_bytes": sum(size for _, size in step["copies"])}


def traffic_record(traffic: dict[str, Any]) -> dict[str, int]:
    """As it is reported."""
    numbers = {name: traffic[name] for name in ("traffic_bytes", "floor_bytes")}
    return {"launches_per_layer": len(traffic["layer"])} | numbers


def kv_tokens_fit(args: argparse.Namespace, found_steps: dict[str, dict[str, Any]]) -> int:
    """Tokens of the largest pool that fits beside the weights and the largest temporaries."""
    step = found_steps[STEPS[0]]
    temporary_bytes = max(step["temp_bytes"] for step in found_steps.values())
    left = pool_bytes(TARGETS[args.target], step["weight_bytes"] + step["state_bytes"], temporary_bytes)
    size, config = EngineConfig().block_size, preset(args.model_config)
    blocks = left // bytes_per_block(config, size, kv_layout(config, args.kv_dtype))
    return max(0, min(blocks, addressable_blocks(config, size)) - 1) * size  # less the null block


def print_report(report: dict[str, Any], traffic: dict[str, Any] | None) -> None:
    print(f"{report['target']}, jax {report['jax']}\n")
    row = "{:44} {:>9} {:>7} {:>7} {:>9}  {}"
    print(row.format("kernel", "registers", "spilled", "shared", "loads", "tensor cores"))
    for kernel in report["kernels"]:
        _, registers, spilled, shared, loads, mma, _ = kernel.values()
        print(row.format(kernel["name"], registers, spilled, shared, loads or "-", ", ".join(mma) or "-"))
    row = "{:14} {:>14} {:>14} {:>12} {:>9} {:>12}"
    print("\n" + row.format("step", "arguments", "aliased", "temporaries", "launches", "copied"))
    for name, step in report["steps"].items():
        print(row.format(name, *list(step.values())[:5]))
    if traffic is not None:
        moved, floor = traffic["traffic_bytes"], traffic["floor_bytes"]
        print(f"\ndecode of {TRAFFIC_SEQS} sequences with contexts of {TRAFFIC_CONTEXT} tokens:")
        print(f"{moved} bytes, {moved / floor:.4f} of the floor of {floor}")
        print(f"a layer is {len(traffic['layer'])} launches:")
        for name, size in traffic["layer"]:
            print(f"  {name:40} {size / 1e6:10.3f} MB")
    if report["kv_tokens_fit"] is not None:
        print(f"\ntokens of KV cache that fit beside the weights: {report['kv_tokens_fit']}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--model-config", choices=PRESETS, default="llama3-8b", help="of the steps")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16", help="of the steps' pools")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="of the steps; quantized or not")
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=EngineConfig().max_num_seqs,
        help="of the steps: sequences of the largest decode batch",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--kernels-only", action="store_true")
    part.add_argument("--steps-only", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the presets' kernels, not the whole matrix")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        check_int("jobs", args.jobs, low=1)
        check_plugin()
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    os.environ |= ENVIRONMENT
    names = [] if args.kernels_only else [*STEPS, TRAFFIC]
    names += [] if args.steps_only else [case.name for case in select_cases(args.quick)]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = dict(zip(names, pool.map(lambda name: in_process(name, args), names), strict=True))
    values = {name: value for name, (value, error) in results.items() if error is None}
    found_steps = {name: values.pop(name) for name in STEPS if name in values}
    traffic = values.pop(TRAFFIC, None)
    kernels = [record for records in values.values() for record in records]
    problems = [f"{name}: {error}" for name, (_, error) in results.items() if error is not None]
    problems += find_problems(kernels, found_steps)
    report = {
        "target": args.target,
        "jax": jax.__version__,
        "kernels": list(map(kernel_record, kernels)),
        "steps": {name: step_record(step) for name, step in found_steps.items()},
        "kv_tokens_fit": kv_tokens_fit(args, found_steps) if len(found_steps) == len(STEPS) else None,
    }
    if traffic is not None and "decode_step" in report["steps"]:
        report["steps"]["decode_step"] |= traffic_record(traffic)
    print(json.dumps(report)) if args.json else print_report(report, traffic)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
