"""Sums that end in a norm, in one launch: parts of a product, its bias and the residual, then RMS norm."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from jpaged.pallas.common import whole

_MAX_WARPS = 16
_THREAD_VALUES = 16  # of a row that a thread holds, unless the row is longer than that


def _kernel(x_ref, parts_ref, *refs, eps: float):
    *bias_ref, weight_ref, sum_ref, out_ref = refs
    (width,) = weight_ref.shape
    column = jnp.arange(_padded(width), dtype=jnp.int32)
    real = column < width

    def load(ref, *index: int) -> jax.Array:
        at = ref.at[(*(jnp.full_like(column, i) for i in index), column)]
        return triton.load(at, mask=real, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)

    total = load(parts_ref, 0)
    for part in range(1, parts_ref.shape[0]):
        total += load(parts_ref, part)
    for ref in bias_ref:
        total += load(ref)
    total += load(x_ref)
    scale = lax.rsqrt(jnp.sum(total * total) / width + eps)
    triton.store(sum_ref.at[column], total, mask=real)
    triton.store(out_ref.at[column], (total * scale * load(weight_ref)).astype(out_ref.dtype), mask=real)


def _padded(width: int) -> int:
    return 1 << (width - 1).bit_length()


def add_norm(
    x: jax.Array,
    parts: jax.Array,
    bias: jax.Array | None,
    weight: jax.Array,
    eps: float,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`parts[0] + parts[1] + .. + bias + x`, added in that order in float32, and its RMS norm.

    Args:
      x: float32 [T, E].
      parts: [P, T, E].
      bias: [E], or `None`.
      weight: of the norm, [E].

    Returns:
      The sum, float32 [T, E], and its norm in the weight's dtype, [T, E]. A row depends on its own values
      alone.
    """
    num_parts, num_rows, width = parts.shape
    vectors = [weight] if bias is None else [bias, weight]
    row = pl.BlockSpec((None, width), lambda t: (t, 0))
    warps = min(_MAX_WARPS, max(1, _padded(width) // (32 * _THREAD_VALUES)))
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid=(num_rows,),
        in_specs=[
            row,
            pl.BlockSpec((num_parts, None, width), lambda t: (0, t, 0)),
            *(whole(vector.shape) for vector in vectors),
        ],
        out_specs=[row, row],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            jax.ShapeDtypeStruct(x.shape, weight.dtype),
        ],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(x, parts, *vectors)
