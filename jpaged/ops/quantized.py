"""Matrices of 8- or 4-bit integers with a scale for each group of input rows, and products with them.

Owns the layout, the rounding at load, and products: by a kernel where there is one for them, else in plain
XLA. Either dequantizes a few rows at a time, so a whole matrix never exists in the activations' dtype.
Layouts of checkpoints that are quantized already are `weights`'s business; what they hold becomes a
`QuantizedMatrix` too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jpaged.config import AS_STORED, QUANTIZATIONS
from jpaged.ops.attention import Backend
from jpaged.pallas.quantized_matmul import MAX_ROWS, quantized_matmul, unsupported

GROUPS = (128, 64, 32)
"""Input rows that share a 4-bit scale, the preferred one first."""

CHUNK_ROWS = 512
"""Rows of a matrix that are dequantized at a time, at most."""


@struct.dataclass
class QuantizedMatrix:
    """A matrix [E, X] of values `(q - zero) * scale`; zero and scale belong to a group of rows.

    Two 4-bit values share a byte: of a group's rows the first half is in the low bits, the second half in
    the high bits (`pack_int4`).

    Attributes:
      data: int8 [E, X], or uint8 [E / 2, X] of 4-bit values.
      scale: float16 or float32 [E / group, X].
      zero: uint8 or float32 [E / group, X]; `None` where it is 0.
      bits: 8 or 4.
      group: rows that share a scale, any divisor of E; even for 4 bits.
      dtype: of the operands of products.
      order: int32 [E] where rows are not stored in the order of the input: row i belongs to input
        `order[i]`, so that the product is `x[:, order] @ w`.
    """

    data: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    bits: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)
    order: jax.Array | None = None


def pack_int4(values: np.ndarray, group: int) -> np.ndarray:
    """Values uint8 [E, X] below 16 as `QuantizedMatrix.data`, uint8 [E / 2, X]."""
    E, X = values.shape
    halves = values.reshape(E // group, 2, group // 2, X)
    return (halves[:, 0] | halves[:, 1] << 4).reshape(E // 2, X)


def group_size(rows: int, quantization: str) -> int:
    """Rows of a matrix of that many rows that share a scale.

    Raises:
      ValueError: an unknown quantization, or no group size divides the rows.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"quantization={quantization!r} must be one of {QUANTIZATIONS}, or {AS_STORED!r} for a GGUF file"
        )
    if quantization == "int8":
        return rows
    for group in GROUPS:
        if rows % group == 0:
            return group
    raise ValueError(
        f"quantization='int4' needs matrices whose input width is a multiple of {GROUPS[-1]}, "
        f"this one has {rows}"
    )


