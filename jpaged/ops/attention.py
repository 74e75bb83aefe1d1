"""Which implementation of paged attention a step uses: chosen once, at start-up, never at run time.

Every backend has the contract of `ops.attention_xla` and passes the same tests.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jpaged import kv_cache
from jpaged.config import LARGEST, ModelConfig
from jpaged.kv_cache import KVLayout, Pool, device_arrays, rotate, with_device_arrays
from jpaged.ops import attention_xla
from jpaged.pallas import decode as pallas_decode
from jpaged.pallas import prefill as pallas_prefill
from jpaged.pallas import write as pallas_write
from jpaged.pallas.common import unsupported

logger = logging.getLogger(__name__)

CPU_FORMATS = ("float32", "bfloat16")  # of pools that `attention_cpu` reads
MIN_CAPABILITY = 80  # tensor cores for bfloat16, asynchronous copies


@dataclasses.dataclass(frozen=True)
class Backend:
    """How attention and quantized products are computed: a static argument of the compiled steps.

    Attributes:
      name: `xla`; `cpu`, attention compiled for a CPU; `pallas`, kernels lowered through Triton;
        `pallas_interpret`, the same kernels run by Pallas' interpreter, slowly, on any device; `mosaic` and
        `jax_triton`, those kernels with another one for decode.
      capability: of the GPU, 10 * major + minor; 0 where there is none.
    """

    name: str
    capability: int = 0

    @property
    def uses_kernels(self) -> bool:
        """Whether Pallas kernels do what XLA otherwise does."""
        return self.name not in ("xla", "cpu")

    @property
    def interpret(self) -> bool:
        return self.name == "pallas_interpret"


XLA = Backend("xla")


def resolve_backend(choice: str, config: ModelConfig, *, block_size: int, layout: KVLayout) -> Backend:
    """The backend for the default device.

    `auto` takes the Pallas kernels where they can run, on a CPU what is compiled for it, XLA elsewhere; what
    is chosen by name must run.

    Raises:
      NotImplementedError: the backend cannot run on this device.
      ValueError: the backend cannot run this model or block size.
    """
    device = jax.devices()[0]
    capability = capability_of(device)

    def refusal(name: str) -> Exception | None:
        lacking = _lacking(name, device, capability)
        if lacking:
            return NotImplementedError(f"attention_backend={name!r} cannot run here: {lacking}")
        problem = _unsupported(name, config, block_size, layout)
        return ValueError(f"attention_backend={name!r} cannot run this model: {problem}") if problem else None

    if choice == "auto":
        choice = "cpu" if device.platform == "cpu" else "pallas"
        if reason := refusal(choice):
            if device.platform == "gpu":
                logger.warning("attention is computed by XLA: %s", reason)
            choice = "xla"
    elif error := refusal(choice):
        raise error
    return Backend(choice, capability)


def capability_of(device: jax.Device) -> int:
    """Compute capability of an NVIDIA GPU, 10 * major + minor; 0 for any other device."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return 10 * int(numbers[1]) + int(numbers[2]) if numbers and device.platform == "gpu" else 0


def _lacking(name: str, device: jax.Device, capability: int) -> str | None:
    """What the machine lacks for a backend, or `None`."""
    if name in ("xla", "pallas_interpret"):
        return None
    if name == "cpu":
        if device.platform != "cpu":
            return f"the default device is a {device.platform}"
        return None if os.name == "posix" else "it needs POSIX threads"
    if device.platform != "gpu":
        return f"the default device is a {device.platform}, not a GPU"
    if capability < MIN_CAPABILITY:
        return (
            f"the {device.device_kind}'s compute capability {capability / 10} is below {MIN_CAPABILITY / 10}"
        )
    if name == "mosaic" and capability != 90:
        return f"the {device.device_kind}'s compute capability {capability / 10} is not 9.0 (Hopper)"
    if name == "jax_triton" and importlib.util.find_spec("jax_triton") is None:
        return "jax_triton is not installed: pip install 'jpaged[cuda12]'"
    return None


def _unsupported(name: str, config: ModelConfig, block_size: int, layout: KVLayout) -> str | None:
    """What of a model a backend cannot run, or `None`."""
    if name == "xla":
        return None
    formats = sorted({*layout.k, *layout.v})
    if name == "cpu":
        unread = [format for format in formats if format not in CPU_FORMATS]
        return f"it cannot read a KV cache in {unread[0]}" if unread else None
    for format in formats:
        dtype = layout.dtype if format in LARGEST else format
        shapes: dict[str, Any] = dict(head_dim=config.head_dim, block_size=block_size, dtype=dtype)
        if problem := unsupported(**shapes):
            return problem
        if format != dtype and name in ("mosaic", "jax_triton"):
            return f"its kernel for decode cannot read a KV cache in {format}"
        if name == "mosaic":
            from jpaged.pallas import decode_mosaic

            if problem := decode_mosaic.unsupported(**shapes, group=config.group_size):
                return problem
    return None


