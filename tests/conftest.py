"""Shared fixtures: tiny models, and an environment in which silent trouble is loud."""

from __future__ import annotations

import gc
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import pytest

from jpaged.config import ModelConfig
from jpaged.models.transformer import Params, init_params

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    use_compilation_cache(str(config.rootpath / ".pytest_cache" / "jax"))


def use_compilation_cache(path: str) -> None:
    """Keeps compiled programs there, between tests and between runs."""
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Forgets compiled programs before they are too many: each maps memory, in 65,530 pieces at most."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()
        gc.collect()


def tiny_config(**changes) -> ModelConfig:
    """A model of two layers that compiles fast; its vocabulary is a multiple of nothing."""
    values = dict(
        vocab_size=301,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_ids=(2,),
    )
    return ModelConfig(**(values | changes))


def tiny_params(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> Params:
    return init_params(config, jax.random.key(seed), dtype)


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return tiny_config()


@pytest.fixture(scope="session")
def params(config: ModelConfig) -> Params:
    return tiny_params(config)


@pytest.fixture(scope="session")
def params_bf16(params: Params) -> Params:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