def abstract_matrix(rows: int, columns: int, quantization: str, dtype: str) -> QuantizedMatrix:
    """The quantized matrix [rows, columns] as `jax.ShapeDtypeStruct`s; `group_size` has the errors."""
    group, spec = group_size(rows, quantization), jax.ShapeDtypeStruct
    scale = spec((rows // group, columns), jnp.float32)
    if quantization == "int8":
        return QuantizedMatrix(spec((rows, columns), jnp.int8), scale, None, 8, group, dtype)  # type: ignore[arg-type]
    data, zero = spec((rows // 2, columns), jnp.uint8), spec(scale.shape, jnp.uint8)
    return QuantizedMatrix(data, scale, zero, 4, group, dtype)  # type: ignore[arg-type]


def quantize_matrix(matrix: np.ndarray, quantization: str) -> QuantizedMatrix:
    """Rounds a matrix [E, X] of floats, a group of rows at a time, and hands it to JAX.

    int8 maps each column's largest magnitude to 127: an error is at most half a scale. int4 spreads 16 values
    from the group's smallest value (or 0) to its largest (or 0), with 0 among them: at most one scale.

    Raises:
      ValueError: see `group_size`; or a value is not finite.
    """
    E, X = matrix.shape
    group = group_size(E, quantization)
    if quantization == "int8":
        data, scale = _round_int8(matrix)
        return QuantizedMatrix(jax.device_put(data), jax.device_put(scale), None, 8, E, str(matrix.dtype))
    packed = np.empty((E // 2, X), np.uint8)
    scale, zero = np.empty((E // group, X), np.float32), np.empty((E // group, X), np.uint8)
    for index in range(E // group):
        rows = matrix[index * group : (index + 1) * group].astype(np.float32)
        low, high = np.minimum(rows.min(0), 0), np.maximum(rows.max(0), 0)
        scale[index] = _nonzero((high - low) / 15)
        zero[index] = np.round(-low / scale[index])
        values = np.clip(np.round(rows / scale[index]) + zero[index], 0, 15).astype(np.uint8)
        packed[index * group // 2 : (index + 1) * group // 2] = pack_int4(values, group)
    return QuantizedMatrix(
        jax.device_put(packed), jax.device_put(scale), jax.device_put(zero), 4, group, str(matrix.dtype)
    )


def _round_int8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    largest = np.zeros(matrix.shape[1], np.float32)
    pieces = [slice(start, start + CHUNK_ROWS) for start in range(0, len(matrix), CHUNK_ROWS)]
    for piece in pieces:
        np.maximum(largest, np.abs(matrix[piece].astype(np.float32)).max(0), out=largest)
    scale = _nonzero(largest / 127)
    data = np.empty(matrix.shape, np.int8)
    for piece in pieces:
        data[piece] = np.round(matrix[piece].astype(np.float32) / scale)
    return data, scale[None]


def _nonzero(scale: np.ndarray) -> np.ndarray:
    """One where all values are zero."""
    if not np.isfinite(scale).all():
        raise ValueError("a matrix with values that are not finite cannot be quantized")
    return np.where(scale > 0, scale, np.float32(1))


def quantized_parts(x: jax.Array, w: QuantizedMatrix, backend: Backend) -> jax.Array:
    """What adds up to `x @ w`, with float32 sums: x [T, E], w [E, X] -> float32 [P, T, X].

    Few rows, such as those of a decode step, take the kernel where the backend has kernels.
    """
    if w.order is not None:
        x = jnp.take(x, w.order, axis=1)
    rows, columns = x.shape[1], w.data.shape[1]
    refusal = unsupported(
        rows=rows,
        columns=columns,
        bits=w.bits,
        group=w.group,
        dtype=w.dtype,
        has_zero=w.zero is not None,
    )
    if backend.uses_kernels and x.shape[0] <= MAX_ROWS and refusal is None:
        return quantized_matmul(
            x.astype(w.dtype),
            w.data,
            w.scale,
            w.zero,
            bits=w.bits,
            group=w.group,
            interpret=backend.interpret,
        )
    return _product_xla(x, w)[None]


def _product_xla(x: jax.Array, w: QuantizedMatrix) -> jax.Array:
    """`x @ w` for x whose columns are in the order of w's rows.

    Rows are dequantized in chunks (whole groups, or a part of one that is larger than a chunk), and the
    chunks' products added in order, whatever T is. 8 bits with a scale per column are scaled after the sum.
    """
    T, E = x.shape
    rows = _chunk_rows(w, E)
    scaled_after = _is_scaled_after(w, E)
    dtype = jnp.dtype(w.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    if w.bits == 4 and rows < w.group:  # a chunk of bytes holds rows of both halves of its group
        x = x.reshape(T, E // w.group, 2, w.group // rows, rows // 2).swapaxes(2, 3).reshape(T, E)

    def product(index: jax.Array | int) -> jax.Array:
        part = lax.dynamic_slice_in_dim(x, index * rows, rows, axis=1).astype(dtype)  # [T, rows]
        if scaled_after:
            values = lax.dynamic_slice_in_dim(w.data, index * rows, rows)
        else:
            values = _dequantized_rows(w, index, rows)
        return lax.dot_general(
            part,
            values.astype(dtype),
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    # A loop that begins with zeros would have them written for every matrix at the start of a step, at once.
    y, _ = lax.scan(lambda sums, index: (sums + product(index), None), product(0), jnp.arange(1, E // rows))
    return y * w.scale.astype(jnp.float32) if scaled_after else y


def _is_scaled_after(w: QuantizedMatrix, E: int) -> bool:
    return w.bits == 8 and w.group == E and w.zero is None


def _chunk_rows(w: QuantizedMatrix, E: int) -> int:
    """Rows to dequantize at a time: whole groups, or the largest even part of a group, that divide E."""
    if _is_scaled_after(w, E):
        return max(n for n in range(1, CHUNK_ROWS + 1) if E % n == 0)
    if w.group <= CHUNK_ROWS:
        return max(n for n in range(w.group, CHUNK_ROWS + 1, w.group) if E % n == 0)
    step = 2 if w.bits == 4 else 1
    return max(n for n in range(step, CHUNK_ROWS + 1, step) if w.group % n == 0)


def _dequantized_rows(w: QuantizedMatrix, index: jax.Array | int, rows: int) -> jax.Array:
    """Chunk `index` of that many stored rows, float32 [rows, X]."""
    X = w.data.shape[1]
    groups = max(1, rows // w.group)
    first = index * rows // w.group

    def of_groups(array: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, first, groups).astype(jnp.float32)[:, None]

    if w.bits == 8:
        values = lax.dynamic_slice_in_dim(w.data, index * rows, rows).reshape(groups, -1, X)
    else:
        data = lax.dynamic_slice_in_dim(w.data, index * (rows // 2), rows // 2).reshape(groups, -1, X)
        values = jnp.concatenate([data & 15, data >> 4], axis=1)
    values = values.astype(jnp.float32)  # [groups, rows / groups, X]
    if w.zero is not None:
        values = values - of_groups(w.zero)
    return (values * of_groups(w.scale)).reshape(rows, X)
