"""The compiled steps: the only place where the model meets `jax.jit`.

A step is `f(params, cache, state, batch) -> (cache, state, output)` with cache and state donated.
Nothing here depends on a value: shapes come from the bucket, the rest from the configuration and
the variant.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged import kv_cache
from jpaged.batch import DecodeBatch, Logprobs, RaggedBatch, RowState, StepOutput
from jpaged.config import ModelConfig
from jpaged.kv_cache import KVCache, Pool
from jpaged.models import transformer
from jpaged.models.transformer import Params
from jpaged.ops import attention
from jpaged.ops.attention import Backend
from jpaged.ops.sampling import Variant, sample, token_logprobs

_CHUNK = 64  # rows of logits that are computed at once, where there may be many or they must not depend on it


@functools.partial(
    jax.jit, static_argnames=("config", "backend", "variant"), donate_argnames=("cache", "state")
)
def decode_step(
    params: Params,
    cache: KVCache,
    state: RowState,
    batch: DecodeBatch,
    *,
    config: ModelConfig,
    backend: Backend,
    variant: Variant,
) -> tuple[KVCache, RowState, StepOutput]:
    """One token of each sequence: writes its K and V, draws the next."""
    pools = _Pools(cache, backend)

    def attend(layer: int, qkv: jax.Array) -> jax.Array:
        k_pool, v_pool = pools.write(layer, qkv, batch.slots)
        return attention.paged_decode(
            backend,
            qkv,
            k_pool,
            v_pool,
            batch.tables,
            batch.context_lens,
            window=config.layer_windows[layer],
            out_dtype=str(params.layers[layer].attn_norm.dtype),  # of the product that comes next
        )

    tokens = state.last_token[batch.rows]
    positions = jnp.maximum(batch.context_lens - 1, 0)
    num_seqs = jnp.count_nonzero(batch.context_lens)
    hidden = transformer.forward(
        params,
        config,
        tokens,
        positions,
        attend,
        backend=backend,
        split_products=backend.uses_kernels,
        num_tokens=num_seqs,
    )
    logits = transformer.logits(params, hidden, num_seqs)
    tokens, logprobs, state = sample(logits, batch.rows, state, batch.sampling, variant)
    return pools.cache(), state, StepOutput(tokens=tokens, logprobs=logprobs, prompt_logprobs=None)


@functools.partial(
    jax.jit,
    static_argnames=("config", "backend", "variant", "deterministic"),
    donate_argnames=("cache", "state"),
)
def prefill_step(
    params: Params,
    cache: KVCache,
    state: RowState,
    batch: RaggedBatch,
    *,
    config: ModelConfig,
    backend: Backend,
    variant: Variant,
    deterministic: bool,
) -> tuple[KVCache, RowState, StepOutput]:
    """Chunks of any mix of lengths: writes their K and V, draws where a sequence's last token is in."""
    hidden, cache = _prefill_hidden(params, cache, state, batch, config, backend)
    logits = _sampled_logits(params, hidden, batch, deterministic)
    tokens, logprobs, state = sample(logits, batch.rows, state, batch.sampling, variant)
    prompt = None
    if variant >= Variant.PROMPT:
        prompt = _prompt_logprobs(params, hidden, batch.targets)
    return cache, state, StepOutput(tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt)


@functools.partial(jax.jit, static_argnames=("config", "backend"), donate_argnames=("cache",))
def probe_step(
    params: Params,
    cache: KVCache,
    state: RowState,
    batch: RaggedBatch,
    *,
    config: ModelConfig,
    backend: Backend,
) -> tuple[KVCache, jax.Array]:
    """A deterministic prefill step that returns the logits [S, V], for the bitwise self-test."""
    hidden, cache = _prefill_hidden(params, cache, state, batch, config, backend)
    return cache, _sampled_logits(params, hidden, batch, deterministic=True)


def _sampled_logits(params: Params, hidden: jax.Array, batch: RaggedBatch, deterministic: bool) -> jax.Array:
    hidden = hidden[batch.sampled]
    if not deterministic:
        return transformer.logits(params, hidden, jnp.count_nonzero(batch.context_lens))
    return _by_chunks(lambda rows: transformer.logits(params, rows), hidden)


def _prefill_hidden(
    params: Params,
    cache: KVCache,
    state: RowState,
    batch: RaggedBatch,
    config: ModelConfig,
    backend: Backend,
) -> tuple[jax.Array, KVCache]:
    pools = _Pools(cache, backend)
    attention_of = attention.paged_prefill(
        backend, batch.tables, batch.query_start, batch.context_lens, batch.token_ids.shape[0]
    )

    def attend(layer: int, qkv: jax.Array) -> jax.Array:
        k_pool, v_pool = pools.write(layer, qkv, batch.slots)
        return attention_of(qkv, k_pool, v_pool, window=config.layer_windows[layer])

    tokens = jnp.where(batch.token_ids >= 0, batch.token_ids, state.last_token[batch.token_rows])
    hidden = transformer.forward(
        params,
        config,
        tokens,
        batch.positions,
        attend,
        backend=backend,
        num_tokens=batch.query_start[-1],
    )
    return hidden, pools.cache()


def _prompt_logprobs(params: Params, hidden: jax.Array, targets: jax.Array) -> Logprobs:
    """Logits of all prompt tokens at once would not fit beside a large model."""
    return _by_chunks(
        lambda rows, ids: token_logprobs(transformer.logits(params, rows), ids), hidden, targets
    )


def _by_chunks(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """`function` over chunks of `_CHUNK` rows, so that it always sees one shape."""
    count = arrays[0].shape[0]

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, -count % _CHUNK),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, _CHUNK, *x.shape[1:])

    chunks = lax.map(lambda rows: function(*rows), tuple(map(cut, arrays)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], chunks)


class _Pools:
    """The pools while a step is traced: each layer writes its own before it reads."""

    def __init__(self, cache: KVCache, backend: Backend):
        self._backend = backend
        self._k, self._v = list(cache.k), list(cache.v)

    def write(self, layer: int, qkv: jax.Array, slots: jax.Array) -> tuple[Pool, Pool]:
        pools = self._k[layer], self._v[layer]
        written = attention.write_kv(self._backend, *pools, qkv, slots)
        self._k[layer], self._v[layer] = written
        return written

    def cache(self) -> KVCache:
        return KVCache(k=tuple(self._k), v=tuple(self._v))


copy_blocks = jax.jit(kv_cache.copy_blocks, donate_argnames=("cache",))


@functools.partial(jax.jit, donate_argnames=("state",))
def set_row(state: RowState, row: jax.Array, values: dict[str, jax.Array]) -> RowState:
    """Writes one row of the named fields."""
    return dataclasses.replace(
        state, **{name: getattr(state, name).at[row].set(value) for name, value in values.items()}
    )
