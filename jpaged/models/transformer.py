"""One decoder for every family: its parameters and its forward pass.

Owns the parameter tree (`abstract_params` is the one declaration of its shapes) and the order of
operations in a layer. Families differ by `ModelConfig` flags alone. Knows nothing of requests,
schedules or sampling.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jpaged.config import ModelConfig
from jpaged.ops.attention import XLA, Backend
from jpaged.ops.layers import (
    Matrix,
    PackedMatrix,
    add_product,
    apply_rope,
    linear,
    narrowed,
    rms_norm,
    rope_frequencies,
    rope_table,
    silu_gate,
    unembed,
)
from jpaged.ops.quantized import QuantizedMatrix, abstract_matrix


@struct.dataclass
class LayerParams:
    """Weights of one layer; products are `x @ w`. Absent biases and norms are `None`.

    The columns of `wqkv` are grouped by KV head: for each, its `G` query heads, its key head, its
    value head, so that a split over KV heads is a split of columns. The four matrices may be quantized or
    packed.
    """

    attn_norm: jax.Array  # [E]
    wqkv: Matrix  # [E, K * (G + 2) * D]
    bqkv: jax.Array | None  # [K * (G + 2) * D]
    q_norm: jax.Array | None  # [D]
    k_norm: jax.Array | None  # [D]
    wo: Matrix  # [H * D, E]
    bo: jax.Array | None  # [E]
    mlp_norm: jax.Array  # [E]
    w_gate_up: Matrix  # [E, 2 * F]: the gate's columns, then up's
    b_gate_up: jax.Array | None  # [2 * F]
    w_down: Matrix  # [F, E]
    b_down: jax.Array | None  # [E]


MATRICES = ("wqkv", "wo", "w_gate_up", "w_down")
"""Fields of `LayerParams` that are operands of products: those that `quantization` applies to."""


@struct.dataclass
class Params:
    """Weights of a model. Tables of embeddings may be packed, as [E, V]."""

    embed: jax.Array | PackedMatrix  # [V, E]
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array  # [E]
    lm_head: jax.Array | PackedMatrix | None  # [V, E]; None where it is tied to `embed`


def abstract_params(
    config: ModelConfig, dtype: jnp.dtype | str | None = None, quantization: str | None = None
) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct`s, in `dtype` (default: the checkpoint's).

    Raises:
      ValueError: the layers' matrices cannot be quantized so; see `ops.quantized.group_size`.
    """
    dtype = jnp.dtype(dtype or config.dtype)
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    qkv = config.num_kv_heads * (config.group_size + 2) * D

    def spec(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def matrix(rows: int, columns: int) -> Any:
        if quantization is None:
            return spec(rows, columns)
        return abstract_matrix(rows, columns, quantization, str(dtype))

    layer = LayerParams(
        attn_norm=spec(E),
        wqkv=matrix(E, qkv),
        bqkv=spec(qkv) if config.qkv_bias else None,
        q_norm=spec(D) if config.qk_norm else None,
        k_norm=spec(D) if config.qk_norm else None,
        wo=matrix(config.num_heads * D, E),
        bo=spec(E) if config.out_bias else None,
        mlp_norm=spec(E),
        w_gate_up=matrix(E, 2 * F),
        b_gate_up=spec(2 * F) if config.mlp_bias else None,
        w_down=matrix(F, E),
        b_down=spec(E) if config.mlp_bias else None,
    )
    return Params(
        embed=spec(config.vocab_size, E),
        layers=(layer,) * config.num_layers,
        final_norm=spec(E),
        lm_head=None if config.tie_word_embeddings else spec(config.vocab_size, E),
    )


def packed(params: Params) -> Params:
    """The same float32 model with the matrices of its products packed, for a CPU."""

    def pack(part: Any, names: Iterable[str], view: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Any:
        given = {name: getattr(part, name) for name in names}
        changes: dict[str, Any] = {
            name: PackedMatrix.of(view(np.asarray(w)))
            for name, w in given.items()
            if not isinstance(w, QuantizedMatrix | PackedMatrix)
        }
        return dataclasses.replace(part, **changes)

    layers = tuple(pack(layer, MATRICES) for layer in params.layers)
    params = pack(params, ["embed" if params.lm_head is None else "lm_head"], np.transpose)
    return dataclasses.replace(params, layers=layers)


def init_params(config: ModelConfig, key: jax.Array, dtype: jnp.dtype | str | None = None) -> Params:
    """Random parameters: norms are ones, biases small, matrices scaled by 1/sqrt(fan-in)."""
    specs, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config, dtype))
    leaves = []
    for i, (path, spec) in enumerate(specs):
        name = path[-1].name
        noise = jax.random.normal(jax.random.fold_in(key, i), spec.shape, jnp.float32)
        if name.endswith("norm"):
            leaf = 1 + 0.1 * noise
        elif name.startswith("b"):
            leaf = 0.02 * noise
        else:
            fan_in = spec.shape[1] if name in ("embed", "lm_head") else spec.shape[0]
            leaf = noise * fan_in**-0.5
        leaves.append(leaf.astype(spec.dtype))
    return jax.tree_util.tree_unflatten(tree, leaves)


