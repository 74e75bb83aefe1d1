"""Fills in what an `EngineConfig` leaves open: lengths, batch sizes, and the size of the KV pool."""

from __future__ import annotations

import dataclasses
import logging

import jax

from jpaged.config import EngineConfig, ModelConfig
from jpaged.kv_cache import KVLayout, bytes_per_block
from jpaged.pallas.common import addressable_blocks

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 2 << 30

# (max_num_seqs, max_num_batched_tokens): a CPU is busy with far fewer rows than a GPU.
_DEFAULT_BATCH = {"cpu": (64, 512)}
_DEFAULT_BATCH_GPU = (256, 2048)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the engine is built with. `num_kv_blocks` does not count the null block."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    kv_block_bytes: int

    @property
    def table_width(self) -> int:
        return -(-self.max_model_len // self.block_size)


def resolve_sizes(
    model: ModelConfig, engine: EngineConfig, *, layout: KVLayout, platform: str, pool_bytes: int | None
) -> Sizes:
    """Derives the sizes that the configuration leaves open.

    Args:
      pool_bytes: what the device has left for the pool; `None` where nobody measured (a CPU).

    Raises:
      ValueError: a value contradicts the model or another value; the message names both.
    """
    seqs, tokens = _DEFAULT_BATCH.get(platform, _DEFAULT_BATCH_GPU)
    max_num_seqs = engine.max_num_seqs or min(seqs, engine.max_num_batched_tokens or seqs)
    max_tokens = engine.max_num_batched_tokens or max(tokens, max_num_seqs)
    if max_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={max_tokens} must be at least max_num_seqs={max_num_seqs}: "
            "every running sequence decodes one token per step"
        )
    longest = model.max_supported_len
    if engine.max_model_len is not None and engine.max_model_len > longest:
        raise ValueError(
            f"max_model_len={engine.max_model_len} must be at most {longest}, the model's own limit"
        )
    max_model_len = engine.max_model_len or longest
    block_bytes = bytes_per_block(model, engine.block_size, layout)
    blocks = _num_blocks(engine, max_model_len, max_num_seqs, block_bytes, pool_bytes)
    if (
        platform != "cpu" and engine.num_kv_blocks is None
    ):  # what the kernels can address, null block included
        blocks = min(blocks, addressable_blocks(model, engine.block_size) - 1)
    if blocks < 1:
        raise ValueError(f"the KV cache has no room for one block of {block_bytes} bytes; {_HINT}")
    if engine.max_model_len is None and blocks * engine.block_size < max_model_len:
        max_model_len = blocks * engine.block_size
        logger.warning(
            "max_model_len is %d instead of the model's %d: the KV cache holds no more; %s",
            max_model_len,
            longest,
            _HINT,
        )
    return Sizes(max_model_len, max_num_seqs, max_tokens, engine.block_size, blocks, block_bytes)


_HINT = "raise num_kv_blocks, kv_cache_memory_bytes or gpu_memory_utilization"


def _num_blocks(
    engine: EngineConfig, max_model_len: int, max_num_seqs: int, block_bytes: int, pool_bytes: int | None
) -> int:
    if engine.num_kv_blocks is not None:
        return engine.num_kv_blocks
    if engine.kv_cache_memory_bytes is not None:
        return engine.kv_cache_memory_bytes // block_bytes
    most_useful = max_num_seqs * -(-max_model_len // engine.block_size)
    if pool_bytes is None:
        pool_bytes = CPU_POOL_BYTES
    return min(pool_bytes // block_bytes, most_useful)


def device_pool_bytes(
    device: jax.Device, utilization: float, weight_bytes: int, temporary_bytes: int
) -> int | None:
    """Bytes that a GPU's pool may take; `None` on a CPU, whose memory nobody limits.

    Raises:
      ValueError: weights and temporaries leave nothing.
    """
    if device.platform == "cpu":
        return None
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        raise ValueError(f"{device} does not tell its memory: pass num_kv_blocks or kv_cache_memory_bytes")
    left = int(limit * utilization) - weight_bytes - temporary_bytes
    if left <= 0:
        raise ValueError(
            f"nothing is left for the KV cache: {limit} bytes x gpu_memory_utilization={utilization}, less "
            f"{weight_bytes} of weights, less {temporary_bytes} of temporaries. JAX preallocates a share of "
            "the memory: set XLA_PYTHON_CLIENT_MEM_FRACTION (0.95, say) before jax is imported"
        )
    return left
