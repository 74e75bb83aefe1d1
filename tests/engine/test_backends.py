"""Whatever computes attention, an engine gives the same ids; what cannot run says why."""

from __future__ import annotations

import dataclasses
import importlib.util
import types

import jax
import numpy as np
import pytest
from conftest import tiny_config, tiny_params

from jpaged.batch import init_row_state
from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine import engine as engine_module
from jpaged.engine.engine import Engine, _sizes_on_device
from jpaged.engine.runner import temporary_bytes
from jpaged.engine.sizing import resolve_sizes
from jpaged.kv_cache import KVLayout, bytes_per_block
from jpaged.ops.attention import Backend, resolve_backend
from jpaged.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model():
    config = tiny_config(head_dim=64, num_layers=1)
    return config, tiny_params(config)


def run_all(model, backend: str):
    """Six prompts with a common start, in chunks, through a pool that is too small for all of them."""
    sizes = dict(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=16, num_kv_blocks=8)
    engine = Engine(*model, attention_backend=backend, **sizes)
    shared = np.random.default_rng(0).integers(3, 301, 21).tolist()
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for i in range(6):
        engine.add_request([*shared, *[10 + i] * (i + 3)], greedy, request_id=str(i), stream=False)
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        engine.scheduler.check_invariants()
    return done, engine.stats()


def test_kernels_give_the_ids_of_xla_with_prefix_cache_chunks_and_preemption(model):
    expected, _ = run_all(model, "xla")
    got, stats = run_all(model, "pallas_interpret")
    assert got == expected
    assert stats["attention_backend"] == "pallas_interpret"
    assert stats["num_preemptions"] > 0 and stats["prefix_cache_hits"] > 0


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    platform: str
    compute_capability: str = "9.0"
    device_kind: str = "test device"


def resolve(monkeypatch, choice, device, config: ModelConfig | None = None, **options) -> Backend:
    monkeypatch.setattr(jax, "devices", lambda: [device])
    config = config or tiny_config(head_dim=64)
    layout = KVLayout.of(config, options.pop("dtype", "bfloat16"), options.pop("kv_cache_dtype", "auto"))
    return resolve_backend(choice, config, **(dict(block_size=16, layout=layout) | options))


@pytest.mark.parametrize(
    ("device", "options", "name"),
    [
        (FakeDevice("gpu", "9.0"), {}, "pallas"),
        (FakeDevice("gpu", "12.0"), {}, "pallas"),
        (FakeDevice("gpu", "7.5"), {}, "xla"),
        (FakeDevice("gpu"), dict(block_size=8), "xla"),
        (FakeDevice("gpu"), dict(config=tiny_config(head_dim=48)), "xla"),
        (FakeDevice("gpu", "gfx942"), {}, "xla"),  # as AMD's say it
        (FakeDevice("cpu"), {}, "cpu"),
        (FakeDevice("cpu"), dict(dtype="float16"), "xla"),
        (FakeDevice("cpu"), dict(kv_cache_dtype="int8"), "xla"),
    ],
    ids=str,
)
def test_auto_takes_the_kernels_where_they_can_run(monkeypatch, device, options, name):
    backend = resolve(monkeypatch, "auto", device, **options)
    assert backend.name == name
    known = device.platform == "gpu" and device.compute_capability[0].isdigit()
    assert backend.capability == (round(10 * float(device.compute_capability)) if known else 0)


@pytest.mark.parametrize(
    ("choice", "device", "options", "error", "match"),
    [
        ("pallas", FakeDevice("cpu"), {}, NotImplementedError, "'pallas' cannot run here.*cpu, not a GPU"),
        ("pallas", FakeDevice("gpu", "7.5"), {}, NotImplementedError, "capability 7.5 is below 8.0"),
        ("mosaic", FakeDevice("cpu"), {}, NotImplementedError, "'mosaic' cannot run here.*cpu, not a GPU"),
        ("mosaic", FakeDevice("gpu", "8.9"), {}, NotImplementedError, "8.9 is not 9.0"),
        (
            "jax_triton",
            FakeDevice("gpu"),
            {},
            NotImplementedError,
            "jax_triton is not installed: pip install",
        ),
        (
            "cpu",
            FakeDevice("gpu"),
            {},
            NotImplementedError,
            "'cpu' cannot run here: the default device is a gpu",
        ),
        ("cpu", FakeDevice("cpu"), dict(dtype="float16"), ValueError, "cannot read a KV cache in float16"),
        ("pallas", FakeDevice("gpu"), dict(block_size=8), ValueError, "block_size=8 must be 16"),
        ("pallas_interpret", FakeDevice("cpu"), dict(block_size=128), ValueError, "block_size=128"),
        (
            "pallas_interpret",
            FakeDevice("cpu"),
            dict(config=tiny_config(head_dim=48)),
            ValueError,
            "head_dim=48 must be one of",
        ),
    ],
    ids=str,
)
def test_a_backend_chosen_by_name_never_falls_back(monkeypatch, choice, device, options, error, match):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(error, match=match):
        resolve(monkeypatch, choice, device, **options)


def test_an_engine_refuses_kernels_without_a_gpu(model):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(NotImplementedError, match="attention_backend='pallas' cannot run here"):
        Engine(*model, attention_backend="pallas", max_model_len=64)


def test_a_gpus_pool_leaves_room_for_weights_row_state_and_temporaries(model, monkeypatch, caplog):
    config, params = model
    options = EngineConfig(max_num_seqs=64, max_num_batched_tokens=64, max_model_len=512)

    def blocks(limit: int) -> int:
        device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": limit})
        monkeypatch.setattr(jax, "devices", lambda: [device])
        return _sizes_on_device(
            config, options, params, KVLayout.of(config, "float32"), Backend("xla")
        ).num_kv_blocks

    temporaries = 1_000_000
    monkeypatch.setattr(engine_module, "temporary_bytes", lambda *arguments, **named: temporaries)
    state = jax.eval_shape(lambda: init_row_state(64, config.vocab_size))
    fixed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state)))
    block = bytes_per_block(config, 16, KVLayout.of(config, "float32"))
    exact = (fixed + temporaries + 40 * block) / 0.9
    assert [blocks(int(exact) - 1), blocks(int(exact) + 2)] == [39, 40]
    assert not caplog.records
    with pytest.raises(ValueError, match="nothing is left for the KV cache"):
        blocks(int((fixed + temporaries) / 0.9))


def test_temporaries_are_those_of_a_compiled_step(model):
    config, params = model
    options = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32, num_kv_blocks=4)
    sizes = resolve_sizes(
        config, options, layout=KVLayout.of(config, "float32"), platform="cpu", pool_bytes=None
    )
    found = temporary_bytes(
        config, params, sizes, layout=KVLayout.of(config, "float32"), platform="cpu", backend=Backend("xla")
    )
    assert found > 16 * config.hidden_size * 4  # more than one activation
