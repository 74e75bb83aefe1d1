"""The pieces of a layer that touch no KV: normalization, products, rotary embedding, activation.

Activations between the pieces are float32; the operands of a product have the weight's dtype and
its sums are float32. That is the fast form on a CPU, and the one whose rows do not depend on how
many there are.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jpaged.config import RopeConfig
from jpaged.ops.attention import XLA, Backend
from jpaged.ops.quantized import QuantizedMatrix, quantized_parts
from jpaged.pallas import add_norm as pallas_add_norm

MAX_PARTS = 8
"""Of a split product. XLA would cut fewer and longer ones again, and add up its own in one more launch."""

PART_ROWS = 768
"""Rows of the matrix in a part of a split product, at least: every part is written and read."""


@struct.dataclass
class PackedMatrix:
    """A float32 matrix [E, X] in the order in which products on a CPU read it: see `ops.product_cpu`."""

    panels: jax.Array  # [panels, E, columns of a panel]
    num_columns: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, w: np.ndarray) -> PackedMatrix:
        """Packs on the host, which compiles nothing."""
        return cls(jnp.asarray(_product_cpu().packed(w)), w.shape[1])

    @property
    def dtype(self) -> Any:
        return self.panels.dtype

    def columns(self, indices: jax.Array) -> jax.Array:
        """Columns int32 [T] of the matrix, as rows [T, E]."""
        width = self.panels.shape[2]
        return self.panels[indices // width, :, indices % width]

    def product(self, x: jax.Array, num_rows: jax.Array | None) -> jax.Array:
        """`x @ w`: x [T, E], of which the first `num_rows` matter, -> float32 [T, X]."""
        return _product_cpu().product(x.astype(jnp.float32), self.panels, self.num_columns, num_rows)


def _product_cpu() -> Any:
    from jpaged.ops import product_cpu  # brings a compiler with it

    return product_cpu


Matrix = jax.Array | QuantizedMatrix | PackedMatrix
"""The matrix of a product."""


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square normalization over the last axis, in float32. Zhang & Sennrich, 2019.

    The weight has the last axis, or several of the last ones.
    """
    x = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - weight.ndim)))


def linear(
    x: jax.Array,
    w: Matrix,
    b: jax.Array | None = None,
    *,
    backend: Backend = XLA,
    num_rows: jax.Array | None = None,
) -> jax.Array:
    """`x @ w + b` with float32 sums: x [T, E], w [E, X], b [X] -> float32 [T, X].

    Args:
      backend: of products with a quantized matrix.
      num_rows: int32 [], of x that matter, the first ones. What the others become is finite if they are, and
        a `PackedMatrix` does not compute them.
    """
    if isinstance(w, QuantizedMatrix):
        # One after the other, which XLA fuses with what follows: the order does not depend on a shape.
        parts = quantized_parts(x, w, backend)
        y = functools.reduce(operator.add, (parts[part] for part in range(parts.shape[0])))
    elif isinstance(w, PackedMatrix):
        y = w.product(x, num_rows)
    else:
        y = _product(x, w, (((1,), (0,)), ((), ())))
    return y if b is None else y + b.astype(jnp.float32)[None, :]


def add_product(
    x: jax.Array,
    h: jax.Array,
    w: Matrix,
    b: jax.Array | None,
    norm: jax.Array,
    *,
    eps: float,
    backend: Backend,
    split: bool,
    num_rows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`x + h @ w + b`, and its RMS norm: x float32 [T, X], h [T, E], w [E, X], b and norm [X].

    Args:
      split: cuts the product over the rows of w into parts that a GPU computes side by side, which few
        tokens need to fill it. How depends on w's shape alone. The parts' sums are float32; they are
        written and read as `narrowed`, and added in float32. A backend without kernels does not split.
      num_rows: as for `linear`.

    Returns:
      float32 [T, X] each; kernels round the norm to the dtype of its weight, that of the operands of the
      next product.
    """
    if not backend.uses_kernels:
        x = x + linear(h, w, b, num_rows=num_rows)
        return x, rms_norm(x, norm, eps)
    assert not isinstance(w, PackedMatrix), "kernels read matrices as they are"
    if isinstance(w, QuantizedMatrix):
        parts = quantized_parts(h, w, backend)
    elif split:
        parts = narrowed(_product_parts(h, w, _num_parts(w.shape[0])), norm.dtype)
    else:
        parts = linear(h, w)[None]
    return pallas_add_norm.add_norm(x, parts, b, norm, eps, interpret=backend.interpret)


def narrowed(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 x in half its bytes where the weights' dtype has float32's range: bfloat16, not float16."""
    return x.astype(dtype) if dtype == jnp.bfloat16 else x


def _num_parts(rows: int) -> int:
    most = min(MAX_PARTS, rows // PART_ROWS)
    return max((n for n in range(1, most + 1) if rows % (64 * n) == 0), default=1)


def _product_parts(x: jax.Array, w: jax.Array, num: int) -> jax.Array:
    """What adds up to `x @ w`, float32 [num, T, X]."""
    x, w = x.reshape(x.shape[0], num, -1), w.reshape(num, -1, w.shape[1])
    return _product(x, w, (((2,), (1,)), ((1,), (0,))))


def unembed(x: jax.Array, w: jax.Array | PackedMatrix, *, num_rows: jax.Array | None = None) -> jax.Array:
    """Logits `x @ w.T`: x [S, E], w [V, E], or its transpose packed, -> float32 [S, V].

    Args:
      num_rows: as for `linear`.
    """
    if isinstance(w, PackedMatrix):
        return w.product(x, num_rows)
    return _product(x, w, (((1,), (1,)), ((), ())))


def _product(x: jax.Array, w: jax.Array, dimensions: Any) -> jax.Array:
    # A float32 product on a GPU is tf32 unless asked otherwise.
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return lax.dot_general(
        x.astype(w.dtype),
        w,
        dimensions,
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def silu_gate(gate_up: jax.Array) -> jax.Array:
    """`silu(gate) * up`: [T, 2 * F], the gate first -> [T, F]."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return jax.nn.silu(gate) * up


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 [D / 2] and the factor that scales cos and sin.

    Sources: Su et al. 2021 (default); Chen et al. 2023 (linear); Peng et al. 2023 (yarn); the
    Llama 3.1 model card (llama3). `dynamic` equals `default` up to the original length, the only
    range in which the engine admits it.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = np.float32(1.0) / np.float32(rope.theta) ** exponent  # [D / 2]
    if rope.kind == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, inv_freq, head_dim), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _llama3_frequencies(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * np.pi / inv_freq
    turns = rope.original_max_position / wavelength  # rotations within the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return ((1 - smooth) * inv_freq / rope.factor + smooth * inv_freq).astype(np.float32)


def _yarn_frequencies(rope: RopeConfig, inv_freq: np.ndarray, head_dim: int) -> np.ndarray:
    """Dimensions that turn often are kept, those that turn rarely interpolated, a ramp between."""

    def dimension(turns: float) -> float:
        return head_dim * np.log(rope.original_max_position / (turns * 2 * np.pi)) / (2 * np.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    ramp = np.clip(ramp, 0, 1)  # 0: kept, 1: interpolated
    return (inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(factor: float, weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * float(np.log(factor)) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return mscale(rope.factor, 1.0)


def rope_table(positions: jax.Array, inv_freq: np.ndarray, scale: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [T, D / 2], of positions [T]."""
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq)[None, :]
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs (i, i + D / 2): x float32 [T, .., D], cos and sin [T, D / 2]."""
    cos, sin = (jnp.expand_dims(table, tuple(range(1, x.ndim - 1))) for table in (cos, sin))
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
