"""Products of a few rows with a matrix of 8- or 4-bit integers, read once and dequantized in registers.

A program holds a tile of columns and walks a range of the matrix's rows, a group that shares a scale at a
time. Operands of the products are the integers themselves, exact in every operand dtype; scale and zero
point meet the float32 sums: `(x @ q - sum(x) * zero) * scale`. The rows of x go through in tiles of
`TILE_ROWS`, however many there are, and where a matrix is split depends on its own shape alone: a row's
sums have one order whatever runs beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from jpaged.pallas.common import MIN_ROWS, OPERAND_DTYPES, load_rows, whole

MAX_ROWS = 64
"""Rows of x that a product may have: a program keeps the sums of all of them in registers."""

TILE_ROWS = MIN_ROWS

_PROGRAMS = 256  # that a narrow matrix is split into: about two for each core of a large GPU
_SPLIT_ROWS = 512  # least rows of a range, so that adding ranges up stays cheap


@dataclasses.dataclass(frozen=True)
class Matrix:
    """What is fixed of a quantized matrix [rows, columns] when the kernel is traced.

    Attributes:
      bits: 8, or 4: two values in a byte; of a group's rows the first half is in the low bits.
      group: rows that share a scale; all of them, or 128, 64 or 32.
      dtype: of the operands of products.
    """

    rows: int
    columns: int
    bits: int
    group: int
    dtype: str

    @property
    def per_channel(self) -> bool:
        """Whether a column has one scale, which is applied at the end."""
        return self.bits == 8 and self.group == self.rows

    @property
    def step(self) -> int:
        """Rows that are walked at a time."""
        return min(64, _largest_divisor(self.rows)) if self.per_channel else self.group

    @property
    def halves(self) -> int:
        """Values in an entry of the data."""
        return 8 // self.bits


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
      columns: of a program; a power of two that divides the matrix's.
      depth: rows of the data that are loaded and multiplied at a time; a power of two.
      splits: ranges of rows, each summed by programs of its own.
      num_warps, num_stages: as Triton means them.
    """

    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("columns", "depth"):
            if getattr(self, name) & (getattr(self, name) - 1):
                raise ValueError(f"{name}={getattr(self, name)} must be a power of two")


