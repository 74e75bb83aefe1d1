"""jpaged's own checkpoint directories: the round trip, the script, faults by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.config import ModelConfig
from jpaged.weights import load_model, open_checkpoint, orbax

ROOT = Path(__file__).parents[2]


@pytest.fixture
def saved(lab, tmp_path):
    """A qwen2 model with windows and yarn, saved in bfloat16, and what was saved."""
    model = lab.tiny(
        "qwen2",
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        eos_token_id=[3, 4],
    )
    loaded = load_model(lab.write_hf(tmp_path / "hf", model), "bfloat16")
    orbax.save(tmp_path / "saved", loaded.config, loaded.params)
    return tmp_path / "saved", model, loaded


def test_a_saved_model_comes_back_bit_by_bit(lab, saved):
    path, model, loaded = saved
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == ModelConfig.from_hf(model.config).replace(dtype="bfloat16") == loaded.config
    assert checkpoint.config.layer_windows == (None, 8)
    lab.assert_same(checkpoint.load_params(), lab.expected(model), "bfloat16")
    assert checkpoint.load_tokenizer() is None


def test_another_dtype_may_be_asked_for(lab, saved):
    path, _, loaded = saved
    params = open_checkpoint(path).load_params("float32")
    lab.assert_same(
        params, {name: leaf.astype("float32") for name, leaf in lab.leaves(loaded.params).items()}
    )


def test_a_config_that_does_not_fit_the_arrays_is_refused_by_name(saved):
    path, _, _ = saved
    file = path / orbax.METADATA
    whole = json.loads(file.read_text())
    for change, words in (
        ({"vocab_size": 97}, r"embed is \(96, 32\), needs \(97, 32\)"),
        ({"num_layers": 1, "layer_windows": [None]}, "layers.1.attn_norm is .*, needs to be absent"),
        ({"out_bias": True}, r"layers.0.bo is absent, needs \(32,\)"),
    ):
        file.write_text(json.dumps(whole | {"config": whole["config"] | change}))
        with pytest.raises(ValueError, match=words):
            open_checkpoint(path).load_params()


def test_other_versions_and_broken_metadata_are_refused(saved):
    path, _, _ = saved
    whole = json.loads((path / orbax.METADATA).read_text())
    for text, words in (
        (json.dumps(whole | {"version": 2}), "version=2 is not supported"),
        (json.dumps(whole | {"config": whole["config"] | {"surprise": 1}}), "surprise"),
        ("{", "jpaged.json cannot be read"),
    ):
        (path / orbax.METADATA).write_text(text)
        with pytest.raises(ValueError, match=words):
            open_checkpoint(path)


def test_nothing_is_overwritten_and_parameters_must_fit(saved, tmp_path):
    path, _, loaded = saved
    with pytest.raises(ValueError, match="must be an empty directory"):
        orbax.save(path, loaded.config, loaded.params)
    with pytest.raises(ValueError, match="params do not have the tree"):
        orbax.save(tmp_path / "new", loaded.config.replace(vocab_size=97), loaded.params)
    assert not (tmp_path / "new").exists()


def test_the_script_converts_and_reports_faults(lab, tmp_path):
    model = lab.tiny()
    lab.write_hf(tmp_path / "hf", model)

    def run(*args):
        command = [sys.executable, str(ROOT / "scripts" / "convert_checkpoint.py"), *map(str, args)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    done = run("--model", tmp_path / "hf", "--output", tmp_path / "out", "--dtype", "float16")
    assert done.returncode == 0, done.stderr
    lab.assert_same(open_checkpoint(tmp_path / "out").load_params(), lab.expected(model), "float16")
    failed = run("--model", tmp_path / "hf", "--output", tmp_path / "out")
    assert failed.returncode == 1 and "must be an empty directory" in failed.stderr
