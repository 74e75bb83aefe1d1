"""Products of float32 matrices on a CPU, compiled by Numba and called by XLA.

XLA's own products bring an operand into another order each time, which for few rows takes longer than the
product. Here the matrix is stored in that order once, in panels of as many columns as two vectors hold. A
tile of 6 rows and one panel is held in vector registers while it is summed: the micro-kernel of Goto and van
de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.

Each entry of the result is summed in the same order whatever the number of rows, tiles or threads is: rows do
not depend on what else is in the batch, bit by bit. And rows that are padding are not computed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from jpaged.ops import native
from jpaged.ops.native import compiled

LANES = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
"""Numbers in a vector."""

PANEL = 2 * LANES
"""Columns of a panel. With 6 rows that is 12 vectors of sums; 3 are multiplied. Most CPUs have 16 or 32."""

TILE_ROWS = 6
DEPTH = 768  # rows of a panel that are multiplied at once; longer sums would be less exact
BLOCK_BYTES = 200_000  # of x that stay in a core's second cache while panels pass
PART_WORK = 1 << 18  # multiplications that are worth the trouble of another part

_TARGET = "jpaged_product"
_part_pointer = native.pointer_to(_TARGET)


def packed(w: np.ndarray) -> np.ndarray:
    """The panels of a matrix float32 [E, X], the last filled up with zeros: [ceil(X / PANEL), E, PANEL]."""
    padded = np.pad(w, ((0, 0), (0, -w.shape[1] % PANEL)))
    return np.ascontiguousarray(padded.reshape(len(w), -1, PANEL).swapaxes(0, 1))


def product(x: jax.Array, panels: jax.Array, columns: int, num_rows: jax.Array | None = None) -> jax.Array:
    """`x @ w` with the panels of a matrix w [E, X]: float32 x [T, E] -> float32 [T, X].

    Args:
      columns: X.
      num_rows: int32 [], of x that matter, the first ones; the result has zeros for the others.
    """
    native.register(_TARGET, _handler, _run_part)
    num_rows = jnp.asarray(x.shape[0] if num_rows is None else num_rows, jnp.int32)
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32))
    return call(x, panels, num_rows)


# -- what XLA calls ---------------------------------------------------------------------------


def _handler(frame: int) -> int:
    if not native.answered(frame):
        native.run_parts(frame, _work(frame) // PART_WORK, _part_pointer())
    return 0


@compiled
def _work(frame: int) -> int:
    """Multiplications of a call."""
    arguments = native.operands(frame, 3)
    _, shape = native.buffer(arguments[1], 3)
    return _num_rows(arguments[2]) * shape[0] * shape[1] * shape[2]


@compiled
def _num_rows(address: int) -> int:
    data, _ = native.buffer(address, 0)
    return np.int64(numba.carray(data, (1,), np.int32)[0])  # type: ignore[return-value]


def _run_part(task: int) -> int:
    """Reads a call frame, and computes the `part`-th of as many ranges of panels."""
    frame, part, parts = native.words(task, 3)
    arguments = native.operands(frame, 3)
    x_data, x_shape = native.buffer(arguments[0], 2)
    w_data, w_shape = native.buffer(arguments[1], 3)
    y_data, y_shape = native.buffer(native.result(frame), 2)
    x = numba.carray(x_data, (x_shape[0], x_shape[1]), np.float32)
    panels = numba.carray(w_data, (w_shape[0], w_shape[1], w_shape[2]), np.float32)
    y = numba.carray(y_data, (y_shape[0], y_shape[1]), np.float32)
    num_rows = _num_rows(arguments[2])
    first, last = len(panels) * part // parts, len(panels) * (part + 1) // parts
    y[num_rows:, first * PANEL : last * PANEL] = 0
    _multiply(x[:num_rows], panels, y, first, last)
    return 0


# -- the product ------------------------------------------------------------------------------


@compiled
def _multiply(x: np.ndarray, panels: np.ndarray, y: np.ndarray, first: int, last: int) -> None:
    """The columns of panels [first, last) of y = x @ w: [T, E], [panels, E, PANEL], [T, X]."""
    num_rows, E = x.shape
    X = y.shape[1]
    block = max(TILE_ROWS, BLOCK_BYTES // (4 * E))
    room = np.empty(
        (TILE_ROWS, PANEL), np.float32
    )  # for the last panel, which may have columns that y has not
    for start in range(0, num_rows, block):
        end = min(num_rows, start + block)
        num_tiles = (end - start + TILE_ROWS - 1) // TILE_ROWS
        for panel in range(first, last):
            column = panel * PANEL
            for depth in range(0, E, DEPTH):
                count = min(DEPTH, E - depth)
                w_start = native.address_of(panels[panel, depth])
                for tile in range(num_tiles):
                    top = start + (end - start) * tile // num_tiles
                    bottom = start + (end - start) * (tile + 1) // num_tiles
                    x_start = native.address_of(x) + 4 * (top * E + depth)
                    # Each tile asks for its share of the memory that is read next.
                    share = 4 * PANEL // num_tiles
                    coming = w_start + count * (4 * PANEL + tile * share)
                    if column + PANEL <= X:
                        y_start = native.address_of(y) + 4 * (top * X + column)
                        _add_tile(
                            bottom - top, x_start, w_start, y_start, count, E, X, depth == 0, coming, share
                        )
                        continue
                    y_start = native.address_of(room)
                    _add_tile(bottom - top, x_start, w_start, y_start, count, E, PANEL, True, coming, share)
                    if depth == 0:
                        y[top:bottom, column:] = room[: bottom - top, : X - column]
                    else:
                        y[top:bottom, column:] += room[: bottom - top, : X - column]


@compiled
def _add_tile(
    rows: int,
    x: int,
    w: int,
    y: int,
    count: int,
    E: int,
    X: int,
    is_first: bool,
    coming: int,
    share: int,
) -> None:
    """Adds x [rows, count] @ w [count, PANEL] to y [rows, PANEL], or with `is_first` puts it there.

    Args:
      x, w, y: addresses; rows of x and y are E and X numbers apart.
      coming, share: the address of what will be needed soon, and its bytes for each row of w.
    """
    if rows == 6:
        _tile_6(x, w, y, count, E, X, is_first, coming, share)
    elif rows == 5:
        _tile_5(x, w, y, count, E, X, is_first, coming, share)
    elif rows == 4:
        _tile_4(x, w, y, count, E, X, is_first, coming, share)
    elif rows == 3:
        _tile_3(x, w, y, count, E, X, is_first, coming, share)
    elif rows == 2:
        _tile_2(x, w, y, count, E, X, is_first, coming, share)
    else:
        _tile_1(x, w, y, count, E, X, is_first, coming, share)


def _tile(rows: int) -> Any:
    """`_add_tile` of so many rows, as LLVM's instructions: no loop makes it keep the sums in registers."""
    number, vector = ir.FloatType(), ir.VectorType(ir.FloatType(), LANES)
    integer, small = ir.IntType(64), ir.IntType(32)
    multiply_add_type = ir.FunctionType(vector, [vector] * 3)
    prefetch_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, small, small, small])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, w, y, count, E, X, is_first, coming, share = arguments
        function = functools.partial(cgutils.get_or_insert_function, builder.module)
        multiply_add = function(multiply_add_type, f"llvm.fma.v{LANES}f32")
        prefetch = function(prefetch_type, "llvm.prefetch.p0")

        def at(start: Any, stride: Any, index: int) -> Any:
            offset = builder.mul(stride, integer(4 * index))
            return builder.inttoptr(builder.add(start, offset), number.as_pointer())

        def vector_at(pointer: Any, index: Any) -> Any:
            return builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())

        def broadcast(value: Any) -> Any:
            single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, small(0))
            return builder.shuffle_vector(single, single, ir.VectorType(small, LANES)([0] * LANES))

        panel = builder.inttoptr(w, number.as_pointer())
        x_rows = [at(x, E, i) for i in range(rows)]
        zero = vector([0.0] * LANES)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in range(rows)]
        with cgutils.for_range(builder, count) as loop:
            address = builder.add(coming, builder.mul(loop.index, share))
            address = builder.inttoptr(address, cgutils.voidptr_t)
            builder.call(prefetch, [address, small(0), small(2), small(1)])  # to read, second cache, data
            offset = builder.mul(loop.index, integer(PANEL))
            right = [
                builder.load(vector_at(panel, builder.add(offset, integer(half * LANES))), align=4)
                for half in range(2)
            ]
            for i in range(rows):
                left = broadcast(builder.load(builder.gep(x_rows[i], [loop.index])))
                for half in range(2):
                    total = builder.load(sums[i][half])
                    builder.store(builder.call(multiply_add, [left, right[half], total]), sums[i][half])
        for i in range(rows):
            for half in range(2):
                target = vector_at(at(y, X, i), integer(half * LANES))
                total = builder.load(sums[i][half])
                with builder.if_else(is_first) as (then, otherwise):
                    with then:
                        builder.store(total, target, align=4)
                    with otherwise:
                        builder.store(builder.fadd(builder.load(target, align=4), total), target, align=4)
        return context.get_dummy_value()

    @native.intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        w: Any,
        y: Any,
        count: Any,
        E: Any,
        X: Any,
        is_first: Any,
        coming: Any,
        share: Any,
    ) -> Any:
        integers = [types.int64] * 6
        return types.void(*integers, types.boolean, types.int64, types.int64), generate

    return tile


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_tile(rows) for rows in range(1, TILE_ROWS + 1))