def default_tuning(fixed: Matrix) -> Tuning:
    """Wide tiles, no more warps than leave 16 bytes of a tile to a thread, and few ranges."""
    columns, depth, stages = _largest_divisor(fixed.columns), min(64, fixed.step // fixed.halves), 4
    if fixed.dtype == "float32":
        # Without tensor cores each thread holds whole rows of its operands.
        columns, depth, stages = 32, min(32, depth), 3
    elif depth < 64:
        columns = min(64, columns)  # 128 spill
    splits = min(-(-_PROGRAMS * columns // fixed.columns), -(-fixed.rows // _SPLIT_ROWS))
    return Tuning(columns, depth, splits, num_warps=min(8, depth * columns // 512), num_stages=stages)


def _largest_divisor(size: int) -> int:
    return next(n for n in (128, 64, 32) if size % n == 0)


def unsupported(*, rows: int, columns: int, bits: int, group: int, dtype: str, has_zero: bool) -> str | None:
    """Why the kernel cannot read such a matrix, or `None`."""
    if rows % 32 or columns % 32:
        return f"{rows=} and {columns=} must be multiples of 32"
    if bits not in (4, 8):
        return f"{bits=} must be 4 or 8"
    if group not in (128, 64, 32) and (bits, group) != (8, rows):
        return f"{group=} must be 128, 64 or 32, or for 8 bits all {rows=}"
    if rows % group:
        return f"{group=} must divide {rows=}"
    if has_zero and (bits, group) == (8, rows):
        return "8 bits with a scale per column must have no zero points"
    if dtype not in OPERAND_DTYPES:
        return f"{dtype=} must be one of {OPERAND_DTYPES}"
    return None


def _kernel(*refs, fixed: Matrix, tuning: Tuning, num_rows: int):
    x_ref, data_ref, scale_ref, *zero_ref, out_ref = refs
    tiles = range(0, num_rows, TILE_ROWS)
    row = jnp.arange(TILE_ROWS, dtype=jnp.int32)
    # Rows past the last repeat it; their sums are not stored.
    x_rows = [jnp.minimum(start + row, num_rows - 1)[:, None] for start in tiles]
    precision = lax.Precision.HIGHEST if fixed.dtype == "float32" else None
    half = fixed.step // fixed.halves
    place = jnp.arange(tuning.depth, dtype=jnp.int32)

    def load(first):
        """Rows of the data from there on."""
        # As three axes: two, and the tile is laid out in shared memory for the product, in pieces of 8 bytes.
        x = load_rows(data_ref, ((first + place)[None],), 0, tuning.columns, tuning.columns)
        return x.reshape(tuning.depth, tuning.columns)

    def step(index, sums):
        parts = [jnp.zeros(out.shape, jnp.float32) for out in sums]
        totals = [jnp.zeros((TILE_ROWS,), jnp.float32) for _ in sums]
        for offset in range(0, half, tuning.depth):
            for which, values in enumerate(_integers(fixed, load(index * half + offset))):
                column = (index * fixed.step + which * half + offset + place)[None, :]
                for tile, rows in enumerate(x_rows):
                    x = triton.load(x_ref.at[rows, column])
                    parts[tile] += jnp.dot(x, values, precision=precision, preferred_element_type=jnp.float32)
                    if zero_ref:
                        totals[tile] += jnp.sum(x.astype(jnp.float32), axis=1)
        if fixed.per_channel:
            return tuple(map(operator.add, sums, parts))
        scale = scale_ref[index].astype(jnp.float32)[None, :]
        if zero_ref:
            zero = zero_ref[0][index].astype(jnp.float32)[None, :]
            parts = [part - total[:, None] * zero for part, total in zip(parts, totals, strict=True)]
        return tuple(out + part * scale for out, part in zip(sums, parts, strict=True))

    steps = fixed.rows // fixed.step
    each = pl.cdiv(steps, tuning.splits)
    begin = pl.program_id(1) * each
    zeros = tuple(jnp.zeros((TILE_ROWS, tuning.columns), jnp.float32) for _ in tiles)
    sums = lax.fori_loop(begin, jnp.minimum(begin + each, steps), step, zeros)
    column = jnp.arange(tuning.columns, dtype=jnp.int32)[None, :]
    for start, out in zip(tiles, sums, strict=True):
        if fixed.per_channel:
            out *= scale_ref[0].astype(jnp.float32)[None, :]
        stored = jnp.broadcast_to((start + row < num_rows)[:, None], out.shape)
        triton.store(out_ref.at[(start + row)[:, None], column], out, mask=stored)


def _integers(fixed: Matrix, data: jax.Array) -> list[jax.Array]:
    """The values of entries as operands: of 4 bits those of the low bits, then those of the high ones."""
    if fixed.bits == 8:
        return [data.astype(fixed.dtype)]
    # Signed integers are converted faster, and these are below 16.
    signed = [lax.bitcast_convert_type(values, jnp.int8) for values in (data & 15, data >> 4)]
    return [values.astype(fixed.dtype) for values in signed]


def quantized_matmul(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    *,
    bits: int,
    group: int,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`x @ w` for a quantized matrix w [E, X] of values `(q - zero) * scale`.

    Args:
      x: [T, E], T at most `MAX_ROWS`; its dtype is that of the operands.
      data: int8 [E, X], or uint8 [E / 2, X] of 4-bit values.
      scale: float [E / group, X].
      zero: [E / group, X]; `None` for 0. Not for 8 bits with a scale per column.
      bits, group: see `Matrix`.

    Returns:
      What adds up to it, float32 [P, T, X]; a row depends on its own x alone, P on the matrix.

    Raises:
      ValueError: more rows, or a matrix, than the kernel handles.
    """
    num_rows, rows = x.shape
    columns = data.shape[1]
    fixed = Matrix(rows, columns, bits, group, str(x.dtype))
    if problem := unsupported(**dataclasses.asdict(fixed), has_zero=zero is not None):
        raise ValueError(problem)
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows=} must be at most {MAX_ROWS}")
    tuning = tuning or default_tuning(fixed)
    padded = pl.cdiv(num_rows, TILE_ROWS) * TILE_ROWS
    out_shape = jax.ShapeDtypeStruct((tuning.splits, padded, columns), jnp.float32)

    def strip(array: jax.Array) -> pl.BlockSpec:
        """All rows of a program's columns."""
        return pl.BlockSpec((array.shape[0], tuning.columns), lambda tile, split: (0, tile))

    factors = [scale] if zero is None else [scale, zero]
    out = pl.pallas_call(
        functools.partial(_kernel, fixed=fixed, tuning=tuning, num_rows=num_rows),
        grid=(columns // tuning.columns, tuning.splits),
        in_specs=[whole(x.shape), *map(strip, (data, *factors))],
        out_specs=pl.BlockSpec((None, padded, tuning.columns), lambda tile, split: (split, 0, tile)),
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=tuning.num_warps, num_stages=tuning.num_stages),
        interpret=interpret,
        name="quantized_matmul",
    )(x, data, *factors)
    return out[:, :num_rows]
