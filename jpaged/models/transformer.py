"""One decoder for every family: its parameters and its forward pass.

Owns the parameter tree (`abstract_params` is the one declaration of its shapes) and the order of
operations in a layer. Families differ by `ModelConfig` flags alone. Knows nothing of requests,
schedules or sampling.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jpaged.config import ModelConfig


@struct.dataclass
class LayerParams:
    """Weights of one layer; products are `x @ w`. Absent biases and norms are `None`.

    The columns of `wqkv` are grouped by KV head: for each, its `G` query heads, its key head, its
    value head, so that a split over KV heads is a split of columns.
    """

    attn_norm: jax.Array  # [E]
    wqkv: jax.Array  # [E, K * (G + 2) * D]
    bqkv: jax.Array | None  # [K * (G + 2) * D]
    q_norm: jax.Array | None  # [D]
    k_norm: jax.Array | None  # [D]
    wo: jax.Array  # [H * D, E]
    bo: jax.Array | None  # [E]
    mlp_norm: jax.Array  # [E]
    w_gate_up: jax.Array  # [E, 2 * F]: the gate's columns, then up's
    b_gate_up: jax.Array | None  # [2 * F]
    w_down: jax.Array  # [F, E]
    b_down: jax.Array | None  # [E]


@struct.dataclass
class Params:
    """Weights of a model."""

    embed: jax.Array  # [V, E]
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array  # [E]
    lm_head: jax.Array | None  # [V, E]; None where it is tied to `embed`


def abstract_params(config: ModelConfig, dtype: jnp.dtype | str | None = None) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct`s, in `dtype` (default: the checkpoint's)."""
    dtype = jnp.dtype(dtype or config.dtype)
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    qkv = config.num_kv_heads * (config.group_size + 2) * D

    def spec(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = LayerParams(
        attn_norm=spec(E),
        wqkv=spec(E, qkv),
        bqkv=spec(qkv) if config.qkv_bias else None,
        q_norm=spec(D) if config.qk_norm else None,
        k_norm=spec(D) if config.qk_norm else None,
        wo=spec(config.num_heads * D, E),
        bo=spec(E) if config.out_bias else None,
        mlp_norm=spec(E),
        w_gate_up=spec(E, 2 * F),
        b_gate_up=spec(2 * F) if config.mlp_bias else None,
        w_down=spec(F, E),
        b_down=spec(E) if config.mlp_bias else None,
    )  # type: ignore[arg-type]
    return Params(
        embed=spec(config.vocab_size, E),
        layers=(layer,) * config.num_layers,
        final_norm=spec(E),
        lm_head=None if config.tie_word_embeddings else spec(config.vocab_size, E),
    )  # type: ignore[arg-type]


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