Attend = Callable[[int, jax.Array], jax.Array]
"""`attend(layer, qkv [T, K, G + 2, D]) -> [T, H, D]`, float32 in and out; see `ops.attention.split_qkv`."""


def forward(
    params: Params,
    config: ModelConfig,
    token_ids: jax.Array,
    positions: jax.Array,
    attend: Attend,
    *,
    backend: Backend = XLA,
    split_products: bool = False,
    num_tokens: jax.Array | None = None,
) -> jax.Array:
    """Runs the decoder over packed tokens.

    Pure and differentiable; how tokens see each other is `attend`'s business, so the same code
    serves a paged cache and plain causal attention.

    Args:
      token_ids, positions: int32 [T].
      attend: called once per layer, in order, with rotated queries and keys.
      backend: of products with quantized matrices, and of sums; kernels are not differentiable.
      split_products: for few tokens, with kernels: see `add_product`. What a layer writes most of, the
        outputs of `w_gate_up`, is then `narrowed`.
      num_tokens: int32 [], of which the rest is padding; default: all.

    Returns:
      Final hidden states [T, E], normalized, in float32 or as `add_product` rounds them; `logits` turns
      them into logits.
    """
    K, G, D = config.num_kv_heads, config.group_size, config.head_dim
    eps = config.rms_norm_eps
    product = functools.partial(linear, backend=backend, num_rows=num_tokens)
    add = functools.partial(add_product, eps=eps, backend=backend, split=split_products, num_rows=num_tokens)
    is_value = (jnp.arange(G + 2) == G + 1)[None, None, :, None]
    inv_freq, scale = rope_frequencies(config.rope, D)
    cos, sin = rope_table(positions, inv_freq, scale)
    norms = [layer.attn_norm for layer in params.layers] + [params.final_norm]
    embed = params.embed
    x = embed.columns(token_ids) if isinstance(embed, PackedMatrix) else embed[token_ids]
    x = x.astype(jnp.float32)  # [T, E]
    h = rms_norm(x, norms[0], eps)
    for index, layer in enumerate(params.layers):
        qkv = product(h, layer.wqkv, layer.bqkv)
        qkv = qkv.reshape(-1, K, G + 2, D)
        if layer.q_norm is not None and layer.k_norm is not None:
            weights = jnp.stack([layer.q_norm] * G + [layer.k_norm] * 2)
            qkv = jnp.where(is_value, qkv, rms_norm(qkv, weights, eps))
        out = attend(index, jnp.where(is_value, qkv, apply_rope(qkv, cos, sin)))
        x, h = add(x, out.reshape(-1, K * G * D), layer.wo, layer.bo, layer.mlp_norm)
        gate_up = product(h, layer.w_gate_up, layer.b_gate_up)
        if split_products:
            gate_up = narrowed(gate_up, layer.mlp_norm.dtype)
        x, h = add(x, silu_gate(gate_up), layer.w_down, layer.b_down, norms[index + 1])
    return h


def logits(params: Params, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
    """Logits float32 [X, V] of final hidden states [X, E].

    Args:
      num_rows: as for `ops.layers.linear`.
    """
    return unembed(hidden, params.embed if params.lm_head is None else params.lm_head, num_rows=num_rows)