def split_qkv(qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, H, D], k and v [T, K, D] of qkv [T, K, G + 2, D]: of each KV head its queries, key and value."""
    num_tokens, kv_heads, rows, head_dim = qkv.shape
    q = qkv[:, :, :-2].reshape(num_tokens, kv_heads * (rows - 2), head_dim)
    return q, qkv[:, :, -2], qkv[:, :, -1]


def _rotated(qkv: jax.Array, k_pool: Pool, v_pool: Pool) -> jax.Array:
    """qkv as the pools want it: queries are turned as keys are."""
    if not (k_pool.is_rotated or v_pool.is_rotated):
        return qkv
    return jnp.concatenate([rotate(qkv[:, :, :-1], k_pool), rotate(qkv[:, :, -1:], v_pool)], axis=2)


def write_kv(
    backend: Backend, k_pool: Pool, v_pool: Pool, qkv: jax.Array, slots: jax.Array
) -> tuple[Pool, Pool]:
    """Stores new tokens' K and V, of qkv [T, K, G + 2, D], rotated where the pools want it.

    See `split_qkv` and `kv_cache.write_kv`.
    """
    qkv = _rotated(qkv, k_pool, v_pool)
    if not backend.uses_kernels:
        _, k, v = split_qkv(qkv)
        return kv_cache.write_kv(k_pool, v_pool, k, v, slots)
    (k_data, k_scale), (v_data, v_scale) = device_arrays(k_pool), device_arrays(v_pool)
    if k_scale is None or v_scale is None:
        k_data, v_data = pallas_write.write_kv(k_data, v_data, qkv, slots, interpret=backend.interpret)
    else:
        k_data, v_data, k_scale, v_scale = pallas_write.write_quantized_kv(
            (k_data, v_data, k_scale, v_scale),
            qkv,
            slots,
            formats=(k_pool.format, v_pool.format),
            interpret=backend.interpret,
        )
    return with_device_arrays(k_pool, k_data, k_scale), with_device_arrays(v_pool, v_data, v_scale)


def paged_decode(
    backend: Backend,
    qkv: jax.Array,
    k_pool: Pool,
    v_pool: Pool,
    tables: jax.Array,
    context_lens: jax.Array,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: str = "float32",
) -> jax.Array:
    """Attention of the last token of each context [S, H, D]: see `attention_xla.paged_decode`.

    Args:
      qkv: [S, K, G + 2, D], as of `split_qkv`; of keys and values what is in the pools is read.
      out_dtype: what the caller will round the result to. The kernels do so themselves as they store it,
        unless it has to be rotated; all else is float32.
    """
    options: dict[str, Any] = dict(window=window, soft_cap=soft_cap)
    qkv = _rotated(qkv, k_pool, v_pool)
    if not backend.uses_kernels:
        q, _, _ = split_qkv(qkv)
        if backend.name == "cpu":
            from jpaged.ops import attention_cpu  # brings a compiler with it

            return attention_cpu.paged_decode(q, k_pool, v_pool, tables, context_lens, **options)
        out = attention_xla.paged_decode(q, k_pool, v_pool, tables, context_lens, **options)
        return rotate(out, v_pool)
    (k_data, k_scale), (v_data, v_scale) = device_arrays(k_pool), device_arrays(v_pool)
    arguments = (qkv, k_data, v_data, tables, context_lens)
    options["dtype"] = k_pool.dtype
    if backend.name == "mosaic":
        from jpaged.pallas import decode_mosaic

        return decode_mosaic.paged_decode_mosaic(*arguments, **options)
    options["capability"] = backend.capability
    if backend.name == "jax_triton":
        from jpaged.pallas import decode_jax_triton

        return decode_jax_triton.paged_decode_jax_triton(*arguments, **options)
    options |= dict(k_scale=k_scale, v_scale=v_scale, interpret=backend.interpret)
    if not v_pool.is_rotated:
        options["out_dtype"] = out_dtype
    return rotate(pallas_decode.paged_decode(*arguments, **options), v_pool)


def paged_prefill(
    backend: Backend, tables: jax.Array, query_start: jax.Array, context_lens: jax.Array, num_tokens: int
) -> Callable[..., jax.Array]:
    """Attention of packed tokens: prepares what all layers share.

    Args:
      query_start: int32 [S + 1], cumulative; sequence s has the packed tokens
        [query_start[s], query_start[s + 1]), the last ones of its context.
      context_lens: int32 [S], tokens in the pool once this step has written its own.
      num_tokens: T, padding included.

    Returns:
      `attend(qkv [T, K, G + 2, D], k_pool, v_pool, *, window=None, soft_cap=None) -> float32 [T, H, D]`;
      qkv as for `paged_decode`.
      Rows of padding tokens hold finite values of no meaning.
    """
    tiles, contexts = None, None
    if backend.name == "xla":
        tiles = attention_xla.query_tiles(query_start, context_lens, num_tokens)
    elif backend.name == "cpu":
        from jpaged.ops import attention_cpu

        sequence, lengths = attention_cpu.token_contexts(query_start, context_lens, num_tokens)
        contexts = tables[sequence], lengths

    def attend(
        qkv: jax.Array,
        k_pool: Pool,
        v_pool: Pool,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        options: dict[str, Any] = dict(window=window, soft_cap=soft_cap)
        qkv = _rotated(qkv, k_pool, v_pool)
        if tiles is not None:
            q, _, _ = split_qkv(qkv)
            out = attention_xla.paged_prefill(q, k_pool, v_pool, tables, tiles, **options)
            return rotate(out, v_pool)
        if contexts is not None:
            return attention_cpu.paged_decode(split_qkv(qkv)[0], k_pool, v_pool, *contexts, **options)
        (k_data, k_scale), (v_data, v_scale) = device_arrays(k_pool), device_arrays(v_pool)
        options |= dict(dtype=k_pool.dtype, k_scale=k_scale, v_scale=v_scale)
        options |= dict(capability=backend.capability, interpret=backend.interpret)
        sequences = tables, query_start, context_lens
        return rotate(pallas_prefill.paged_prefill(qkv, k_data, v_data, *sequences, **options), v_pool)

    return attend
